"""A look-up of the awaited module does not end the waiting; its import does, once."""

from __future__ import annotations

import subprocess
import sys

from warm import run_program

SCRIPT = """
import importlib.util, sys
import hf_dp
home = "transformers.models.auto.configuration_auto"
def waiting():
    return [finder for finder in sys.meta_path if getattr(finder, "module", None) == home]
assert waiting()
assert importlib.util.find_spec("transformers.models.auto.configuration_auto")
from transformers import AutoConfig
AutoConfig.for_model("bert")
assert not waiting()
assert AutoConfig.for_model("hf_dp_infilling", label_word_ids=[1, 2]).model_type == "hf_dp_infilling"
"""


def test_a_look_up_before_the_import():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_transformers_before_hf_dp(tmp_path):
    script = (
        "import sys\nassert 'transformers.models.auto.configuration_auto' in sys.modules\n"
        "from transformers import AutoConfig\nimport hf_dp\nAutoConfig.for_model('hf_dp_infilling')"
    )
    done = run_program(script, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
