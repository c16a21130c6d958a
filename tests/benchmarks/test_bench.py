"""A whole measurement on a tiny model, how its table reads, and the ratio statistic on clocks whose
truth is known."""

import itertools
import json
import re
import subprocess
from dataclasses import replace

import pytest
import torch
from quick import run_quickly

from hf_dp.benchmarks import memory, modes
from hf_dp.benchmarks.memory import MIB, measure_memory, probe
from hf_dp.benchmarks.modes import (
    NON_PRIVATE,
    NonPrivate,
    Refused,
    interleave,
    measure_throughput,
    seconds_of_step,
    spread,
)
from hf_dp.benchmarks.workload import SHAPES, Workload
from hf_dp.cli.bench import table
from hf_dp.cli.main import main
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import HfDpError, InvalidArgumentError

TINY = Workload("tiny", 4, 12, threads=1, use_cpu=True)


@pytest.fixture(scope="module")
def report():
    return measure_throughput(TINY, ["book_keeping"], rounds=3, repeats=1)


def test_the_report_holds_all_raw_rounds_and_what_follows_from_them(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    rounds, row = report["rounds"], report["modes"]["book_keeping"]
    assert len(rounds) == 3
    assert row["ratio"] == sorted(r[NON_PRIVATE] / r["book_keeping"] for r in rounds)[1]
    assert (row["verdict"] == "counts") == (row["interquartile_range"] < 0.04)
    seconds = sorted(r[NON_PRIVATE] for r in rounds)
    speed = report["modes"][NON_PRIVATE]["examples_per_second"]
    assert speed == pytest.approx(4 / seconds[1])
    assert report["environment"]["torch"] == torch.__version__
    assert report["workload"]["threads"] == 1


def test_the_table_shows_ratio_spread_and_verdict(report):
    text = table(report)
    row = report["modes"]["book_keeping"]
    line = next(line for line in text.splitlines() if line.startswith("book_keeping"))
    for value in (f"{row['ratio']:.3f}", f"{row['interquartile_range']:.3f}", row["verdict"]):
        assert value in line
    assert "tiny, batch 4 x 12" in text


def test_a_refused_mode_is_a_row_but_for_the_yardstick(monkeypatch):
    build, refused = modes.build_mode, {"book_keeping"}

    def refuse(name, workload, shared):
        if name in refused:
            raise Refused("out of memory")
        return build(name, workload, shared)

    monkeypatch.setattr(modes, "build_mode", refuse)
    report = measure_throughput(TINY, ["book_keeping"], rounds=3, repeats=1)
    assert report["modes"]["book_keeping"] == {"refused": "out of memory"}
    assert "refused: out of memory" in table(report)
    refused.add(NON_PRIVATE)
    named = r"`per_device_train_batch_size` 4 cannot run: out of memory.*smaller"
    with pytest.raises(HfDpError, match=named):
        measure_throughput(TINY, ["book_keeping"])


def test_a_wrong_protocol_is_refused():
    with pytest.raises(InvalidArgumentError, match="`repeats`"):
        measure_throughput(TINY, [], repeats=-1)


def test_a_round_lasts_eight_seconds(monkeypatch):
    monkeypatch.setattr(modes, "seconds_of_step", lambda mode, batch: 3.0)
    found = measure_throughput(TINY, [], rounds=3)
    assert found["protocol"]["repeats"] == 3


# -- rounds --


def test_every_round_times_every_mode_and_the_order_rotates():
    called = []
    timers = {name: lambda name=name: called.append(name) or 1.0 for name in "abc"}
    heard = []
    rounds = interleave(timers, 4, heard.append)
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"
    assert all(set(each) == set("abc") for each in rounds)
    assert heard == [f"round {r} of 4" for r in (1, 2, 3, 4)]


def test_a_round_is_the_median_of_turns_taken_step_by_step():
    """So that one step which was interrupted does not move it."""
    called = []
    clock = {"a": iter([1.0, 2.0, 30.0, 4.0, 5.0, 6.0]), "b": itertools.count(11.0)}
    timers = {name: lambda name=name: called.append(name) or next(clock[name]) for name in "ab"}
    assert interleave(timers, 2, repeats=3) == [{"a": 2.0, "b": 12.0}, {"a": 5.0, "b": 15.0}]
    assert "".join(called) == "ab" + "ba" + "ab" + "ba" + "ab" + "ba"


def test_a_machine_that_slows_down_does_not_move_the_ratio():
    # 0.8 in every round; dividing medians of a drifting machine, or times of neighboring rounds,
    # would not give that
    rounds = [{NON_PRIVATE: 0.8 * drift, "mode": drift} for drift in (1.0, 1.5, 9.0, 2.0, 1.1)]
    assert spread(rounds, "mode", NON_PRIVATE) == (pytest.approx(0.8), pytest.approx(0))


def test_median_and_quartiles_by_hand():
    rounds = [{NON_PRIVATE: r, "mode": 1.0} for r in (0.9, 0.5, 0.8, 0.6, 0.7)]
    assert spread(rounds, "mode", NON_PRIVATE) == (pytest.approx(0.7), pytest.approx(0.2))


def test_a_timing_is_one_step_and_cleans_up(monkeypatch):
    class Fake(NonPrivate):
        done: list[str] = []

        def step(self, batch):
            self.done.append("step")

        def reset(self):
            self.done.append("reset")

    clock = itertools.count(100.0, 6.0)
    monkeypatch.setattr("hf_dp.benchmarks.modes.time.perf_counter", lambda: next(clock))
    mode = Fake(None, TINY)
    assert seconds_of_step(mode, []) == 6.0
    assert mode.done == ["step", "reset"]


# -- memory: the statistic with an invented probe, and the real probe in its own process ---

CLASSIFIER = Workload("tiny-bert", 4, 12, threads=1, use_cpu=True)


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
    report = measure_memory(CLASSIFIER, ["book_keeping"])
    assert report["modes"]["book_keeping"]["ratio"] == pytest.approx(12 / 11)
    assert "book_keeping  12.0  1.091" in table(report) and "invented" in table(report)


def test_a_probe_that_was_killed_is_a_row_but_for_the_yardstick(invented):
    invented(non_private=10, book_keeping="killed")
    report = measure_memory(CLASSIFIER, ["book_keeping"])
    assert report["modes"]["book_keeping"] == {"refused": "killed"}
    assert "refused: killed" in table(report)
    invented(non_private="killed")
    with pytest.raises(HfDpError, match="`per_device_train_batch_size` 4 cannot run: killed"):
        measure_memory(CLASSIFIER, ["book_keeping"])


@pytest.mark.slow
def test_a_larger_batch_takes_more_memory():
    sizes = [replace(CLASSIFIER, per_device_train_batch_size=n, max_length=32) for n in (8, 256)]
    # At 256 one hidden state is 512 KiB, some dozens are kept for the backward.
    small, large = (probe(each, "book_keeping", 2) for each in sizes)
    assert large["bytes"] > small["bytes"] + 10 * MIB
    assert large["bytes"] < 500 * MIB
    assert "resident" in large["measured"]


@pytest.mark.parametrize("code", [1, -9])
def test_a_probe_that_fails_says_why(code, monkeypatch):
    done = subprocess.CompletedProcess([], code, "", "Traceback ...\nKeyError: 'no such mode'\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: done)
    if code == -9:
        assert "memory" in probe(CLASSIFIER, "book_keeping", 2)["refused"]
        return
    with pytest.raises(HfDpError, match="'book_keeping' failed: KeyError: 'no such mode'"):
        probe(CLASSIFIER, "book_keeping", 2)


# -- as a user calls it ---

SIZE = ["--model", "tiny", "--max_length", "8", "--use_cpu", "--threads", "1"]
SPEED = ["bench", "throughput", *SIZE, "--rounds", "3", "--repeats", "1"]
MEMORY = ["bench", "memory", *SIZE]


@pytest.mark.parametrize("command", ["throughput", "memory"])
def test_help_is_quick_and_complete(command):
    code = (
        "import sys; from hf_dp.cli.main import main\n"
        "try: main()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = run_quickly("-c", code, "bench", command, "--help")
    assert done.returncode == 0, done.stderr
    unbroken = re.sub(r"-\n +", "-", done.stdout)
    for text in ("default: 8", "example", "--gradient_checkpointing", *SHAPES, *STRATEGIES):
        assert text in unbroken
    assert "opacus_ghost" in unbroken


def test_throughput_end_to_end(capsys):
    words = ["--per-device-train-batch-size", "2", "--max_length=10", "--bf16", "--json"]
    assert main([*SPEED, *words]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    work = report["workload"]
    assert (work["per_device_train_batch_size"], work["max_length"], work["bf16"]) == (2, 10, True)
    assert set(report["modes"]) == {"non_private", "book_keeping"}
    assert len(report["rounds"]) == 3
    assert "round 3 of 3" in output.err


@pytest.mark.slow
def test_memory_end_to_end(capsys):
    words = ["--modes", "non_private", "--gradient_checkpointing", "--steps", "2"]
    assert main([*MEMORY, *words]) == 0
    output = capsys.readouterr().out
    assert "MiB" in output and "gradient checkpointing" in output
    assert float(output.splitlines()[-1].split()[1]) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "memory", "--model", "tinny"], "Did you mean 'tiny'"),
        ([*SPEED, "--modes", "non_private,ghost"], "`modes`"),
        ([*SPEED, "--max-length", "33"], "`max_length`"),
        ([*SPEED, "--rounds", "2"], "`rounds`"),
        ([*MEMORY, "--steps", "1"], "`steps`"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("hf-dp bench: Expected")
    assert "\n" not in error
    assert re.search(message, error)
