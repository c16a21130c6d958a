"""Infilling costs what a head costs: the vocabulary projection is computed for the label words and
the mask only."""

from __future__ import annotations

import logging

import pytest

from hf_dp.benchmarks.modes import build_mode, seconds_of_step
from hf_dp.benchmarks.throughput import interleave, measure_throughput, spread
from hf_dp.benchmarks.workload import Protocol, Workload, make_batch, threads_of


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["minilm", "roberta-base"])
def test_throughput_is_within_5_percent_of_the_heads(model):
    """Private steps of both, turn by turn, at the same length and batch size; run with -rA to read
    the ratio."""
    workloads = {name: Workload(name, 8, 64, threads=2) for name in (model, f"{model}-infilling")}
    timers = {}
    for name, workload in workloads.items():
        mode = build_mode("book_keeping", workload)
        batches = [make_batch(workload, mode.model)]
        timers[name] = lambda mode=mode, batches=batches: seconds_of_step(mode, batches)
    with threads_of(workloads[model]):
        interleave(timers, rounds=1, repeats=2)  # warm-up
        rounds = interleave(timers, rounds=7, repeats=6)
    found, _ = spread(rounds, f"{model}-infilling", model)
    logging.getLogger(__name__).warning(
        "%s: infilling at %.3f of the head's throughput", model, found
    )
    assert found >= 0.95, found


def test_the_benchmark_takes_the_infilling_shapes():
    workload = Workload("minilm-infilling", 2, 6, threads=1, use_cpu=True)
    found = measure_throughput(workload, ["book_keeping"], Protocol(rounds=3, warmups=1, repeats=1))
    assert found["modes"]["book_keeping"]["ratio"] > 0.2
