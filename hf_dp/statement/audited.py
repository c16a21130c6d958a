"""Keep what an audit of a run found, and compare it with what its statement claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from hf_dp._validate import in_unit_interval, one_of
from hf_dp.accounting import Event
from hf_dp.accounting.gdp_clt import gaussian_epsilon
from hf_dp.accounting.one_run import (
    claimed_curve,
    epsilon_at_least,
    mu_at_least,
    p_value,
    refutes_curve,
)

GRADIENTS, DIRECTIONS, LOSSES = "gradients", "directions", "losses"
SCORES = (GRADIENTS, DIRECTIONS, LOSSES)
_SEEN = {
    GRADIENTS: "the noised gradients of all steps",
    DIRECTIONS: "the noised gradients of all steps in the direction of each one's own",
    LOSSES: "their losses",
}
CONFIDENCE = 0.95  # of the bounds
REFUTED = 0.999  # from this confidence on a claim is refuted, by one of two tests


@dataclass(frozen=True)
class AuditResult:
    """What guesses about canaries showed (:mod:`hf_dp.accounting.one_run`)."""

    scores: str  # what was looked at: one of SCORES
    canaries: int  # m, rows that a fair coin each put in or left out; the coins are not kept
    guesses: int  # r, decided before anything was seen
    correct: int  # v, the right ones
    delta: float  # that of the claim

    def __post_init__(self) -> None:
        one_of("scores", self.scores, SCORES)
        in_unit_interval("delta", self.delta)
        _bounds(self.canaries, self.guesses, self.correct, self.delta)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower bounds on epsilon at delta, with CONFIDENCE: of any run, and of a run that is
        mu-GDP for any mu. They prove nothing from above."""
        return _bounds(self.canaries, self.guesses, self.correct, self.delta)

    def found(self) -> dict[str, object]:
        """Return the counts and what follows from them, as plain data."""
        least, if_gaussian = self.bounds
        return {
            **asdict(self),
            "epsilon_at_least": least,
            "epsilon_at_least_if_gaussian": if_gaussian,
        }

    def in_words(self) -> str:
        """Say what was found, what this design could have found, and what it is worth."""
        least, if_gaussian = self.bounds
        most, most_if_gaussian = _bounds(self.canaries, self.guesses, self.guesses, self.delta)
        return (
            f"epsilon >= {_down(least)} at {CONFIDENCE:.0%} confidence (>= {_down(if_gaussian)} if "
            f"the run is Gaussian, mu-GDP): {self.correct} of {self.guesses} guesses about "
            f"{self.canaries} canaries were right, by {_SEEN[self.scores]}. All of them right "
            f"would have shown {_down(most)} (>= {_down(most_if_gaussian)} if Gaussian), the most "
            "that this audit can. Canaries are made up and count as rows. An audit can refute a "
            "claim; it never proves one"
        )

    def refutation(self, epsilon: float, events: Sequence[Event], accountant: str) -> str:
        """Say how the guesses refute a claim, with the confidence REFUTED; empty if they do not.
        Two tests share what they may err: of (epsilon, delta), and of all that the accountant
        proves of the events."""
        level = (1 - REFUTED) / 2
        counts = (self.canaries, self.guesses, self.correct)
        by_epsilon = p_value(*counts, epsilon, self.delta) <= level
        if not by_epsilon and not refutes_curve(*counts, _curve(tuple(events), accountant), level):
            return ""
        return self.told(
            f"epsilon {epsilon:.3f}" if by_epsilon else "the trade-off that the ledger gives"
        )

    def told(self, claim: str) -> str:
        """Say how the guesses refute a claim, which is given in words."""
        return (
            f"an audit told {self.correct} of {self.guesses} canaries right, which under {claim} "
            f"happens with a probability below {1 - REFUTED:.1g}"
        )


def _down(epsilon: float) -> str:
    return f"{math.floor(epsilon * 100) / 100:.2f}"


@lru_cache(maxsize=64)
def _bounds(canaries: int, guesses: int, correct: int, delta: float) -> tuple[float, float]:
    mu = mu_at_least(canaries, guesses, correct, CONFIDENCE)
    if_gaussian = gaussian_epsilon(mu, delta) if mu > 0 else 0.0
    return epsilon_at_least(canaries, guesses, correct, delta, CONFIDENCE), if_gaussian


@lru_cache(maxsize=4)
def _curve(events: tuple[Event, ...], accountant: str) -> Callable[[float], float]:
    return claimed_curve(events, accountant)
