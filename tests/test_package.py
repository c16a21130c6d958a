"""The wheel and the sdist work in an empty environment, without the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks
from test_project import FEWER_ROWS

NOT_TRACKED = shutil.ignore_patterns(".git", ".venv", "outputs", "build", "dist", "*.egg-info")


def run(*words: str | Path, folder: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow  # needs a package index
def test_wheel_and_sdist_run_the_readme_program_without_the_repository(tmp_path):
    shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=NOT_TRACKED)
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", folder=tmp_path / "tree")
    shutil.rmtree(tmp_path / "tree")
    run(sys.executable, "-m", "venv", "empty", folder=tmp_path)
    python, pinned = tmp_path / "empty" / "bin" / "python", ROOT / "constraints.txt"
    program, *_ = blocks("README.md", "python")
    for text, other in FEWER_ROWS:
        program = program.replace(text, other)
    (wheel,), (sdist,) = (tmp_path.glob(f"dist/*{end}") for end in (".whl", ".tar.gz"))
    for file, more in ((wheel, []), (sdist, ["--force-reinstall", "--no-deps"])):
        run(python, "-m", "pip", "install", f"{file}[demo]", "-c", pinned, *more, folder=tmp_path)
        printed = run(python, "-c", program, folder=tmp_path)
        assert "differentially private" in printed
        run(python, "-m", "hf_dp.cli.main", "verify", "outputs/quickstart", folder=tmp_path)
        shutil.rmtree(tmp_path / "outputs")
