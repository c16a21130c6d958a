"""A look-up of the awaited module does not end the waiting; its import does, once."""

import importlib
import subprocess
import sys

import hf_dp

WAITING = """
import hf_dp, sys
print([(each.module, each.then) for each in sys.meta_path[:1]])
import hf_dp.losses  # the lower layers work where they are the first to be imported
import hf_dp.tasks.infilling
"""


def test_a_look_up_before_the_import(tmp_path, monkeypatch):
    (tmp_path / "awaited.py").write_text("")
    (tmp_path / "follower.py").write_text(
        "import awaited\nassert not hasattr(awaited, 'seen')\nawaited.seen = 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hf_dp._when_imported("awaited", "follower")

    def waiting():
        return [each for each in sys.meta_path if getattr(each, "module", None) == "awaited"]

    assert importlib.util.find_spec("awaited") and len(waiting()) == 1
    assert "follower" not in sys.modules
    assert importlib.import_module("awaited").seen == 1 and not waiting()
    for name in ("awaited", "follower"):
        del sys.modules[name]


def test_what_is_awaited():
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert eval(done.stdout) == [("peft", "hf_dp.tuners.adapter")]
