"""How long a run and its selection take: written where a sweep asks for it, and nowhere else."""

import json
import time

import pytest

from hf_dp.run.clock import SELECTION, TRAINING, VARIABLE, Clock
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.single_entries import ParamConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

FROST = {"unfreeze_ratio": 0.3, "selection_sample_rate": 0.3, "selection_iterations": 1}


def test_parts_add_up_and_may_contain_others():
    clock = Clock()
    with clock.part("whole"):
        for _ in range(2):
            with clock.part("inner"):
                time.sleep(0.02)
    inner, whole = clock.seconds["inner"], clock.seconds["whole"]
    assert whole["wall"] >= inner["wall"] >= 0.04
    assert inner["processor"] < inner["wall"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("frost again", "dp_sgd"), ("param", "dp_sgd"), ("full", "dp_sgd"),
        ("frost", "non_private"), ("full", "non_private"),
    ],
)  # fmt: skip
def test_a_run_writes_its_times_into_the_file_that_the_environment_names(
    tmp_path, monkeypatch, mode, kind
):
    private = mode == "dp_sgd"
    noise = {"selection_noise_multiplier": 1.0} if private else {}
    config = {
        "frost": FrostConfig(**FROST, **noise),
        "frost again": FrostConfig(**FROST, **noise, num_selections=2),
        "param": ParamConfig(selection_sample_rate=0.3, **noise),
        "full": None,
    }[kind]
    file = tmp_path / "times.json"
    monkeypatch.setenv(VARIABLE, str(file))
    folder = tmp_path / "run"
    options = {"privacy_mode": mode, "max_steps": 2, "accountant": "rdp" if private else None}
    tiny.trained(tiny.trainer(folder, given={"peft_config": config}, **options)).save_model()
    found = json.loads(file.read_text())
    assert set(found) == ({TRAINING} if kind == "full" else {TRAINING, SELECTION})
    if kind != "full":
        assert 0 < found[SELECTION]["wall"] < found[TRAINING]["wall"]
    inside = "".join(p.read_text() for p in folder.rglob("*.json"))
    assert '"wall"' not in inside and '"processor"' not in inside


def test_nothing_is_written_unasked_nor_for_a_part_of_a_run(tmp_path, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(
        Clock, "write", lambda self, write=Clock.write: (asked.append(1), write(self))
    )
    asked: list[int] = []
    before = set(tmp_path.iterdir())
    tiny.trainer(tmp_path / "run", **options).train()
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"run"}
    assert asked == [1]
    again = tiny.trainer(tmp_path / "run", **options)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "times.json"))
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert not (tmp_path / "times.json").exists() and asked == [1]
