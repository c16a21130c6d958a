"""Audit a training run: put canaries among its rows, and say at its end what they told."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.errors import AuditError, UnsupportedArgumentError
from hf_dp.overlap import TrainingRows
from hf_dp.run.canary_rows import with_canaries
from hf_dp.run.one_run_audit import OneRunAudit
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.audited import DIRECTIONS, GRADIENTS, LOSSES
from hf_dp.statement.statement import REFUTED_BY_AUDIT, PrivacyStatement

_LOOK_AT = (
    "Something is wrong: do not publish this model. If you changed how rows are drawn, clipped or "
    "noised (a subclass, a callback, an optimizer), look there first. If not, please report it, "
    "with privacy.json."
)


def with_canaries_for(args: Any, dataset: Any, model: nn.Module | None, rows: TrainingRows) -> Any:
    """Return the training set with the canaries that the arguments ask for. Raises: DataError."""
    if model is None:
        raise UnsupportedArgumentError(
            "Expected `model` to be given with `audit_canaries`, got None: canaries are made up "
            "for it. Pass the model, not model_init."
        )
    return with_canaries(
        dataset, model, args.audit_canaries, alike=_scores(args) == GRADIENTS, rows=rows
    )


def audit_for(args: Any, run: PrivateRun, sums_are_gradients: bool) -> OneRunAudit | None:
    """Return the audit that the arguments ask for.

    Args: sums_are_gradients: whether the noised sums are those of the weights' gradients.

    Raises: UnsupportedArgumentError with several processes, each of which draws rows of its own;
        and for directions among sums that are no gradients.
    """
    if args.audit_canaries is None:
        return None
    if not run.processes.alone:
        raise UnsupportedArgumentError(
            f"Expected `audit_canaries` to be unset with {run.processes.count} processes, got "
            f"{args.audit_canaries}: each draws from rows of its own. Audit in one process."
        )
    if _scores(args) == DIRECTIONS and not sums_are_gradients:
        raise invalid(
            "audit_scores",
            DIRECTIONS,
            f"to be {GRADIENTS!r} or {LOSSES!r} with this peft_config",
            "Its noised sums are of factors, in which a row's gradient has no direction.",
            UnsupportedArgumentError,
        )
    audit = OneRunAudit(_scores(args), args.audit_canaries, run.plan, run.randomness.random_bytes)
    if audit.scores == DIRECTIONS:
        audit.gradient_of = lambda canary: _gradient(run, audit.first + canary)
    return audit


def _scores(args: Any) -> str:
    return args.audit_scores or GRADIENTS


def refuse_second_audit(run: PrivateRun, checkpoint: str | None) -> None:
    """Raise UnsupportedArgumentError for an audited run that is resumed, or trained again: its
    coins are not kept."""
    if run.audit is not None and (checkpoint is not None or len(run.ledger)):
        raise UnsupportedArgumentError(
            "An audited run is not resumed: the coins of its canaries are not kept, so what the "
            "first part told of them is lost. Start again in a new output_dir, or train without "
            "`audit_canaries`."
        )


def note_losses(run: PrivateRun) -> None:
    """Note the canaries' losses, where these are compared."""
    if run.audit is not None and run.audit.scores == LOSSES:
        run.audit.note_losses(_losses(run, run.audit))


def _gradient(run: PrivateRun, row: int) -> dict[str, Tensor]:
    """Return the gradient of a row's loss, without dropout, by the names of what trains."""
    data, model = run.training_data(), run.model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            loss = run.losses(data.padding.together([data.examples[row]], data.looked_over.layout))
            found = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    finally:
        model.train(training)
    return {
        name: torch.zeros_like(p) if each is None else each
        for (name, p), each in zip(trained.items(), found, strict=True)
    }


@torch.no_grad()
def _losses(run: PrivateRun, audit: OneRunAudit) -> np.ndarray:
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


def conclude_audit(run: PrivateRun) -> None:
    """Guess which canaries took part, and keep what follows for the statement."""
    if run.audit is None:
        return
    note_losses(run)
    if run.audit.count == 1:  # one guess shows nothing: `hf-dp audit leave-one-out` has many runs
        return
    run.audit_result = run.audit.result(run.epsilon().value)


def refuse_refuted(statement: PrivacyStatement | None) -> None:
    """Raise AuditError for a statement that its own audit refutes."""
    if statement is not None and statement.accountant_note == REFUTED_BY_AUDIT:
        raise AuditError(
            f"The run is not as private as it claims: {statement.status_reason}. {_LOOK_AT}"
        )
