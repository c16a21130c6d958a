"""What is known: which accountant bounds which draw, which search, and what together.

Every refusal of a combination comes from here. A composition has *kinds* (of sampling, of releases
of single examples, of searches); an accountant bounds it if its row has all of them. Plans ask the
same table before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError, UnsupportedEventError

# Kinds, by the class of their canonical event. First, who takes part in a noised sum. A Gaussian on
# all examples is a Poisson sample at rate 1.
POISSON = "PoissonSampledGaussian"
TRUNCATED = "TruncatedPoissonSampledGaussian"
USER_ROWS = "UserRowsGaussian"
GROUPED = "GroupedGaussian"
ALLOCATION = "RandomAllocationGaussian"
BANDED, TRUNCATED_BANDED = "BandedGaussian", "TruncatedBandedGaussian"  # canonically those above
OUTSIDE = "events from outside hf_dp"  # which dp-accounting knows
# What is released of each example by itself.
VISIBLE = "SampledRecordRelease"
PUBLISHED = "PublishedForwardNoise"
SEARCH = "BestOfRandomRuns"
REPLACE_ONE = "relation 'replace_one'"  # the other relations are known wherever a kind is
KINDS = (
    POISSON, TRUNCATED, USER_ROWS, GROUPED, ALLOCATION, OUTSIDE, VISIBLE, PUBLISHED, SEARCH,
    REPLACE_ONE,
)  # fmt: skip
# What a plan may add to a draw: a noised loss, which is one Gaussian with the sum's; and a private
# selection of what trains, which is Poisson-sampled.
LOSS, SELECTION = "noised loss", "selection"

KNOWS: dict[str, frozenset[str]] = {
    "pld": frozenset(
        {POISSON, TRUNCATED, USER_ROWS, GROUPED, ALLOCATION, OUTSIDE, VISIBLE, REPLACE_ONE}
    ),
    "rdp": frozenset({POISSON, VISIBLE, SEARCH}),
    "prv": frozenset({POISSON}),
    "gdp_clt": frozenset({POISSON, PUBLISHED}),
}
ACCOUNTANTS: list[str] = list(KNOWS)
"""Known accountants; those of hf_dp are modules of this package, imported on first use (scipy takes
a second)."""

BOUNDS: list[str] = ["pld", "rdp", "prv"]
"""The accountants whose result is an upper bound, so that noise may be calibrated to it."""

# Each alone is bounded, but nobody has implemented and tested the two in one run.
NOT_TOGETHER = {
    BANDED: frozenset({SELECTION, SEARCH}),
    TRUNCATED_BANDED: frozenset({SELECTION, SEARCH}),
    SELECTION: frozenset({ALLOCATION, USER_ROWS, GROUPED, SEARCH}),
    LOSS: frozenset({ALLOCATION, USER_ROWS, SEARCH, OUTSIDE}),
}
NO_BOUND = "A bound for both together is not implemented."
_ACCOUNTED_AS = {LOSS: POISSON, SELECTION: POISSON, BANDED: POISSON, TRUNCATED_BANDED: TRUNCATED}

UNESTABLISHED = (
    "No bound on the epsilon of DP-FP as published is known: the encoder's gradient is computed "
    'from activations without noise. Use accountant="gdp_clt" for the figure that the paper gives, '
    'or the variant "frozen" for a guarantee.'
)


@dataclass(frozen=True)
class Asked:
    """A kind that a user asked for, by which argument and with which value."""

    kind: str
    argument: str
    value: object

    def __str__(self) -> str:
        return f"{self.argument}={self.value!r}"


def accountants_of(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the accountants that know all of these kinds together."""
    kinds = set(kinds)
    if any(part in kinds and kinds & others for part, others in NOT_TOGETHER.items()):
        return ()
    accounted = {_ACCOUNTED_AS.get(kind, kind) for kind in kinds}
    return tuple(name for name, known in KNOWS.items() if accounted <= known)


def refuse_together(asked: Sequence[Asked], accountant: str) -> None:
    """Raise UnsupportedArgumentError for what no accountant, or not this one, bounds together; of
    two that exclude each other, it names the later one."""
    for one, other in combinations(asked, 2):
        if not accountants_of((one.kind, other.kind)):
            why = f"{NO_BOUND} Remove it, or leave out `{one.argument}`."
            expected, error = f"to be left out with {one}", UnsupportedArgumentError
            raise invalid(other.argument, other.value, expected, why, error)
    for each in asked:
        known = accountants_of({each.kind})
        if accountant not in known:
            why, error = "No other accountant describes it.", UnsupportedArgumentError
            expected = f"to be {' or '.join(map(repr, known))} with {each}"
            raise invalid("accountant", accountant, expected, why, error)


def refuse_unknown(accountant: str, kinds: Iterable[str]) -> None:
    """Raise UnsupportedEventError for kinds that this accountant does not know, with one that knows
    them all as the next move."""
    kinds = set(kinds)
    unknown = [kind for kind in KINDS if kind in kinds - KNOWS[accountant]]
    if not unknown:
        return
    others = accountants_of(kinds)
    next_move = f'Use accountant="{others[0]}".' if others else "No accountant of hf_dp knows all."
    if PUBLISHED in unknown:
        next_move = UNESTABLISHED
    verb = "does not know" if unknown[0] == REPLACE_ONE else "cannot describe"
    kind = "events that show who took part" if unknown[0] == VISIBLE else unknown[0]
    raise UnsupportedEventError(f"Accountant {accountant!r} {verb} {kind}. {next_move}")
