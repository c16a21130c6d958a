"""Callbacks of Trainer's loop: stop before the target is passed, and show epsilon with progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError, UnaccountedGradientError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.ledger import RunLedger
from hf_dp.run.other_training import note_steps_before_own
from hf_dp.statement.unnoised import NO_EPSILON

Spent = Callable[[], dict[str, float]]


class StopBeforeTarget(TrainerCallback):
    """Ends training when one more step would pass ``target_epsilon``.

    It aborts at once when a step is not in the ledger.
    """

    def __init__(self, run: RunLedger):
        self.run = run
        # Steps in the ledger beyond the optimizer's: branches, and earlier calls of train().
        self._ahead = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ahead = self.run.steps_made - state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        recorded = self.run.steps_made - self._ahead
        if recorded != state.global_step:
            raise LedgerError(
                f"The optimizer made step {state.global_step}, but the ledger holds {recorded}: a "
                "step ran that was not recorded. No privacy statement covers the weights in "
                "memory; do not publish them."
            )
        if self.run.exhausted:
            control.should_training_stop = True


class ExpectedEpochs(TrainerCallback):
    """Counts epochs as expected passes over the rows: steps x expected batch size / rows.

    Trainer counts loaders, whose lengths are whole numbers of steps.
    """

    def __init__(self, plan: PrivacyPlan):
        self._a_step = plan.expected_batch_size / plan.drawn_from

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step * self._a_step


class WeightsMove(TrainerCallback):
    """Aborts if the first optimizer steps leave every trainable weight unchanged.

    Continuing would spend budget for nothing. The cause is an optimizer that holds other tensors
    than the model: it was made before ``get_peft_model``, or the model was moved or its parameters
    replaced since. The callback compares the first values of each weight until one has changed.
    """

    _LOOKED_AT = 4096

    def __init__(self) -> None:
        self._moved = False
        self._before: list[Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        note_steps_before_own(model)
        if not self._moved:  # an empty draw of DP-FP has no gradient, and may leave all unchanged
            told = any(
                p.grad is not None and bool(_own(p.grad).any())
                for p in model.parameters()
                if p.requires_grad
            )
            told = bool(Processes.here().largest(told))
            self._before = self._values(model) if told else []

    def on_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        # Warmup starts at a learning rate of 0.
        if self._moved or not self._before or (rates and not any(rates)):
            return
        moved = any(
            not torch.equal(x, y) for x, y in zip(self._before, self._values(model), strict=True)
        )
        self._moved = bool(Processes.here().largest(moved))
        if not self._moved:
            raise UnaccountedGradientError(
                "The optimizer step changed none of the model's trainable weights. The optimizer "
                "holds other tensors than the model, or the learning rate is too small for the "
                f"precision of the weights (rates {rates}). Wrap the model (get_peft_model), move "
                "it to its device and set its dtype before you create optimizer and trainer."
            )
        self._before = []

    def _values(self, model: Any) -> list[Tensor]:
        return [
            _own(p.detach()).flatten()[: self._LOOKED_AT].clone()
            for p in model.parameters()
            if p.requires_grad and p.numel()
        ]


def _own(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EpsilonProgress(ProgressCallback):
    """The terminal's progress bar, with the epsilon spent at the first step and at each log, and
    the noised loss where one is released.

    Args: spent: returns the epsilon so far, as logs have it.
    """

    def __init__(self, spent: Spent):
        super().__init__()
        self._spent, self._shows = spent, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shows = False
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None and not self._shows:
            self._show(self._spent(), refresh=True)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self._show(logs or {})
        super().on_log(args, state, control, logs=logs, **kwargs)

    def _show(self, logs: dict[str, float], refresh: bool = False) -> None:
        shown = "privacy not established" if NO_EPSILON in logs else ""
        if "epsilon" in logs:
            shown = f"epsilon {logs['epsilon']:g}"
            if "noised_loss" in logs:
                shown += f", noised loss {logs['noised_loss']:.4g}"
        if shown:
            self._shows = True
            bar: Any = self.training_bar
            bar.set_postfix_str(shown, refresh=refresh)


def with_epsilon(callback: Any, spent: Spent) -> Any:
    """Replace a stock progress callback by one that also shows epsilon; return others unchanged."""
    if type(callback) is ProgressCallback:
        return EpsilonProgress(spent)
    if type(callback).__name__ == "NotebookProgressCallback":
        from hf_dp.trainer.notebook import NotebookEpsilonProgress

        return NotebookEpsilonProgress(spent)
    return callback
