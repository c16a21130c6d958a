"""Progress shows the epsilon spent so far, in a terminal and in a notebook."""

from __future__ import annotations

import tiny
from transformers.trainer_callback import ProgressCallback

from hf_dp.trainer.callbacks import EpsilonProgress, with_epsilon
from hf_dp.trainer.notebook import NotebookEpsilonProgress


def test_the_terminal_bar_shows_epsilon(tmp_path, capsys):
    trainer = tiny.trainer(tmp_path, disable_tqdm=False)
    assert any(type(callback) is EpsilonProgress for callback in trainer.callback_handler.callbacks)
    assert not any(
        type(callback) is ProgressCallback for callback in trainer.callback_handler.callbacks
    )
    trainer.train()
    assert f"epsilon {trainer.epsilon().rounded_up():g}" in capsys.readouterr().err


def test_the_notebook_table_has_an_epsilon_column(tmp_path, capsys):
    trainer = tiny.trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    notebook = NotebookEpsilonProgress()
    tables = []
    trainer.add_callback(notebook)
    original = notebook.on_step_end

    def watched(*args, **kwargs):
        original(*args, **kwargs)
        tables.append([list(row) for row in notebook.training_tracker.inner_table])

    notebook.on_step_end = watched
    trainer.train()
    assert "Epsilon" in tables[-1][0]


def test_a_stock_notebook_callback_is_replaced_and_others_kept():
    from transformers.utils.notebook import NotebookProgressCallback

    assert type(with_epsilon(NotebookProgressCallback())) is NotebookEpsilonProgress
    own = object()
    assert with_epsilon(own) is own
