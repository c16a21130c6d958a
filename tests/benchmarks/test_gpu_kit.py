"""`make gpu`: it runs where torch, transformers, accelerate and peft are, and nothing else of ours."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = "datasets evaluate dp_accounting prv_accountant sentence_transformers trl opacus".split()
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
out, *collected = sys.argv[1:]
sys.path.insert(0, "recipes/gpu")
import measure, pytest
measure.SMALL[0] = ("tiny", 4, 10**6, False)
measure.interleave = lambda *given, repeats, by=measure.interleave: by(*given, repeats=2)
measure.main([out, "--small", "--rounds", "3"])
measure.main([out + "l", "--small", "--seconds", "-1"])
sys.exit(pytest.main(collected))
"""


def files_for_gpus() -> list[str]:
    (line,) = re.findall(r"GPU_TESTS = ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    return line.replace("\\\n", " ").split()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, Path]:
    """What one process without the rest prints and writes: it measures, and finds the tests."""
    out = tmp_path_factory.mktemp("gpu") / "new" / "gpu.json"
    options = ["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider", *files_for_gpus()]
    command = [sys.executable, "-c", PROGRAM, str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def test_each_mode_of_each_case_is_printed_and_written_and_one_that_fails_costs_no_other(made):
    printed, out = made
    first, second = json.loads(out.read_text())
    assert first["case"].startswith("tiny, ") and "positions" in first["refused"]
    modes = second["modes"]
    assert second["case"].startswith("tiny-bert, ") and modes["non_private"]["ratio"] == 1
    for name in ("book_keeping", "two_pass"):
        assert modes[name]["examples_per_second"] > 0 and modes[name]["ratio"] > 0
        assert re.search(rf"^  {name} .* examples a second, .* of non_private", printed, re.M)
    assert "opacus" in modes["opacus_ghost"]["refused"]
    assert printed.count("no time left") == 2


def test_the_files_for_gpus_are_found_without_the_rest(made):
    assert all(f"{name}::" in made[0] for name in files_for_gpus())
