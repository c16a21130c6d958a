"""The logs of a private run: nothing between a draw and its release, and what is released else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from torch import Tensor, nn
from transformers import Trainer
from transformers.utils import logging

from hf_dp.batches.examples import Collator
from hf_dp.batches.structure import Batch, DataSet, Example
from hf_dp.mechanisms import Mechanism
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.checks import check_head_is_trainable
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.facts import NO_EPSILON, unknown_names, withhold
from hf_dp.statement.statement import observed, why_not_private
from hf_dp.tuners.base import Tuner

logger = logging.get_logger(__name__)


class ReleasedLogs(Trainer):
    """A Trainer that may have a private run, and then logs what is released and nothing else."""

    model: Any
    card: dict[str, Any]
    compute_per_example_loss: Callable[[nn.Module, Batch], Tensor]
    synthetic_batches: Callable[[], list[Example]]
    write_beside_weights: Callable[[str], None]  # of a private run, once it is made
    mechanism: Mechanism
    tuner: Tuner
    privacy_plan: PrivacyPlan | None = None
    _run: PrivateRun | None = None
    _evaluation: dict[int, dict[str, float]]  # the latest metrics of the weights after a step
    known_names: frozenset[str] = frozenset()  # which features log
    _is_silent: bool = False  # whether rows of a draw are in sight
    _told: frozenset[str] = frozenset()  # dropped names that were warned of

    @property
    def folder(self) -> str:
        """The run's output folder."""
        return str(self.args.output_dir)

    def columns_for_training(self) -> tuple[DataSet, Collator]:
        """Return data and collator without the columns that the model's forward does not take."""
        data, collator = self.train_dataset, self.data_collator
        if isinstance(data, datasets.Dataset):
            return self._remove_unused_columns(data, description="Training"), collator
        return data, self._get_collator_with_removed_columns(collator, description="Training")

    def train_model(self, model: nn.Module) -> None:
        """Train the model that the tuner made, from before the optimizer exists."""
        if model is not self.model:
            self.model = self.model_wrapped = self.callback_handler.model = model
            check_head_is_trainable(model)

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

    def silent_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the losses of synthetic rows or of a draw."""
        with self.silent():
            return self.compute_per_example_loss(model, inputs)

    def only_known(self, logs: dict[str, float]) -> dict[str, float] | None:
        """Return what may be logged, if it is not withheld; None where nothing may."""
        dropped = self._dropped(logs)
        if self._is_silent or (dropped and len(dropped) == len(logs)):
            return None
        # The caller keeps what is dropped.
        return {n: v for n, v in logs.items() if n not in dropped} if dropped else logs

    def spent(self) -> dict[str, float]:
        """Return the epsilon so far, or the figure that a paper gives where no bound is known, by
        the name that logs have for it; nothing where the statement would not let it stand."""
        run = self._run
        if run is None:
            return {}
        if run.established:
            return {"epsilon": run.epsilon().rounded_up()}
        known = run.book.weaknesses
        if run.plan.mechanism.established or why_not_private(run.ledger, known) or observed(known):
            return {}
        return {NO_EPSILON: run.epsilon().rounded_up()}

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
            # Before a resume, another process may have released more.
            self.withhold(entry, self._run.book.weaknesses.released)

    def withhold(self, logs: dict[str, float], released: Collection[str]) -> None:
        """Remove, in place, what the user did not ask to release."""
        withhold(logs, released, gradients_are_noised=self.mechanism.gradients_are_noised)

    def _dropped(self, logs: dict[str, float]) -> list[str]:
        """Return the names that are not logged, and warn of each once."""
        dropped = list(logs) if self._is_silent else unknown_names(logs, self.known_names)
        if new := [name for name in dropped if name not in self._told]:
            self._told |= {*new}
            logger.warning(
                "Not logged: %s. It is not known to be noised, and epsilon would not cover it. For "
                "a training loss set noised_loss_bound and noised_loss_budget_ratio, or, on public "
                "rows, release=['training_loss']. Metrics of other rows are logged by evaluate() "
                "and predict(), under names that begin with eval_ or test_.",
                ", ".join(f"`{name}`" for name in new),
            )
        return dropped
