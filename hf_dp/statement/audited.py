"""Keep what an audit of a run found, and compare it with what its statement claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

from hf_dp._dataclasses import checked_fields
from hf_dp._validate import in_unit_interval, one_of
from hf_dp.accounting import Event
from hf_dp.accounting.one_run import (
    claimed_curve,
    epsilon_at_least,
    epsilon_of,
    mu_at_least,
    p_value,
    refutes_curve,
)
from hf_dp.errors import InvalidArgumentError, LedgerError

GRADIENTS, DIRECTIONS, LOSSES = "gradients", "directions", "losses"
SCORES = (GRADIENTS, DIRECTIONS, LOSSES)
_SEEN = {
    GRADIENTS: "the noised gradients of all steps",
    DIRECTIONS: "the noised gradients of all steps in the direction of each one's own",
    LOSSES: "their losses",
}
CONFIDENCE = 0.95  # of the bounds
REFUTED = 0.999  # from this confidence on a claim is refuted, by one of two tests
_CLOSE = 1e-3


@dataclass(frozen=True)
class AuditResult:
    """What guesses about canaries showed (:mod:`hf_dp.accounting.one_run`).

    Args:
        scores: what was looked at: one of :data:`SCORES`.
        canaries: m, rows that a fair coin each put in or left out. The coins are not kept.
        guesses: r, decided before anything was seen.
        correct: v, the right ones.
        delta: that of the claim.
        epsilon_at_least: a lower bound on epsilon at that delta, with CONFIDENCE; it proves
            nothing from above.
        mu_at_least: the same on mu, if the run is mu-GDP for any mu.
        epsilon_at_least_if_gaussian: the epsilon of that mu at delta.

    Raises: InvalidArgumentError for numbers that do not follow from the counts.
    """

    scores: str
    canaries: int
    guesses: int
    correct: int
    delta: float
    epsilon_at_least: float
    mu_at_least: float
    epsilon_at_least_if_gaussian: float

    def __post_init__(self) -> None:
        one_of("scores", self.scores, SCORES)
        in_unit_interval("delta", self.delta)
        again = _bounds(self.canaries, self.guesses, self.correct, self.delta)
        stated = (self.epsilon_at_least, self.mu_at_least, self.epsilon_at_least_if_gaussian)
        if not all(
            isinstance(one, float) and math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)
            for one, other in zip(stated, again, strict=True)
        ):
            raise InvalidArgumentError(
                f"Expected the bounds of an audit to follow from its counts, got {stated}, and "
                f"{self.correct} right of {self.guesses} guesses about {self.canaries} canaries "
                f"give {again}. The record was edited."
            )

    @classmethod
    def of(cls, scores: str, canaries: int, guesses: int, correct: int, delta: float) -> Self:
        """Return the result of so many right guesses."""
        bounds = _bounds(canaries, guesses, correct, delta)
        return cls(scores, canaries, guesses, correct, delta, *bounds)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Read back what :func:`dataclasses.asdict` gave. Raises: LedgerError."""
        try:
            return cls(**checked_fields(cls, values, LedgerError))
        except (InvalidArgumentError, TypeError, ValueError) as error:
            raise LedgerError(f"The audit cannot be read: {error}") from error

    def in_words(self) -> str:
        """Say what was found, what this design could have found, and what it is worth."""
        all_right = _bounds(self.canaries, self.guesses, self.guesses, self.delta)
        return (
            f"epsilon >= {_down(self.epsilon_at_least)} at {CONFIDENCE:.0%} confidence (>= "
            f"{_down(self.epsilon_at_least_if_gaussian)} if the run is Gaussian, mu-GDP): "
            f"{self.correct} of {self.guesses} guesses about {self.canaries} canaries were right, "
            f"by {_SEEN[self.scores]}. All of them right would have shown {_down(all_right[0])} "
            f"(>= {_down(all_right[2])} if Gaussian), the most that this audit can. Canaries are "
            "made up and count as rows. An audit can refute "
            "a claim; it never proves one"
        )

    def refutation(self, epsilon: float, events: Sequence[Event], accountant: str) -> str:
        """Say how the guesses refute a claim, with the confidence REFUTED; empty if they do not.

        Two tests share what they may err: of (epsilon, delta), and of all that the accountant
        proves of the events.
        """
        level = (1 - REFUTED) / 2
        counts = (self.canaries, self.guesses, self.correct)
        by_epsilon = p_value(*counts, epsilon, self.delta) <= level
        if not by_epsilon and not refutes_curve(*counts, _curve(tuple(events), accountant), level):
            return ""
        what = f"epsilon {epsilon:.3f}" if by_epsilon else "the trade-off that the ledger gives"
        return (
            f"an audit told {self.correct} of {self.guesses} canaries right, which under {what} "
            f"happens with a probability below {1 - REFUTED:.1g}"
        )


def _down(epsilon: float) -> str:
    return f"{math.floor(epsilon * 100) / 100:.2f}"


@lru_cache(maxsize=64)
def _bounds(canaries: int, guesses: int, correct: int, delta: float) -> tuple[float, float, float]:
    mu = mu_at_least(canaries, guesses, correct, CONFIDENCE)
    return (
        epsilon_at_least(canaries, guesses, correct, delta, CONFIDENCE),
        mu,
        epsilon_of(mu, delta),
    )


@lru_cache(maxsize=4)
def _curve(events: tuple[Event, ...], accountant: str) -> Any:
    return claimed_curve(events, accountant)


def audit_of(values: Mapping[str, Any]) -> AuditResult | None:
    """Return the audit in the fields of a record; None if there is none."""
    given = values.get("audit")
    return None if given is None else AuditResult.from_dict(given)


def as_fields(audit: AuditResult | None) -> dict[str, Any]:
    """Return the fields of a record for an audit: none without one, as in earlier versions."""
    return {} if audit is None else {"audit": asdict(audit)}
