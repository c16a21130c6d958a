"""Peak memory: the statistic with an invented probe, and the real probe in its own process."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from hf_dp.benchmarks import memory
from hf_dp.benchmarks.memory import MIB, measure_memory, probe
from hf_dp.benchmarks.workload import Workload
from hf_dp.cli.bench import table
from hf_dp.errors import HfDpError, InvalidArgumentError

TINY = Workload("tiny-bert", 4, 12, threads=1, use_cpu=True)


@pytest.fixture
def invented(monkeypatch):
    """A function that sets the peaks which probes find, or why they found none."""

    def give(**peaks):
        def run(workload, mode, steps):
            if isinstance(peaks[mode], str):
                return {"refused": peaks[mode]}
            return {"bytes": peaks[mode] * MIB, "measured": "invented", "note": ""}

        monkeypatch.setattr(memory, "probe", run)

    return give


def test_the_ratio_to_non_private(invented):
    invented(non_private=11, book_keeping=12)
    report = measure_memory(TINY, ["book_keeping"])
    assert report["modes"]["book_keeping"]["ratio"] == pytest.approx(12 / 11)
    assert "book_keeping  12.0  1.091" in table(report) and "invented" in table(report)


def test_a_refused_mode_is_a_row(invented):
    invented(non_private=10, book_keeping="killed")
    report = measure_memory(TINY, ["book_keeping"])
    assert report["modes"]["book_keeping"] == {"refused": "killed"}
    assert "refused: killed" in table(report)


def test_without_the_yardstick_there_is_no_measurement(invented):
    invented(non_private="killed")
    with pytest.raises(HfDpError, match="`per_device_train_batch_size` 4 cannot run: killed"):
        measure_memory(TINY, ["book_keeping"])


def test_wrong_numbers_are_refused():
    with pytest.raises(InvalidArgumentError, match="`steps`"):
        measure_memory(TINY, [], steps=1)


@pytest.mark.slow
def test_a_larger_batch_takes_more_memory():
    small, large = (
        probe(replace(TINY, per_device_train_batch_size=size, max_length=32), "book_keeping", 2)
        for size in (8, 256)
    )  # at 256 one hidden state is 512 KiB, some dozens are kept for the backward
    assert large["bytes"] > small["bytes"] + 10 * MIB
    assert large["bytes"] < 500 * MIB
    assert "resident" in large["measured"]


@pytest.mark.parametrize("code", [1, -9])
def test_a_probe_that_fails_says_why(code, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(
            command, code, "", "Traceback ...\nKeyError: 'no such mode'\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    if code == -9:
        assert "memory" in probe(TINY, "book_keeping", 2)["refused"]
        return
    with pytest.raises(HfDpError, match="'book_keeping' failed: KeyError: 'no such mode'"):
        probe(TINY, "book_keeping", 2)
