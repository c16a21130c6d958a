"""The project as a newcomer meets it: installation, README, first errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OFFLINE = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_pip_check_is_clean():
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_constraints_satisfy_the_declared_ranges():
    from packaging.requirements import Requirement

    pins = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_public_names_resolve_and_a_wrong_one_lists_them():
    import hf_dp

    for name in hf_dp.__all__:
        assert getattr(hf_dp, name) is not None
    with pytest.raises(AttributeError, match="DPTrainer"):
        _ = hf_dp.DPTrainr


def test_importing_the_package_is_light():
    code = (
        "import hf_dp, hf_dp.accounting, sys; print([m for m in ('torch', 'transformers') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_readme_quick_start_is_short_and_runs_as_printed(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    quick_start = blocks[0]
    assert len(quick_start.splitlines()) <= 25
    (tmp_path / "quick_start.py").write_text(quick_start)
    done = subprocess.run(
        [sys.executable, "quick_start.py"],
        cwd=tmp_path,
        env=OFFLINE,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differentially private" in done.stdout


def test_the_other_readme_programs_run(tmp_path):
    _, *others = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert others
    for program in others:
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=OFFLINE, check=True, timeout=280
        )


def test_the_account_commands_of_the_readme_run(capsys):
    from hf_dp.cli.main import main

    commands = re.findall(
        r"^hf-dp (account (?:epsilon|noise) .*)$", (ROOT / "README.md").read_text(), flags=re.M
    )
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()) == 0
    assert "2.41" in capsys.readouterr().out


def test_no_file_names_a_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    suspicious = re.compile(r"/work/|/root/|/home/\w+/")
    here = Path(__file__).name
    for name in tracked:
        if name.endswith(
            (".py", ".md", ".toml", ".yaml", ".txt", "Makefile")
        ) and not name.endswith(here):
            assert not suspicious.search((ROOT / name).read_text(encoding="utf-8")), name
