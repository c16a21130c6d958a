"""Classifiers that read at the last end token train and evaluate on rows with any number of them."""

import datasets
import pytest
import tiny
import torch
import transformers as hf
from peft import LoraConfig
from transformers import DataCollatorWithPadding

from hf_dp import losses
from hf_dp.errors import DataError, SelfCheckError
from hf_dp.losses import each_row_read_as_alone, per_example_loss

END = 3
BART = {
    "vocab_size": 19, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": END, "decoder_start_token_id": END, "forced_eos_token_id": END, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_type": "original_full",
}  # fmt: skip
T5 = {
    "vocab_size": 19, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
CLASSES = {"Bart": BART, "BigBirdPegasus": BART, "MBart": BART, "Mvp": BART, "PLBart": BART,
           "T5": T5, "MT5": T5, "UMT5": T5}  # fmt: skip


def model_of(name: str):
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**CLASSES[name], num_labels=2)
    return getattr(hf, f"{name}ForSequenceClassification")(config)


def rows(count: int = 12, ends=(1, 2, 3), first: int = 2) -> list[dict]:
    made = []
    for i in range(count):
        body = [token for j in range(ends[i % len(ends)] - 1) for token in (4 + (i + j) % 12, END)]
        ids = [first, *body, 5 + i % 9, END]
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % 2})
    return made


def padded(some: list[dict]) -> dict:
    return dict(DataCollatorWithPadding(tiny.tokenizer())(some))


@pytest.mark.parametrize("name", CLASSES)
def test_each_loss_and_gradient_is_that_of_the_row_alone(name):
    model = model_of(name).double().eval()
    some = rows(3)
    with each_row_read_as_alone(model):  # as around a loss of the user's own, which may call ours
        found = per_example_loss(model, padded(some))
    of_head = list(model.classification_head.parameters())
    for place, row in enumerate(some):
        own = model(**{key: torch.tensor([value]) for key, value in row.items()}).loss
        torch.testing.assert_close(found[place], own, rtol=1e-6, atol=0)
        ours = torch.autograd.grad(found[place], of_head, retain_graph=True)
        for one, other in zip(ours, torch.autograd.grad(own, of_head), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="same number of <eos>"):  # hooks are gone
        model(**padded(some))


def trainer_of(folder, name="Bart", data=None, **given):
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "expected_batch_size": 8}
    made = {"model": model_of(name), "train_dataset": datasets.Dataset.from_list(data or rows()),
            "eval_dataset": datasets.Dataset.from_list(rows(6, first=17))}  # fmt: skip
    made["data_collator"] = DataCollatorWithPadding(tiny.tokenizer())
    return tiny.trainer(folder, given=made | given, **options, eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_a_run_trains_and_evaluates(name, tmp_path):
    layers = {"target_modules": ["k_proj", "k"], "modules_to_save": ["classification_head"]}
    adapter = LoraConfig(r=2, **layers)
    trainer = trainer_of(tmp_path, name, peft_config=adapter if name == "T5" else None)
    trainer.train()
    assert trainer.ledger.steps() == 2 and trainer.evaluate()["eval_loss"] > 0


def test_a_row_without_an_end_token_is_found_before_the_first_draw(tmp_path):
    data = rows()
    data[7]["input_ids"][-1] = 9
    data[7]["input_ids"] = [9 if token == END else token for token in data[7]["input_ids"]]
    with pytest.raises(DataError, match=r"Row 7 .* no end token \(3\), where BartFor.*truncate"):
        trainer_of(tmp_path, data=data).train()


def test_planted_rows_that_must_be_alike_are_found_by_the_self_check(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "_READ_AT_THE_END", frozenset())
    trainer = trainer_of(tmp_path, data=rows(ends=(1,)))
    message = r"examples of .*input_ids': \(3, 12\).*same number of <eos>.*in common"
    with pytest.raises(SelfCheckError, match=message):
        trainer.train()
    assert trainer.ledger.steps() == 0
