"""``hf-dp bench`` as a user calls it."""

from __future__ import annotations

import json
import re

import pytest
from quick import run_quickly

from hf_dp.benchmarks.workload import SHAPES
from hf_dp.cli.main import main
from hf_dp.clipping.engine import STRATEGIES

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
