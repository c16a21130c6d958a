"""A learning rate that falls with the signal: what it is, what it does not touch, resumes."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn
from transformers import TrainerCallback

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer.noise_aware import NoiseAware
from hf_dp.tuners.rgp.config import RgpConfig


def factors_by_hand(norms: list[float], noise: float, floor: float) -> list[float]:
    """1 - noise^2 / the bias-corrected average of squared norms, relative to the largest so far."""
    found, gains = [], []
    for t in range(1, len(norms) + 1):
        weights = [0.9 ** (t - 1 - i) for i in range(t)]
        mean = sum(w * n**2 for w, n in zip(weights, norms, strict=False)) / sum(weights)
        gains.append(max(1 - noise**2 / mean, 0))
        found.append(max(gains[-1] / max(gains) if max(gains) else 0, floor))
    return found


def test_steps_shrink_with_the_gain_and_rates_stay_the_schedules():
    norms, noise = [5.0, 4.0, 6.0, 3.2, 3.0, 2.0, 1.0, 0.5, 0.1, 0.1], 3.0
    floor, rate = 0.25, 0.5
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], rate)
    aware = NoiseAware(optimizer, lambda: noise, floor)
    expected = factors_by_hand(norms, noise, floor)
    assert floor in expected and len(set(expected)) > 4
    for norm, factor in zip(norms, expected, strict=True):
        weight.grad = torch.full((4,), norm / 2, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - weight, rate * factor * weight.grad)
        assert aware.factor == pytest.approx(factor)
        assert optimizer.param_groups[0]["lr"] == rate


def test_the_gain_is_estimated_from_noised_gradients():
    """Of N(0, 1) noise in 10,000 coordinates around a signal of half its norm, and then a tenth."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(10_000))
    aware = NoiseAware(torch.optim.SGD([weight], 1.0), lambda: 100.0, 0.0)
    for signal in [50.0] * 30 + [10.0] * 80:
        weight.grad = torch.randn(10_000, generator=generator) + signal / 100
        aware.optimizer.step()
    true = (10**2 / (10**2 + 100**2)) / (50**2 / (50**2 + 100**2))
    assert aware.factor == pytest.approx(true, abs=0.04)  # 4 deviations of the average


def test_without_any_signal_the_floor_is_left():
    weight = nn.Parameter(torch.zeros(4))
    aware = NoiseAware(torch.optim.SGD([weight], 1.0), lambda: 100.0, 0.1)
    weight.grad = torch.ones(4)
    aware.optimizer.step()
    assert aware.factor == 0.1


class Factors(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "learning_rate_factor" in logs:
            self.seen.append((logs["learning_rate_factor"], logs["learning_rate"]))


OPTIONS = {
    "noise_aware_floor": 0.3,
    "noise_multiplier": 0.5,
    "max_steps": 8,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}


def test_the_trainer_tells_it_its_noise_and_logs_the_factor(tmp_path):
    trainer, logs, norms = tiny.trainer(tmp_path, **OPTIONS), Factors(), []
    trainer.add_callback(logs)

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.cat([g.flatten() for g in grads]).double().norm()))

    trainer.add_callback(Norms())
    trainer.train()
    noise = trainer.mechanism.noise_norm
    expected = factors_by_hand(norms, noise, 0.3)
    assert [factor for factor, _ in logs.seen] == pytest.approx(expected, rel=1e-4)
    assert {rate for _, rate in logs.seen} == {trainer.args.learning_rate}
    trainer.save_model()
    assert "| noise_aware_floor | 0.3 |" in (tmp_path / "README.md").read_text()


def test_a_resumed_run_remembers(tmp_path):
    kept = {"save_strategy": "steps", "save_steps": 4}
    tiny.trainer(tmp_path, **OPTIONS | kept).train()
    again = tiny.trainer(tmp_path, **OPTIONS | kept)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    remembered = again._noise_aware.optimizer.param_groups[0]["noise_aware"]
    assert remembered["steps"] == 8


def test_what_has_other_noise_is_refused(tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="`noise_aware_floor` to be unset with this"):
        tiny.trainer(tmp_path, noise_aware_floor=0.1, given={"peft_config": RgpConfig()}).train()
    with pytest.raises(UnsupportedArgumentError, match="`noise_aware_floor` to be left at None"):
        tiny.trainer(
            tmp_path,
            noise_aware_floor=0.1,
            privacy_mode="dp_fp",
            dp_fp_variant="frozen",
        )
