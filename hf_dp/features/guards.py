"""Guards of Trainer's loop: it stops before the target is passed, and its steps move weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError, UnaccountedGradientError
from hf_dp.features.base import Feature, Seen, register
from hf_dp.run.ledger import RunLedger
from hf_dp.run.other_training import note_steps_before_own


@register
class Guards(Feature):
    """Watches that each step is in the ledger, stays within the target and moves the weights."""

    def begin(self, seen: Seen) -> None:
        if seen.plan.releases_each_step:
            seen.callbacks.append(StopBeforeTarget(seen.book))
        seen.callbacks.append(WeightsMove())


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
