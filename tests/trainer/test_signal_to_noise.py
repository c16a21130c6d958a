"""The logged signal to noise, against the clipped sum before any noise."""

import math

import pytest
import tiny
import torch
from torch import nn
from watch import watch

from hf_dp.cli.tasks import signal_to_noise
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import PvalConfig

pytestmark = pytest.mark.usefixtures("unchecked")


def run_of(folder, multiplier, **given):
    """A run of four steps, and |g|^2 / E|z|^2 of each from its sums before noise."""
    options = {"noise_multiplier": multiplier, "accountant": "rdp", "max_steps": 4, **given}
    trainer = tiny.trainer(folder, **options)
    plan = trainer.privacy_plan

    def ratio(clipped, batches):
        signal = sum(float(total.double().square().sum()) for total in clipped.values.values())
        numbers = sum(total.numel() for total in clipped.values.values())
        return signal / (numbers * (plan.noise_multiplier * plan.clipping_norm) ** 2)

    with pytest.MonkeyPatch.context() as patch:
        true = watch(patch, trainer.mechanism, "clip", ratio)
        trainer.train()
    return trainer, true


def logged(folder, multiplier, **given):
    """What four steps log, and |g|^2 / E|z|^2 from their sums before noise."""
    trainer, true = run_of(folder, multiplier, **given)
    return [log["signal_to_noise"] for log in trainer.state.log_history if "grad_norm" in log], true


def spread(exact):
    """Six standard deviations of |g + z|^2 / E|z|^2, by those of 2 g z and of |z|^2."""
    numbers = sum(p.numel() for p in tiny.model().parameters())
    return 6 * math.sqrt(4 * exact / numbers + 2 / numbers)


def test_it_is_what_was_clipped_beside_little_noise_and_nothing_beside_much(tmp_path):
    found, true = logged(tmp_path, 0.02)
    assert max(true) > 0.1
    for each, exact in zip(found, true, strict=True):
        assert abs(each - exact) < spread(exact)
    found, true = logged(tmp_path / "much", 100.0)
    assert max(true) < 1e-3
    assert all(abs(each) < spread(0) for each in found)


def test_where_gradients_are_not_the_noised_sum_none_is_logged_and_the_mean_is_of_30_steps(
    tmp_path,
):
    for number, config in enumerate((RgpConfig(rank=2), PvalConfig(unfreeze_ratio=0.25))):
        given = {"peft_config": config}
        trainer = tiny.trainer(tmp_path / str(number), given=given, accountant="rdp", max_steps=1)
        trainer.train()
        assert not any("signal_to_noise" in log for log in trainer.state.log_history)
    assert signal_to_noise(trainer.state.log_history) == {}
    logs = [{"signal_to_noise": of, "step": step} for of, step in ((1.0, 1), (2.0, 30), (9.0, 31))]
    assert signal_to_noise([*logs, {"loss": 3.0}]) == {"signal_to_noise": 1.5}


def test_the_norm_of_a_large_gradient_is_not_that_of_float32(tmp_path):
    trainer = tiny.trainer(tmp_path)
    model = nn.Linear(10**7, 3, bias=False)
    model.weight.grad = torch.full_like(model.weight, 0.1)
    trainer.model = model
    assert float(trainer._get_grad_norm(model)) == pytest.approx(0.1 * (3e7) ** 0.5, rel=1e-6)
    assert trainer._get_grad_norm(model, 2.0) == 2.0


# -- measured, where the user lets the norms out ---


def test_the_measured_ratio_is_that_of_the_sums_before_noise(tmp_path):
    # (The noise has a margin for rounding, which the true ratio here leaves out.)
    trainer, true = run_of(tmp_path, 2.0, release=["clipped_gradient_norm"])
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert [log["measured_signal_to_noise"] for log in logs] == pytest.approx(true, rel=2e-3)
    noise = trainer.mechanism.noise_norm
    norms = [log["clipped_gradient_norm"] for log in logs]
    assert [norm**2 / noise**2 for norm in norms] == pytest.approx(true, rel=2e-3)
    mean = signal_to_noise(trainer.state.log_history)["measured_signal_to_noise"]
    assert mean == pytest.approx(sum(true) / len(true), rel=2e-3)
    statement = str(trainer.privacy_statement())
    assert "clipped_gradient_norm (norms of clipped gradients before noise)" in statement
    assert "covers the weights only" in statement or "released weights alone" in statement


def test_without_a_word_of_the_user_no_norm_before_noise_leaves(tmp_path):
    trainer, _ = run_of(tmp_path, 2.0)
    names = {name for log in trainer.state.log_history for name in log}
    assert not {"clipped_gradient_norm", "measured_signal_to_noise"} & names
