"""The moving average of the weights: what it is, where it is seen, and how it is resumed."""

from __future__ import annotations

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dp.cards.verify import verify
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.tuners.rgp.config import RgpConfig

DECAY = 0.6
AVERAGED = {"weight_average_decay": DECAY, "max_steps": 8}


class Weights(TrainerCallback):
    """Notes the weights after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: p.detach().clone() for name, p in model.named_parameters()})


def by_hand(after: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """De et al. 2022: d = min(decay, (1 + t) / (10 + t)) from the second step on, in float64."""
    average = {name: value.double() for name, value in after[0].items()}
    for t, weights in enumerate(after[1:], start=1):
        d = min(DECAY, (1 + t) / (10 + t))
        average = {n: d * v + (1 - d) * weights[n].double() for n, v in average.items()}
    return average


def assert_close(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


def now(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(folder, **options):
    trainer, seen = tiny.trainer(folder, **AVERAGED | options), Weights()
    trainer.add_callback(seen)
    return trainer, seen


def test_the_model_ends_with_the_average_and_checkpoints_hold_the_weights(tmp_path):
    trainer, seen = trained(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    assert_close(now(trainer), by_hand(seen.after))
    assert (now(trainer)["classifier.weight"] - seen.after[-1]["classifier.weight"]).abs().max() > 0
    for step in (4, 8):
        assert_close(
            load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors"),
            {name: value.double() for name, value in seen.after[step - 1].items()},
        )
    trainer.save_model()
    assert_close(load_file(tmp_path / "model.safetensors"), by_hand(seen.after))
    assert verify(tmp_path).outcome != "FAILED"
    assert "| weight_average_decay | 0.6 |" in (tmp_path / "README.md").read_text()


def test_evaluation_during_training_reads_the_average(tmp_path):
    class Evaluations(TrainerCallback):
        weights = {}

        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            seen = {n: p.detach().clone() for n, p in model.named_parameters()}
            self.weights[state.global_step] = seen

    trainer, seen = trained(tmp_path, eval_strategy="steps", eval_steps=3, max_steps=4)
    trainer.add_callback(Evaluations())
    trainer.train()
    assert_close(Evaluations.weights[3], by_hand(seen.after[:3]))
    # The step after it went on from the weights, not from their average.
    moved = (seen.after[3]["classifier.weight"] - seen.after[2]["classifier.weight"]).abs().max()
    assert 0 < moved <= 1.1 * trainer.args.learning_rate * 3.2


def test_a_resumed_run_goes_on_with_the_average(tmp_path):
    first, before = trained(tmp_path, save_strategy="steps", save_steps=5)
    first.train()
    again, after = trained(tmp_path, save_strategy="steps", save_steps=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert len(after.after) == 3
    assert_close(now(again), by_hand([*before.after[:5], *after.after]))


def test_a_run_without_it_ignores_an_average_in_a_checkpoint(tmp_path):
    first, _ = trained(tmp_path, save_strategy="steps", save_steps=5)
    first.train()
    again, seen = trained(tmp_path, weight_average_decay=None)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_close(now(again), {name: value.double() for name, value in seen.after[-1].items()})


def test_a_second_training_goes_on(tmp_path):
    trainer, seen = trained(tmp_path, max_steps=3)
    trainer.train()
    ended = now(trainer)
    trainer.train()
    assert len(seen.after) == 6
    # Its first step starts from the average that the first training ended with.
    for name, value in seen.after[3].items():
        assert (value - ended[name]).abs().max() < 0.05


@pytest.mark.parametrize("options", [{"optim": "sgd"}, {"adam_bc_floor": 0.1}])
def test_other_optimizers(tmp_path, options):
    trainer, seen = trained(tmp_path, **options)
    trainer.train()
    assert_close(now(trainer), by_hand(seen.after))


def test_what_is_refused(tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="`weight_average_decay`.*peft_config"):
        tiny.trainer(tmp_path / "rgp", **AVERAGED, given={"peft_config": RgpConfig(rank=2)}).train()
    with pytest.raises(UnsupportedArgumentError, match=r"unset with weights in torch\.bfloat16"):
        tiny.trainer(
            tmp_path / "bf16", **AVERAGED, given={"model": tiny.model().bfloat16()}
        ).train()
