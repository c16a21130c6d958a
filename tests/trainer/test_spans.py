"""Question answering from spans: two cross-entropies, one loss for each example."""

from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from peft import LoraConfig
from torch import nn

from hf_dp.cards.verify import verify
from hf_dp.clipping import ClippingEngine
from hf_dp.errors import DataError
from hf_dp.losses import per_example_loss

WORDS = 40


def bert() -> Any:
    return hf.BertForQuestionAnswering(tiny.model().config)


def gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    return hf.GPT2ForQuestionAnswering(config)


def bart() -> Any:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
    )  # fmt: skip
    return hf.BartForQuestionAnswering(config)


MODELS = {"bert": bert, "gpt2": gpt2, "bart": bart}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def row(length: int, start: int, end: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed + length)
    ids = torch.randint(4, 12, (length,)).tolist()
    places = {"start_positions": start, "end_positions": end}
    return {"input_ids": ids, "attention_mask": [1] * length, **places}


ROWS = [row(5, 1, 3), row(9, 0, 0), row(2, 1, 1), row(9, 8, 8)]


def together() -> dict[str, torch.Tensor]:
    return dict(hf.DataCollatorWithPadding(tiny.tokenizer())(ROWS))


def own_losses(model: nn.Module) -> list[torch.Tensor]:
    """Of one row at a time, without padding, by the model's own forward."""
    return [
        model(**{name: torch.tensor([value]) for name, value in each.items()}).loss for each in ROWS
    ]


@pytest.mark.parametrize("name", MODELS)
def test_each_loss_and_norm_is_that_of_the_row_alone(name):
    model = made(name)
    losses = own_losses(model)
    expected = torch.stack([loss.detach() for loss in losses])
    torch.testing.assert_close(per_example_loss(model, together()), expected, rtol=1e-9, atol=0)
    norms = []
    for loss in losses:
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        norms.append(sum(g.square().sum() for g in grads if g is not None).sqrt())
    with ClippingEngine(model, clipping_norm=0.1) as engine:
        found = engine.backward(per_example_loss(model, together()))
    torch.testing.assert_close(found, torch.stack(norms), rtol=1e-9, atol=0)


def test_planted_padding_that_takes_part_is_seen(monkeypatch):
    model = made("bert")
    expected = torch.stack(own_losses(model))
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: self)
    found = per_example_loss(model, together())
    assert not torch.allclose(found[:1], expected[:1], rtol=1e-3)
    assert torch.allclose(found[1:2], expected[1:2])  # the longest has none


def trainer(folder: Any, rows: list[dict[str, Any]] | None = None, **given: Any) -> Any:
    rows = [row(3 + i % 5, 1, 2, i) for i in range(40)] if rows is None else rows
    held_out = [row(12, i, i + 1, 90) for i in range(8)]
    keywords = {"model": bert(), "train_dataset": rows, "eval_dataset": held_out, **given}
    return tiny.trainer(folder, given=keywords, max_steps=1)


def test_it_trains_and_the_card_says_the_task(tmp_path):
    made = trainer(tmp_path, processing_class=tiny.tokenizer(), peft_config=LoraConfig(r=2))
    assert made.model.peft_config["default"].task_type == "QUESTION_ANS"
    made.train()
    assert made.evaluate()["eval_loss"] > 0
    made.describe(base_model="you/base")
    made.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: question-answering" in card
    assert "AutoModelForQuestionAnswering.from_pretrained(" in card
    assert verify(tmp_path).outcome == "ok"


BAD = {
    "beyond its own tokens": {"end_positions": 4},
    "below 0": {"start_positions": -1},
    "in its padding": {"attention_mask": [1, 1, 1, 0]},
}


@pytest.mark.parametrize("case", BAD)
def test_a_place_that_is_no_token_of_the_row_is_named(case, tmp_path):
    rows = [row(6, 1, 3), {**row(4, 2, 3), **BAD[case]}, row(9, 1, 3)] * 8
    with pytest.raises(DataError, match="Row 1 of .*_positions` holds .*Expected the place of one"):
        trainer(tmp_path, rows).run.training_data()


def test_rows_without_places_and_left_padding_are_refused_by_name(tmp_path):
    rows = [{k: v for k, v in row(4, 1, 2, i).items() if k != "end_positions"} for i in range(40)]
    made = trainer(tmp_path, rows)
    with pytest.raises(DataError, match="no `end_positions`"):
        made.train()
    batch = {**together(), "attention_mask": together()["attention_mask"].flip(1)}
    with pytest.raises(DataError, match="padding_side = 'right'"):
        per_example_loss(bert(), batch)
