"""Runs that are killed at any point never under-report, and go on from a complete checkpoint.

The script runs in a process of its own, which it forks from.
"""

import os
import subprocess
from pathlib import Path

import pytest
from warm import run_program

SCRIPT = Path(__file__).with_name("kill_runs.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forks")


PROGRAM = """
import runpy, sys
sys.path[:0] = sys.argv[1:3]
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    roots = [str(SCRIPT.parents[2]), str(SCRIPT.parents[1])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return run_program(PROGRAM, folder, [*roots, str(SCRIPT), *words], env)


def test_a_few_kills_lose_no_release_and_no_checkpoint(tmp_path):
    done = run(tmp_path, "--kills", "3")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "'killed': 3" in done.stdout


@pytest.mark.slow
def test_two_hundred_kills_lose_no_release_and_no_checkpoint(tmp_path):
    done = run(tmp_path, "--kills", "200")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "'killed': 200" in done.stdout


@pytest.mark.slow
def test_kills_of_one_of_two_processes_lose_no_release_and_no_checkpoint(tmp_path):
    done = run(tmp_path, "--kills", "60", "--processes", "2")
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
def test_planted_bugs_are_found(plant, found, tmp_path):
    done = run(tmp_path, "--kills", "60", "--plant", plant)
    assert done.returncode == 1 and found in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
