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


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ("3", ["--seed", "0"]),
        pytest.param("200", [], marks=pytest.mark.slow),
        pytest.param("60", ["--processes", "2"], marks=pytest.mark.slow),
    ],
)
def test_kills_lose_no_release_and_no_checkpoint(kills, words, tmp_path):
    """Of the run, or of one of its two processes."""
    done = run(tmp_path, "--kills", kills, *words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"'killed': {kills}" in done.stdout


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
