"""Run notebooks, by default those beside this file, and keep in them what they print and draw."""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
# The bars of training stay; of others, the last state would be all that is kept.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:IProgress not found",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # has hf-dp
}


def executed(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """Run ``notebook`` in ``folder`` and return it with its outputs; the first error is raised."""
    node = nbformat.read(notebook, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        node, record_timing=False, coalesce_streams=True, resources=place, timeout=1200
    )
    return client.execute(env={**os.environ, **QUIET})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(executed(path, Path(empty)), path)
        print(path)
