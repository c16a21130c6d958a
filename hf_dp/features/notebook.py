"""The progress table in a notebook; in a file of its own because it needs IPython."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers.utils.notebook import NotebookProgressCallback


class NotebookEpsilonProgress(NotebookProgressCallback):
    """The notebook's progress table, with a column for epsilon and a row for the first step.

    The training loss reads "withheld" unless it is released.

    Args: spent: returns the epsilon so far, as logs have it.
    """

    def __init__(self, spent: Callable[[], dict[str, float]]):
        super().__init__()
        self._spent, self._shows = spent, False

    def on_train_begin(self, args: object, state: State, control: Control, **kw: object) -> None:
        self._shows = False
        super().on_train_begin(args, state, control, **kw)

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if not self._shows:
            self.on_log(args, state, control, logs=self._spent())
        super().on_step_end(args, state, control, **kw)

    def on_log(self, args: Any, state: State, control: Any, logs: Any = None, **kw: Any) -> None:
        logs = logs or {}
        self._shows = True
        super().on_log(args, state, control, logs=logs, **kw)
        if (
            self.training_tracker is None
            or "epsilon" not in logs
            or any(name.startswith("eval_") for name in logs)
        ):
            return
        columns = self.training_tracker.inner_table[0]
        row: dict[str, Any] = dict.fromkeys(
            columns, "No log"
        )  # the first row of the table must fill all columns
        row["Training Loss"] = logs.get("loss", "withheld")
        by_step = self.first_column == "Step"
        row[self.first_column] = state.global_step if by_step else round(state.epoch or 0, 2)
        row["Epsilon"] = logs["epsilon"]
        row |= {n.replace("_", " ").title(): logs[n] for n in logs if n.startswith("noised_")}
        self.training_tracker.write_line(row)
