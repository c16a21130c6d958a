"""What is committed of the golden runs, and bugs that their comparison must see."""

import json
from typing import Any

import pytest
from faults import noise_times
from golden import runs
from golden.compare import EXPECTED, difference, summary

from hf_dp.plans.samplers import PoissonSampler

WANTED = json.loads(EXPECTED.read_text())
REFUSED = WANTED.pop("refused")
BITS = "seeded: float64"
QUICK = {
    BITS, "secret: users", "secret: noised_loss", "secret: fresh", "secret: lora + killed",
}  # fmt: skip


def close(wanted: Any, absolute: float = 1e-9) -> Any:
    """Numbers to five digits, since processors round differently; epsilons are rounded up to
    0.001."""
    if isinstance(wanted, dict):
        return {
            name: close(value, 1.1e-3 if "epsilon" in name else absolute)
            for name, value in wanted.items()
        }
    if isinstance(wanted, list):
        return [close(value, absolute) for value in wanted]
    return pytest.approx(wanted, 2e-5, absolute) if isinstance(wanted, float) else wanted


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WANTED],
)
def test_ledger_log_statement_and_weights_are_as_committed(name, tmp_path):
    assert summary(runs.JOBS[name](tmp_path / "model")) == close(WANTED[name])


@pytest.mark.slow
def test_the_same_pairs_of_features_are_refused(tmp_path):
    found = {pair: runs.refusal(pair, tmp_path / str(n)) for n, pair in enumerate(runs.PAIRS)}
    assert [pair for pair, verdict in found.items() if verdict == "refused"] == REFUSED


def test_every_run_is_committed():
    assert {name.removeprefix("secret: ") for name in WANTED} == {*runs.RUNS, BITS}


def skip_a_draw(patch: Any) -> None:
    draw = PoissonSampler.draw
    patch.setattr(PoissonSampler, "draw", lambda self: (draw(self), draw(self))[1])


PLANTS = {"noise": noise_times(1.01), "draws": skip_a_draw}


def test_a_run_agrees_with_itself_in_every_bit_and_planted_bugs_are_seen(tmp_path, monkeypatch):
    first = runs.run("float64", tmp_path / "first" / "model")
    again = runs.run("float64", tmp_path / "again" / "model")
    assert difference(first, again) is None
    for name, plant in PLANTS.items():
        with monkeypatch.context() as patch:
            plant(patch)
            planted = runs.run("float64", tmp_path / name / "model")
        assert difference(first, planted).startswith("/weights")
        assert summary(planted) != close(WANTED[BITS])


def test_each_kind_of_difference_is_named():
    ours = {"ledger": [{"steps": 4}], "log": [{"loss": 1.0, "epoch": float("nan")}]}
    for change, expected in (
        ({"ledger": [{"steps": 5}]}, "/ledger/0/steps: 4, there 5"),
        ({"ledger": []}, "/ledger: 1 and 0, one without {'steps': 4}"),
        ({"log": [{"epoch": float("nan")}]}, "/log/0/loss: only here"),
        ({"log": [{"loss": 1.0 + 1e-15, "epoch": float("nan")}]}, "/log/0/loss: 1.0, there 1.0"),
        ({}, "None"),
    ):
        assert str(difference(ours, {**ours, **change})).startswith(expected)
