"""`make gpu`: it runs where torch, transformers, accelerate and peft are, and nothing else of ours."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = "datasets evaluate dp_accounting prv_accountant sentence_transformers trl opacus".split()
WITHOUT = f"import sys, runpy; sys.modules.update(dict.fromkeys({MISSING}))\n"


def without_the_rest(program: str) -> str:
    command = [sys.executable, "-c", WITHOUT + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_mode_of_each_case_is_printed_and_written_and_one_that_fails_costs_no_other(tmp_path):
    out = tmp_path / "gpu.json"
    program = f"""
sys.path.insert(0, "recipes/gpu")
import measure
measure.SMALL[0] = ("tiny", 4, 10**6, False)
measure.main([{str(out)!r}, "--cases", "small", "--rounds", "3"])
measure.main([{str(out)!r} + "l", "--cases", "small", "--seconds", "-1"])
"""
    printed = without_the_rest(program)
    first, second = json.loads(out.read_text())
    assert first["case"].startswith("tiny, ") and "positions" in first["refused"]
    modes = second["modes"]
    assert second["case"].startswith("tiny-bert, ") and modes["non_private"]["ratio"] == 1
    for name in ("book_keeping", "two_pass"):
        assert modes[name]["examples_per_second"] > 0 and modes[name]["ratio"] > 0
        assert re.search(rf"^  {name} .* examples a second, .* of non_private", printed, re.M)
    assert "opacus" in modes["opacus_ghost"]["refused"]
    assert printed.count("no time left") == 2


def test_the_tests_for_gpus_are_found_without_the_rest():
    (line,) = re.findall(r"GPU_TESTS = ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    files = line.replace("\\\n", " ").split()
    options = ["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    found = without_the_rest(f"import pytest; sys.exit(pytest.main({[*options, *files]}))")
    assert all(f"{name}::" in found for name in files)
