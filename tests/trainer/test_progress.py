"""Progress shows the epsilon spent so far, in a terminal and in a notebook."""

import pytest
import tiny
from transformers.utils.notebook import NotebookProgressCallback
from watch import watch

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.features.always import Progress

pytestmark = pytest.mark.usefixtures("unchecked")


def test_the_bar_shows_epsilon_from_the_first_step(tmp_path, capsys):
    trainer = tiny.trained(tiny.trainer(tmp_path / "logged", disable_tqdm=False))
    assert f"epsilon {trainer.epsilon().rounded_up():g}" in capsys.readouterr().err
    # Whatever is logged: by another way than the run's, from noise, rate and steps.
    options = {"logging_strategy": "no", "accountant": "rdp", "disable_tqdm": False}
    trainer = tiny.trained(tiny.trainer(tmp_path, **options, max_steps=3))
    delta = trainer.privacy_plan.delta
    first = epsilon(PoissonSampledGaussian(1.0, 8 / 40, 1), delta, "rdp").rounded_up()
    # Not the count beside it: tqdm draws that again after a tenth of a second at the earliest.
    assert f"epsilon {first:g}" in capsys.readouterr().err


def test_planted_bar_that_waits_for_a_log_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Progress, "on_step_end", lambda *args, **kwargs: None)
    tiny.trainer(tmp_path, logging_strategy="no", disable_tqdm=False, max_steps=1).train()
    assert "epsilon" not in capsys.readouterr().err.split("1/1")[0]


def test_the_notebook_table_has_an_epsilon_column(tmp_path, monkeypatch):
    trainer = tiny.trainer(tmp_path, eval_strategy="steps", eval_steps=2, logging_steps=2)
    notebook = NotebookProgressCallback()
    trainer.callback_handler.callbacks.insert(0, notebook)  # where Trainer has it

    def table(*given, **named):
        return [list(row) for row in notebook.training_tracker.inner_table]

    tables = watch(monkeypatch, notebook, "on_train_end", before=table)
    trainer.train()
    columns, *rows = tables[0]
    assert columns == ["Step", "Training Loss", "Validation Loss", "Epsilon"]
    assert [row[:2] for row in rows] == [[step, "withheld"] for step in (1, 2, 4)]
    assert [row[2] != "No log" for row in rows] == [False, True, True]
    assert 0 < rows[0][3] < rows[1][3] < rows[2][3]
