"""Progress as a private run counts it: the epsilon spent, and epochs as expected passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers.trainer_callback import ProgressCallback

from hf_dp.features.base import Feature, Seen, register
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement.unnoised import NO_EPSILON


@register
class Progress(Feature):
    """Shows epsilon where Trainer shows progress."""

    def begin(self, seen: Seen) -> None:
        seen.callbacks[:] = [
            EpsilonProgress(seen.spent) if type(each) is ProgressCallback else each
            for each in seen.callbacks
        ]
        seen.callbacks.append(ExpectedEpochs(seen.plan))


class ExpectedEpochs(TrainerCallback):
    """Counts epochs as expected passes over the rows: steps x expected batch size / rows.

    Trainer counts loaders, whose lengths are whole numbers of steps.
    """

    def __init__(self, plan: PrivacyPlan):
        self._a_step = plan.expected_batch_size / plan.drawn_from

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        state.epoch = state.global_step * self._a_step


class EpsilonProgress(ProgressCallback):
    """The terminal's progress bar, with the epsilon spent at the first step and at each log, and
    what else is released with noise.

    Args: spent: returns the epsilon so far, as logs have it.
    """

    def __init__(self, spent: Callable[[], dict[str, float]]):
        super().__init__()
        self._spent, self._shows = spent, False

    def on_train_begin(self, args: object, state: State, control: Control, **kw: object) -> None:
        self._shows = False
        super().on_train_begin(args, state, control, **kw)

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self.training_bar is not None and not self._shows:
            self._show(self._spent(), refresh=True)
        super().on_step_end(args, state, control, **kw)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
        if self.training_bar is not None:
            self._show(logs or {})
        super().on_log(args, state, control, logs, **kw)

    def _show(self, logs: Mapping[str, float], refresh: bool = False) -> None:
        shown = "privacy not established" if NO_EPSILON in logs else ""
        if "epsilon" in logs:
            shown = f"epsilon {logs['epsilon']:g}"
            for name in logs:
                if name.startswith("noised_"):
                    shown += f", {name.replace('_', ' ')} {logs[name]:.4g}"
        if shown:
            self._shows = True
            bar: Any = self.training_bar
            bar.set_postfix_str(shown, refresh=refresh)
