"""``audit_canaries``: audit a run while it trains, and say at its end what canaries told."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.errors import AuditError, UnsupportedArgumentError
from hf_dp.features.base import Inside, Seen, register
from hf_dp.features.canary_rows import with_canaries
from hf_dp.features.one_run_audit import OneRunAudit
from hf_dp.overlap import TrainingRows
from hf_dp.plans.samplers import Sampler as LogicalSampler
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.audited import DIRECTIONS, GRADIENTS, LOSSES
from hf_dp.statement.statement import REFUTED_BY_AUDIT
from hf_dp.tuners.base import Tuner

_LOOK_AT = (
    "Something is wrong: do not publish this model. If you changed how rows are drawn, clipped or "
    "noised (a subclass, a callback, an optimizer), look there first. If not, please report it, "
    "with privacy.json."
)


@register
class Canaries(Inside):
    """Puts canaries among the rows, and guesses at the end which of them took part.

    Attributes: audit: what is known of the canaries, once the run was made.
    """

    adds_rows = True
    audit: OneRunAudit

    def __init__(self, args: Any):
        super().__init__(args)
        self.scores = args.audit_scores or GRADIENTS

    @classmethod
    def is_asked_for(cls, args: Any) -> bool:
        return args.audit_canaries is not None

    def rows(self, dataset: Any, model: nn.Module | None, known: TrainingRows) -> Any:
        """Return the training set with canaries. Raises: DataError."""
        if model is None:
            raise UnsupportedArgumentError(
                "Expected `model` to be given with `audit_canaries`, got None: canaries are made "
                "up for it. Pass the model, not model_init."
            )
        alike = self.scores == GRADIENTS
        return with_canaries(dataset, model, self.args.audit_canaries, alike=alike, rows=known)

    def enter(self, run: PrivateRun, tuner: Tuner) -> None:
        """Toss the coins.

        Raises: UnsupportedArgumentError with several processes, each of which draws rows of its
            own; and for directions among sums that are no gradients.
        """
        count = self.args.audit_canaries
        if not run.processes.alone:
            raise UnsupportedArgumentError(
                f"Expected `audit_canaries` to be unset with {run.processes.count} processes, got "
                f"{count}: each draws from rows of its own. Audit in one process."
            )
        if self.scores == DIRECTIONS and not tuner.gradients_are_noised_sums:
            raise invalid(
                "audit_scores",
                DIRECTIONS,
                f"to be {GRADIENTS!r} or {LOSSES!r} with this peft_config",
                "Its noised sums are of factors, in which a row's gradient has no direction.",
                UnsupportedArgumentError,
            )
        super().enter(run, tuner)
        self.audit = OneRunAudit(self.scores, count, run.plan, run.randomness.random_bytes)
        if self.scores == DIRECTIONS:
            self.audit.gradient_of = self._gradient

    def call(self, checkpoint: str | None, seen: Seen) -> None:
        """Raise UnsupportedArgumentError for an audited run that is resumed, or trained again."""
        if checkpoint is not None or len(seen.book.ledger):
            raise UnsupportedArgumentError(
                "An audited run is not resumed: the coins of its canaries are not kept, so what "
                "the first part told of them is lost. Start again in a new output_dir, or train "
                "without `audit_canaries`."
            )

    def start(self, seen: Seen) -> None:
        if self.scores == LOSSES:
            self.audit.note_losses(self._losses())

    def drawn(self, sampler: LogicalSampler) -> Any:
        return self.audit.draws(sampler)

    def clipped(self, sums: dict[str, Tensor]) -> None:
        self.audit.insert(sums)

    def noised(self, sums: dict[str, Tensor]) -> None:
        self.audit.score(sums)

    def conclude(self) -> None:
        """Guess which canaries took part, and keep what follows for the statement."""
        if self.scores == LOSSES:
            self.audit.note_losses(self._losses())
        if self.audit.count > 1:  # of many runs with one each, `hf-dp audit leave-one-out` guesses
            self.run.found["audit"] = self.audit.result(self.run.epsilon().value)

    def end(self, seen: Seen) -> None:
        """Raise AuditError for a statement that its own audit refutes."""
        statement = seen.statement()
        if statement.accountant_note == REFUTED_BY_AUDIT:
            raise AuditError(
                f"The run is not as private as it claims: {statement.status_reason}. {_LOOK_AT}"
            )

    def _gradient(self, canary: int) -> dict[str, Tensor]:
        """Return the gradient of a canary's loss, without dropout, by the names of what trains."""
        run, row = self.run, self.audit.first + canary
        data, model = run.training_data(), run.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        training = model.training
        model.eval()
        try:
            with torch.enable_grad():
                layout = data.looked_over.layout
                loss = run.losses(data.padding.together([data.examples[row]], layout))
                found = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
        finally:
            model.train(training)
        return {
            name: torch.zeros_like(p) if each is None else each
            for (name, p), each in zip(trained.items(), found, strict=True)
        }

    @torch.no_grad()
    def _losses(self) -> np.ndarray:
        run, audit = self.run, self.audit
        data, training = run.training_data(), run.model.training
        examples = data.examples.__getitems__([audit.first + each for each in range(audit.count)])
        found = np.empty(audit.count)
        batches = data.batches()
        run.model.eval()
        try:
            for group in batches.cut(examples, range(len(examples))):
                batch = data.padding.together([examples[each] for each in group], batches.layout)
                found[group] = run.losses(batch).double().cpu().numpy()
        finally:
            run.model.train(training)
        return found


def audit_of(run: PrivateRun) -> OneRunAudit:
    """Return the audit of a run that has one."""
    return next(each.audit for each in run.inside if isinstance(each, Canaries))
