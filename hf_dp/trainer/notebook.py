"""The progress table in a notebook. Apart from the terminal's, because it needs IPython."""

from __future__ import annotations

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback


class NotebookEpsilonProgress(NotebookProgressCallback):
    """The notebook table, with an Epsilon column where a training loss is not released."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif self.training_tracker is not None and "epsilon" in logs and not any(k.startswith("eval_") for k in logs):
            self.training_tracker.write_line({self.first_column: state.global_step, "Epsilon": logs["epsilon"]})
