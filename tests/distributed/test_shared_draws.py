"""Draws of several processes: together they are one draw of the main process, cut ones, too, by rows,
users and classes; with planted bugs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import coordinates
import numpy as np
import pytest
import silence
import tiny
import torch
import users
from processes import on_processes, outcomes, results
from scipy import stats
from silence import weights
from transformers import TrainerCallback
from watch import watch

from hf_dp.accounting import TruncatedPoissonSampledGaussian, epsilon
from hf_dp.accounting.events import TruncatedBandedGaussian
from hf_dp.batches import when_drawn
from hf_dp.distributed.draws import SharedDraws
from hf_dp.distributed.processes import Processes
from hf_dp.plans.samplers import AllocationSampler, PoissonSampler
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read

pytestmark = pytest.mark.usefixtures("unchecked")

REJECT, STEPS = 1e-9, 300
Parts = list[list[list[int]]]  # of each process, its part of each draw


def parts(count: int, rate: float, cap: int | None = None) -> Parts:
    """What each process gets of 300 draws of 40."""

    def drawn():
        bits = np.random.default_rng(Processes.here().rank).bytes
        sampler = PoissonSampler(40, rate, STEPS, max_batch_size=cap, random_bytes=bits)
        return list(SharedDraws(sampler, Processes.here()))

    return on_processes(count, drawn)


def is_one_draw(found: Parts, rate: float, cap: int = 40) -> bool:
    """Whether the parts together are draws of 40, cut to ``cap``: nobody is drawn by two, sizes follow
    the binomial law up to there, and in draws of one size all are equally likely."""
    together = [sum(drawn, []) for drawn in zip(*found, strict=True)]
    if any(len({*draw}) < len(draw) or len(draw) > cap for draw in together):
        return False
    law = stats.binom.pmf(np.arange(cap + 1), 40, rate)
    law[cap] = stats.binom.sf(cap - 1, 40, rate)
    sizes = np.bincount([*map(len, together)], minlength=cap + 1)
    common = law * STEPS >= 5
    tables = [[*each[common], each[~common].sum()] for each in (sizes, law * STEPS)]
    # Each of 40 is in a draw of m with m / 40, so the counts spread a little less than independent ones.
    counts, sizes = np.bincount(sum(together, []), minlength=40), sizes @ np.arange(cap + 1)
    return min(stats.chisquare(*tables)[1], stats.chisquare(counts)[1]) > REJECT and sizes > 0


def test_the_parts_of_all_processes_are_one_draw():
    assert is_one_draw(parts(3, 0.5, 20), 0.5, 20) and is_one_draw(parts(2, 0.2), 0.2)


def test_which_process_a_row_belongs_to_is_drawn_for_it_alone():
    """One row that leaves a draw moves no other to another process, whatever an index means."""
    first = np.zeros((STEPS, 40), int)
    for step, own in enumerate(parts(2, 1.0)[0]):
        first[step, own] = 1
    for times in (first.sum(0), (first == np.roll(first, 1, axis=1)).sum(0)):
        assert stats.chisquare([times, STEPS - times], STEPS / 2)[1].min() > REJECT


def cut_by_each(self):
    own = replace(self.sampler, max_batch_size=None)
    for drawn in SharedDraws.honest(SharedDraws(own, self.processes)):
        yield self.sampler.cut(np.array(drawn)).tolist()


def test_planted_cuts_and_draws_of_each_process_are_seen(monkeypatch):
    monkeypatch.setattr(SharedDraws, "honest", SharedDraws.__iter__, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(SharedDraws, "__iter__", cut_by_each)
        assert not is_one_draw(parts(2, 0.5, 20), 0.5, 20)
    with monkeypatch.context() as patch:  # by what rows hold, here of seven kinds
        by_content = lambda self, drawn: drawn[np.argsort(drawn % 7, kind="stable")][:20]  # noqa: E731
        patch.setattr(PoissonSampler, "cut", by_content)
        assert not is_one_draw(parts(2, 0.5, 20), 0.5, 20)
    monkeypatch.setattr(Processes, "on_main", lambda self, act: act())
    assert not is_one_draw(parts(2, 0.5, 20), 0.5, 20)
    assert not is_one_draw(parts(2, 0.2), 0.2)


def test_an_allocation_begins_in_each_process_before_it_is_drawn():
    def drawn():
        order, here = [], Processes.here()
        bits = lambda count: (order.append("drawn"), np.random.bytes(count))[1]  # noqa: E731
        sampler = AllocationSampler(50, 4, random_bytes=bits)
        found = list(SharedDraws(sampler, here, lambda: order.append("begun")))
        return found, order

    (first, main), (second, other) = on_processes(2, drawn)
    assert main == ["begun", *["drawn"] * 5] and other == [
        "begun"
    ]  # and for each draw, whose it is
    assert len(first) == len(second) == 4
    assert sorted(sum(first + second, [])) == [*range(50)]


# -- whole runs --

CUT = {"max_logical_batch_size": 9, "max_steps": 4, "logging_strategy": "no"}
EVENT = TruncatedPoissonSampledGaussian(1.0, 0.2, 4, 40, 9)
RUNS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "rows": (lambda folder: tiny.trainer(folder, **CUT), EVENT),
    "workers": (lambda folder: tiny.trainer(folder, dataloader_num_workers=1, **CUT), EVENT),
    "bands": (
        lambda folder: tiny.trainer(folder, bands=3, **CUT),
        TruncatedBandedGaussian(1.0, 0.6, 4, 3, 14, 9),
    ),
    "users": (
        lambda folder: users.trainer(folder, **CUT | {"max_logical_batch_size": 5}),
        TruncatedPoissonSampledGaussian(1.0, 1 / 3, 4, 12, 5),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def known_to_all() -> None:
    """What its accounting takes seconds to compute, which processes have from this one."""
    epsilon(EVENT, 1 / 80)


@pytest.mark.parametrize(
    "kind",
    ["rows", "workers", *(pytest.param(k, marks=pytest.mark.slow) for k in ("bands", "users"))],
)
def test_a_cut_draw_of_a_run_is_shared_and_its_event_is_that_of_one_process(
    kind, tmp_path, monkeypatch
):
    make, event = RUNS[kind]
    honest, own = SharedDraws.__iter__, []

    def watched(self):
        for drawn in honest(self):
            own.append(drawn)
            yield drawn

    def train():
        made = make(tmp_path)
        made.train()
        return own, weights(made), made.ledger.events

    monkeypatch.setattr(SharedDraws, "__iter__", watched)
    (first, trained, _), (second, same, events) = results(2, train)
    assert len(first) == len(second) >= 4 and any(first) and any(second)
    for one, other in zip(first, second, strict=True):
        assert len({*one, *other}) == len(one + other) <= event.max_batch_size
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    assert events == (event,) and not disagreements(read(tmp_path))


# -- audits of whole runs --


def all_of_it(self):
    draws = iter(self.sampler)
    while (drawn := self.processes.on_main(lambda: next(draws, None))) is not None:
        yield drawn


def released(folder, event, noise: bool = True):
    """What a run of two processes lets out (T, n) that costs this event, and the main one's draws."""

    def train():
        drawn = watch(pytest.MonkeyPatch(), PoissonSampler, "draw")
        seen: list[np.ndarray] = []
        given = coordinates.rows().select(range(event.num_examples))
        options = {
            "expected_batch_size": event.sample_rate * event.num_examples, "max_steps": event.steps,
            "max_logical_batch_size": event.max_batch_size, "look_over": "when_drawn",
            "noise_multiplier": event.noise_multiplier,
        }  # fmt: skip
        made = coordinates.trainer(folder, given, seen, **options)
        if not noise:
            silence.silenced(made)
        made.train()
        return np.array(seen), drawn, made.ledger.events

    (seen, drawn, events), (same, none, _) = results(2, train)
    assert np.array_equal(seen, same) and not none and events == (event,)
    return seen, drawn


def are_sums_of_the_draws(folder) -> bool:
    """Whether each release is, to rounding and the clip's margin, what a loop over a draw gives."""
    seen, drawn = released(folder, EVENT, noise=False)
    total = np.zeros_like(seen)
    for step, rows in enumerate(drawn[: len(seen)]):
        for row in rows:
            total[step, 2 * row] += 1
    return bool((abs(seen - total) < 0.1).all() and max(map(len, drawn)) <= EVENT.max_batch_size)


def test_what_two_processes_release_is_the_sum_over_one_cut_draw(tmp_path, monkeypatch):
    """All draw the same, of which each time some are cut off."""
    honest = PoissonSampler.draw

    def draw(self):
        bits = np.random.default_rng(25).bytes
        assert len(honest(replace(self, max_batch_size=None, random_bytes=bits))) > 9
        return honest(replace(self, random_bytes=np.random.default_rng(25).bytes))

    monkeypatch.setattr(PoissonSampler, "draw", draw)
    assert are_sums_of_the_draws(tmp_path / "one")
    monkeypatch.setattr(SharedDraws, "honest", SharedDraws.__iter__, raising=False)
    monkeypatch.setattr(SharedDraws, "__iter__", cut_by_each)  # planted
    assert not are_sums_of_the_draws(tmp_path / "planted")


def test_an_audit_does_not_refute_a_run_of_two_processes_but_one_whose_rows_count_twice(
    tmp_path, monkeypatch
):
    """Planted: each process takes all that was drawn. (A cap by content, or of each process, would not
    be seen here: a cap of B or more changes by few percent how often a row takes part.)"""
    event = TruncatedPoissonSampledGaussian(0.7, 0.25, 4, coordinates.COUNT, 550)
    epsilon(event, 0.5 / coordinates.COUNT)  # which both processes have then
    monkeypatch.setattr(when_drawn, "FIRST", 8)
    claim = epsilon(event, coordinates.DELTA).value
    for n, plant in {1: SharedDraws.__iter__, 2: all_of_it}.items():
        monkeypatch.setattr(SharedDraws, "__iter__", plant)
        seen, _ = released(tmp_path / str(n), event)
        ways = [{(): 0.75, (step,) * n: 0.25} for step in range(4)]
        assert coordinates.refutes(seen, ways, 0.7, claim) == (n == 2)
        assert (coordinates.power(ways, 0.7, claim) > 0.9) == (n == 2)


def test_a_resume_with_another_number_of_processes_keeps_the_event(tmp_path):
    class StopAfterTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    def train(resume: bool):
        made = tiny.trainer(tmp_path, save_strategy="steps", save_steps=1, **CUT)
        if not resume:
            made.add_callback(StopAfterTwo())
        made.train(resume_from_checkpoint=resume or None)

    results(2, lambda: train(False))
    assert read_run(tmp_path).ledger.events == (EVENT.with_steps(2),)
    results(1, lambda: train(True))
    assert read_run(tmp_path).ledger.events == (EVENT,)


def test_all_stop_where_the_main_process_cannot_draw(tmp_path, monkeypatch):
    honest, drawn = PoissonSampler.draw, []

    def draw(self):
        drawn.append(1)
        return honest(self) if len(drawn) < 2 else 1 / 0

    monkeypatch.setattr(PoissonSampler, "draw", draw)
    main, other = outcomes(2, lambda: tiny.trainer(tmp_path, **CUT).train())
    assert main.error == "StepError" and "ZeroDivisionError" in main.message
    assert other.error == "DistributedError" and "Rank 0 of 2 failed" in other.message
    assert read_run(tmp_path).ledger.steps() == 1
