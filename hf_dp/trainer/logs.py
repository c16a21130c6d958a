"""The logs of a private run: nothing between a draw and its release, and what is released else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.utils import logging

from hf_dp.mechanisms import Mechanism
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.unnoised import (
    CLIPPED_GRADIENT_NORM,
    NO_EPSILON,
    unknown_names,
    withhold,
)

logger = logging.get_logger(__name__)

NO_LOSS = (torch.zeros((), dtype=torch.float64), 0)  # no noised loss yet


class ReleasedLogs(Trainer):
    """A Trainer that logs, in private modes, what is released and nothing else."""

    _run: PrivateRun | None
    mechanism: Mechanism
    _noised_losses: tuple[Tensor, int]  # their sum over the steps since the last log, and these
    _is_silent: bool = False  # whether rows of a draw are in sight
    _told: frozenset[str] = frozenset()  # dropped names that were warned of

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Log nothing meanwhile, and leave the Trainer's state as it was: rows are in sight, to a
        loss, a hook or a collator."""
        state, history, was_silent = self.state, self.state.log_history, self._is_silent
        # An older entry than the last is looked at where the log is saved.
        before, entries = dict(vars(state)), [*history[:-1], *map(dict, history[-1:])]
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent, self.state = was_silent, state
            vars(state).update(before)
            history[:] = entries

    def silent_loss(self, model: Any, inputs: Any) -> Tensor:
        """Return the losses of made-up rows or of a draw."""
        with self.silent():
            return self.compute_per_example_loss(model, inputs)

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        """Return one loss per example."""
        raise NotImplementedError

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next draw, as Trainer does."""
        if self._run is None:
            return super().get_batch_samples(*args, **kwargs)
        with self.silent():
            return super().get_batch_samples(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, without what a private run withholds, with the epsilon spent so far.

        Beside the norm of a noised gradient stands ``signal_to_noise``. It estimates |g|^2 / |z|^2,
        the square of Li et al.'s ratio (section 3.1.1), from that norm; where there is hardly any
        signal, it may be below 0. With ``release=["clipped_gradient_norm"]`` the norm of the
        clipped mean before noise stands there, too, and that square as measured with it.
        ``noised_loss``, where it is released, is the mean over the steps since the last log of
        steps.
        """
        args: Any = self.args
        if args.is_private:
            dropped = self._dropped(logs)
            if self._is_silent or (dropped and len(dropped) == len(logs)):
                return
            if dropped:  # the caller keeps them
                logs = {name: value for name, value in logs.items() if name not in dropped}
            of_steps = "loss" in logs or "train_loss" in logs  # and not of an evaluation
            total, steps = self._noised_losses
            if steps and of_steps:
                logs["noised_loss"] = float(total) / steps
                self._noised_losses = NO_LOSS
            self._withhold(logs)
            noise = None if self._run is None else self.mechanism.noise_norm
            if noise is not None and "grad_norm" in logs:
                # E|g + z|^2 = |g|^2 + E|z|^2: an estimate from what is released anyway.
                logs["signal_to_noise"] = (float(logs["grad_norm"]) / noise) ** 2 - 1
                if (signal := self.mechanism.signal_norm) is not None:  # released on purpose
                    logs[CLIPPED_GRADIENT_NORM] = signal
                    logs["measured_signal_to_noise"] = (signal / noise) ** 2
            if self.is_in_train and self._run is not None:
                logs |= self.spent()
        super().log(logs, start_time)

    def spent(self) -> dict[str, float]:
        """Return the epsilon so far, under the name that logs have for it."""
        assert self._run is not None
        name = "epsilon" if self._run.plan.mechanism.established else NO_EPSILON
        return {name: self._run.epsilon().rounded_up()}

    def save_state(self) -> None:
        """Save the Trainer's state, as Trainer does."""
        self.keep_released()
        super().save_state()

    def keep_released(self) -> None:
        """Take out of the state what a callback put into the log beside :meth:`log`."""
        if self._run is None:
            return
        for entry in self.state.log_history:
            for name in self._dropped(entry):
                del entry[name]
            self._withhold(entry)

    def _withhold(self, logs: dict[str, float]) -> None:
        released = () if self._run is None else self._run.book.released
        published = self.args.is_published_dp_fp  # type: ignore[attr-defined]
        withhold(logs, released, gradients_are_noised=not published)

    def _dropped(self, logs: dict[str, float]) -> list[str]:
        """Return the names that are not logged, and warn of each once."""
        dropped = list(logs) if self._is_silent else unknown_names(logs)
        if new := [name for name in dropped if name not in self._told]:
            self._told |= {*new}
            logger.warning(
                "Not logged: %s. %s. For a training loss set noised_loss_bound and "
                "noised_loss_budget_ratio (with noise), or release=['training_loss'] on public "
                "rows. Metrics of other rows are logged by evaluate() and predict(), under names "
                "that begin with eval_ or test_.",
                ", ".join(f"`{name}`" for name in new),
                "A private step logs nothing before its noise"
                if self._is_silent
                else "It is not known to be noised, and epsilon would not cover it",
            )
        return dropped
