"""A whole measurement on a tiny model, and how its table reads."""

from __future__ import annotations

import json

import pytest
import torch

from hf_dp.benchmarks import throughput
from hf_dp.benchmarks.mode import Refused
from hf_dp.benchmarks.modes import NON_PRIVATE
from hf_dp.benchmarks.operators import left_over, operator_seconds
from hf_dp.benchmarks.tables import throughput_table
from hf_dp.benchmarks.throughput import Protocol, measure_throughput
from hf_dp.benchmarks.workload import Workload
from hf_dp.errors import HfDpError, InvalidArgumentError

TINY = Workload("tiny", threads=1, device="cpu")


@pytest.fixture(scope="module")
def report():
    return measure_throughput(
        TINY, ["book_keeping"], Protocol(rounds=3, warmups=1, repeats=1, runs=2, profile=True)
    )


def test_the_report_holds_all_raw_rounds_and_what_follows_from_them(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert [len(run) for run in report["runs"]] == [3, 3]
    row = report["modes"]["book_keeping"]
    by_hand = [sorted(r[NON_PRIVATE] / r["book_keeping"] for r in run)[1] for run in report["runs"]]
    assert [each["median"] for each in row["ratios"]] == by_hand
    assert row["ratio"] == pytest.approx(sum(by_hand) / 2)
    assert 0 < row["bound"] < row["bound_symmetric"] < 1
    assert row["verdict"] in ("agree", "differ", "repeat")
    seconds = sorted(r[NON_PRIVATE] for run in report["runs"] for r in run)
    assert report["modes"][NON_PRIVATE]["examples_per_second"] == pytest.approx(
        4 / ((seconds[2] + seconds[3]) / 2)
    )
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["threads"] == 1


def test_the_table_shows_the_bound_beside_the_measurement(report):
    text = throughput_table(report)
    row = report["modes"]["book_keeping"]
    line = next(line for line in text.splitlines() if line.startswith("book_keeping"))
    for value in (row["ratio"], row["bound"], row["bound_symmetric"]):
        assert f"{value:.3f}" in line
    assert row["verdict"] in line
    assert "what is left in book_keeping" in text
    assert "tiny, batch 4 x 12" in text


def test_largest_batches_have_a_table_of_their_own(report):
    row = {
        "max_batch": 8,
        "logical_batch": 24,
        "non_private_logical_batch": 24,
        "examples_per_second": 2.0,
        "ratio": 0.8,
    }
    row |= {"interquartile_range": 0.05, "counts": False}
    rows = {
        "book_keeping": row,
        "two": row | {"counts": True, "non_private_logical_batch": 12},
        "no": {"refused": "why"},
    }
    text = throughput_table({**report, "max_batch": rows})
    assert "repeat" in next(line for line in text.splitlines() if line.endswith("repeat"))
    assert "non-private did 12" in text
    assert "refused: why" in text


def test_a_refused_mode_is_a_row(monkeypatch):
    build = throughput.build_mode

    def refuse(name, workload, shared):
        if name == "book_keeping":
            raise Refused("tied weights are not supported")
        return build(name, workload, shared)

    monkeypatch.setattr(throughput, "build_mode", refuse)
    report = measure_throughput(TINY, ["book_keeping"], Protocol(rounds=3, repeats=1))
    assert report["modes"]["book_keeping"] == {"refused": "tied weights are not supported"}
    assert "refused: tied weights are not supported" in throughput_table(report)


def test_without_the_yardstick_there_is_no_measurement(monkeypatch):
    def refuse(*args):
        raise Refused("out of memory")

    monkeypatch.setattr(throughput, "build_mode", refuse)
    with pytest.raises(HfDpError, match=r"`batch_size` 4 cannot run: out of memory.*smaller"):
        measure_throughput(TINY, ["book_keeping"])


def test_largest_batches_need_a_gpu():
    with pytest.raises(InvalidArgumentError, match="`max_batch`.*cuda.*bench memory"):
        measure_throughput(TINY, ["book_keeping"], Protocol(max_batch=True))


@pytest.mark.parametrize("field", ["rounds", "warmups", "runs", "repeats", "lcm_limit"])
def test_a_wrong_protocol_is_refused(field):
    with pytest.raises(InvalidArgumentError, match=f"`{field}`"):
        Protocol(**{field: 0})


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seen = []
        measure_throughput(
            TINY,
            [],
            Protocol(rounds=3, repeats=1),
            lambda line: seen.append(torch.get_num_threads()),
        )
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_operators_that_a_mode_adds_come_first():
    mode = {"mm": 3.0, "bmm": 2.0, "sum": 0.45, "only": 0.1}
    base = {"mm": 3.2, "sum": 0.4, "gone": 1.5}
    rows = left_over(mode, base, top=4)  # "sum" differs least and is left out
    assert [name for name, _, _ in rows] == ["bmm", "only", "mm", "gone"]
    assert [more for _, more, _ in rows] == pytest.approx([2.0, 0.1, -0.2, -1.5])
    assert [seconds for _, _, seconds in rows] == [2.0, 0.1, 3.0, 0.0]


@pytest.mark.slow
def test_the_profiler_sees_the_norms():
    from hf_dp.benchmarks.modes import build_mode
    from hf_dp.benchmarks.workload import make_batch

    seconds = {}
    for name in (NON_PRIVATE, "book_keeping"):
        mode = build_mode(name, TINY)
        batches = [make_batch(TINY, mode.model)]
        mode.step(batches)  # what happens once is not to weigh on one of them
        seconds[name] = operator_seconds(mode, batches, steps=20)
    # Only what one of them alone calls is sure to take longer there.
    assert {"_AffineBackward", "aten::diagonal"} <= {
        name
        for name, more, _ in left_over(seconds["book_keeping"], seconds[NON_PRIVATE], 400)
        if more > 0
    }
