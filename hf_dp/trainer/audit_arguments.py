"""The arguments of an audit, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import integer, invalid, one_of
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.units import EXAMPLE
from hf_dp.statement.audited import GRADIENTS, SCORES


@dataclass
class AuditArguments:
    r"""
    Arguments of [`DPTrainingArguments`] for an audit of the run while it trains: secret coins put
    canaries in or leave them out (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846).

    > Parameters of an audit

        audit_canaries (`int`, *optional*):
            How many canaries join the rows, each with a coin of its own; 1,000 suit many runs.
            Unset means no audit. They are made up, and they count as rows: N grows by as many.
        audit_scores (`str`, *optional*):
            What tells of them: `"gradients"` (unset means this), the noised sums of all steps, in
            which a canary is one coordinate. In the others a canary is a made-up row that the model
            sees: `"directions"`, the noised sums in the direction of each canary's own gradient,
            which costs a forward and a backward pass a canary and step; or `"losses"`, the
            canaries' losses before and after.
    """

    audit_canaries: int | None = field(
        default=None,
        metadata={
            "help": "How many canaries join the rows, to bound epsilon from below. Unset means no "
            "audit."
        },
    )
    audit_scores: str | None = field(
        default=None,
        metadata={
            "help": f"What tells of the canaries: {' or '.join(SCORES)}. Unset means {GRADIENTS}."
        },
    )


def audit_problems(args: Any) -> dict[str, InvalidArgumentError]:
    """Return what is wrong with the arguments of an audit, by name."""
    if args.audit_canaries is None:
        if args.audit_scores is None:
            return {}
        return {
            "audit_scores": invalid(
                "audit_scores",
                args.audit_scores,
                "to be unset without an audit",
                "Set audit_canaries=1000, or remove it.",
            )
        }
    try:
        integer("audit_canaries", args.audit_canaries, 1)
        one_of("audit_scores", args.audit_scores or GRADIENTS, SCORES)
    except InvalidArgumentError as error:
        return {str(error).split("`")[1]: error}
    for name, fits, expected, move in (
        ("privacy_mode", args.privacy_mode == "dp_sgd", "'dp_sgd'", "It adds noise to sums."),
        (
            "privacy_unit",
            args.privacy_unit == EXAMPLE,
            repr(EXAMPLE),
            "A canary is one row, so audit a run that protects rows.",
        ),
        (
            "release",
            not args.release,
            "empty",
            "What is released without noise is not covered by epsilon, and audited all the same.",
        ),
    ):
        if not fits:
            return {
                "audit_canaries": invalid(
                    "audit_canaries",
                    args.audit_canaries,
                    f"to be unset unless {name} is {expected}, and it is {getattr(args, name)!r}",
                    move,
                )
            }
    return {}
