"""The notebooks run, and what is kept in them of such a run may be shown to anybody."""

import json
import re
import runpy

import pytest
from pages import ROOT

FOLDER = ROOT / "recipes" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
UNFIT = r"Traceback|Warning|(?<![\w.])(/home|/root|/tmp|/work|/usr|/Users|[A-Z]:\\)\b"


def parametrized(test):
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)(test)


@parametrized
def test_what_is_kept_is_of_one_run_without_errors_and_machine_paths(path):
    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and "error" not in {output["output_type"] for output in outputs}
    for output in outputs:
        output.get("data", {}).pop("image/png", None)
    assert not re.search(UNFIT, "\n".join(map(str, outputs)))


@pytest.mark.slow
@parametrized
def test_a_notebook_runs(path, tmp_path):
    runpy.run_path(str(FOLDER / "run.py"))["executed"](path, tmp_path)
