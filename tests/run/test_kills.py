"""Runs that are killed at any point never under-report, and go on from a complete checkpoint.

The script starts from a process of its own, which it forks from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_runs.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forks")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    roots = [str(SCRIPT.parents[2]), str(SCRIPT.parents[1])]
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def test_a_few_kills_lose_no_release_and_no_checkpoint():
    done = run("--kills", "12")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "'killed': 12" in done.stdout


@pytest.mark.slow
def test_two_hundred_kills_lose_no_release_and_no_checkpoint():
    done = run("--kills", "200")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "'killed': 200" in done.stdout


@pytest.mark.slow
def test_kills_of_one_of_two_processes_lose_no_release_and_no_checkpoint():
    done = run("--kills", "60", "--processes", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "'killed': 60" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("ledger_after_the_gradient", "noised values were let out"),
        ("save_in_place", "is not complete"),
    ],
)
def test_planted_bugs_are_found(plant, found):
    done = run("--kills", "60", "--plant", plant)
    assert done.returncode == 1 and found in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
