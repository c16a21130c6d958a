"""The arguments of an audit, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Check, Problems, argument
from hf_dp._validate import integer, one_of
from hf_dp.plans.units import EXAMPLE
from hf_dp.statement.audited import GRADIENTS, SCORES


@dataclass
class AuditArguments(ArgumentGroup):
    """Parameters of an audit.

    While the run trains, secret coins put canaries in or leave them out (Steinke, Nasr and
    Jagielski 2023, arXiv 2305.08846).
    """

    audit_canaries: int | None = argument(
        None,
        "How many canaries join the rows, each with a coin of its own, to bound epsilon from "
        "below; 1,000 suit many runs. Unset means no audit. They are made up, and they count as "
        "rows: the number of examples grows by as many.",
    )
    audit_scores: str | None = argument(
        None,
        f"What tells of the canaries: {' or '.join(SCORES)}. Unset means {GRADIENTS}: the noised "
        "sums of all steps, in which a canary is one coordinate. In the others a canary is a "
        "made-up row that the model sees. directions: the noised sums in the direction of each "
        "canary's own gradient, which costs a forward and a backward pass a canary and step. "
        "losses: the canaries' losses before and after.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "audit_canaries": (integer, 1),
        "audit_scores": (one_of, SCORES),
    }

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note scores without canaries, and runs that cannot be audited."""
        if args.audit_canaries is None:
            if args.audit_scores is not None:
                found.refuse(
                    "audit_scores",
                    "to be unset without an audit",
                    "Set audit_canaries=1000, or remove it.",
                )
            return
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
                "What is released without noise is audited all the same, and no epsilon covers it.",
            ),
        ):
            if not fits:
                found.refuse(
                    "audit_canaries",
                    f"to be unset unless {name} is {expected}, and it is {getattr(args, name)!r}",
                    move,
                )
