"""Programs in processes of their own, without the seconds that each takes to import torch.

A server that has imported what hf_dp builds on, and no part of hf_dp, forks a process for each
program. So a program still imports hf_dp itself, and sees nothing of the tests or of another
program.
"""

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# As in a shell without the Hub, one thread a process.
OFFLINE = {
    **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
IMPORTED = ["peft", "datasets", "transformers.modeling_utils", "transformers.trainer"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(IMPORTED)


def run_program(
    code: str, folder: Path, words: Sequence[str] = (), env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code *words`` in ``folder``, which also gets what it prints, in files."""
    program, out, err = (folder / f"program.{end}" for end in ("py", "out", "err"))
    program.write_text(code)
    before = dict(os.environ)
    os.environ.update(env)  # the server is started by the first process, and reads it then
    try:
        process = SERVER.Process(target=_run, args=(program, out, err, tuple(words), dict(env)))
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    process.join()
    return subprocess.CompletedProcess(
        [str(program), *words], process.exitcode or 0, out.read_text(), err.read_text()
    )


def run_the_cards_lines(folder: Path, base: Path, more: str) -> Any:
    """Run the lines under "Use" of the card in ``folder / "out"`` beside the base, and then more.

    Returns: what is printed last, which is JSON.
    """
    (folder / base.name).symlink_to(base)
    card = (folder / "out" / "README.md").read_text()
    lines = re.search(r"## Use\n+```python\n(.*?)```", card, re.DOTALL)[1]
    lines = lines.replace("path/to/this/folder", "out").replace("BASE_MODEL", base.name)
    done = run_program(f"{lines}\nimport json\n{more}", folder, env=OFFLINE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _run(program: Path, out: Path, err: Path, words: tuple[str, ...], env: dict[str, str]) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    known = [name for name in sys.modules if name.split(".")[0] == "hf_dp"]
    assert not known, known
    os.environ.update(env)
    os.chdir(program.parent)
    sys.argv = [str(program), *words]
    tests = str(Path(__file__).parent)
    sys.path[:] = [str(program.parent), *(path for path in sys.path if path != tests)]
    runpy.run_path(str(program), run_name="__main__")
