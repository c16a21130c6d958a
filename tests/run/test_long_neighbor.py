"""What a model does only from a length on is found with the longest row, before a draw."""

from __future__ import annotations

import datasets
import pytest
import tiny
import torch
import transformers as hf
from transformers import BertForSequenceClassification

from hf_dp.errors import SelfCheckError

FROM = 16  # the self-check's own examples have 12 tokens at most


class ScalesWithThePaddedLength(BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if input_ids.shape[1] >= FROM:
            output.logits = output.logits * 3
        return output


def rows(longest: int) -> datasets.Dataset:
    tokens = [[5 + i % 7] * length for i, length in enumerate([3, 5, 4, longest] * 10)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": [[1] * len(each) for each in tokens],
            "label": [i % 2 for i in range(40)],
        }
    )


def scaling() -> ScalesWithThePaddedLength:
    torch.manual_seed(0)
    return ScalesWithThePaddedLength(tiny.model().config)


def trainer_on(folder, longest: int, **given):
    given = {"train_dataset": rows(longest), "eval_dataset": None, **given}
    return tiny.trainer(folder, given=given, max_steps=1, accountant="rdp")


def test_a_model_that_changes_from_a_length_on_is_refused(tmp_path):
    trainer = trainer_on(tmp_path, FROM, model=scaling())
    with pytest.raises(SelfCheckError, match="beside one as long as the longest row"):
        trainer.train()
    assert len(trainer.ledger) == 0


def test_shorter_rows_and_an_ordinary_model_are_not(tmp_path):
    trainer_on(tmp_path / "shorter", FROM - 1, model=scaling()).train()
    trainer_on(tmp_path / "ordinary", FROM).train()


def test_where_made_up_rows_do_not_pass_the_collator(tmp_path):
    """Its own inputs, as long as the longest row, stand for them."""

    class Refuses:
        """Of rows it takes those of the data set only."""

        def __init__(self):
            self.pad = hf.DataCollatorWithPadding(tiny.tokenizer())

        def __call__(self, features):
            if any(len(set(row["input_ids"])) > 1 for row in features):
                raise ValueError("not one of ours")
            return self.pad(features)

    with pytest.raises(SelfCheckError, match="beside one as long as the longest row"):
        trainer_on(tmp_path, FROM, model=scaling(), data_collator=Refuses()).train()


def llama4() -> hf.Llama4ForCausalLM:
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, intermediate_size_mlp=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_local_experts=1, interleave_moe_layer_step=10, max_position_embeddings=64,
        no_rope_layers=[0, 0], attn_temperature_tuning=True, floor_scale=16, attn_scale=2.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_chunk_size=64,
    )  # fmt: skip
    return hf.Llama4ForCausalLM(config)


@pytest.mark.parametrize(("side", "refused"), [("left", True), ("right", False)])
def test_llama_4_scales_attention_by_places_in_the_padded_row(tmp_path, side, refused):
    """From ``floor_scale`` on, 8,192 in the published models."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = side
    tokens = [[5 + i % 7, 6, 7][: 2 + i % 2] * (1 if i % 4 else 16) for i in range(40)]
    data = datasets.Dataset.from_dict(
        {"input_ids": tokens, "attention_mask": [[1] * len(each) for each in tokens]}
    )
    given = {
        "model": llama4(),
        "train_dataset": data,
        "eval_dataset": None,
        "data_collator": hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    }
    trainer = tiny.trainer(tmp_path, given=given, max_steps=1, accountant="rdp")
    if refused:
        with pytest.raises(SelfCheckError, match="as long as the longest row"):
            trainer.train()
    else:
        trainer.train()


def test_nothing_is_left_of_the_check(tmp_path):
    trainer = trainer_on(tmp_path, FROM)
    trainer.model.eval()
    trainer.run.check_engine()
    assert not trainer.model.training
