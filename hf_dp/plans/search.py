"""A search: one of a secret, random number of runs, of which only the best is released.

The noise is calibrated so that the whole search meets the target, and each run states what the
whole search costs (Papernot and Steinke 2021, arXiv 2110.03620).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_dp import _validate
from hf_dp.accounting.knows import SEARCH, Asked
from hf_dp.plans.words import Words

ARGUMENT = "private_selection_mean_runs"


@dataclass(frozen=True)
class Search:
    """K runs, K geometric with the mean ``mean_runs``, of which this is one.

    The conditions are those of :class:`hf_dp.accounting.BestOfRandomRuns`; ``hf-dp sweep
    --private-selection`` meets them. A run refuses evaluation sets with a training row, and those
    that cannot be compared, so that the score reads none.

    Args: mean_runs: the expectation of K, above 1.

    Raises: InvalidArgumentError.
    """

    mean_runs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean_runs", check_mean_runs(ARGUMENT, self.mean_runs))

    @property
    def asked(self) -> Asked:
        """What a user set to get it, for a refusal."""
        return Asked(SEARCH, ARGUMENT, self.mean_runs)

    def words(self, of_one: Words) -> Words:
        """Return how a statement speaks of a run in it. Args: of_one: how it does outside of it."""
        search = (
            "this is the best of a secret number of independent runs, which is random (geometric, "
            f"mean {self.mean_runs:g})"
        )
        return replace(
            of_one,
            name=f"{of_one.name} in a private selection",
            mechanism=f"{of_one.mechanism}; {search}, and nothing of the others is released",
            proof=(
                f"{of_one.proof}, in each of a secret, random number of runs, the best of which by "
                "a score on data that epsilon does not cover was released (Papernot and Steinke "
                "2021)"
            ),
            tuning=(
                "hyperparameter tuning outside of this search, and other runs on the same data: "
                "each run adds its own epsilon"
            ),
            conditions=(
                *of_one.conditions,
                "whether the search kept its conditions: the number of runs was drawn in secret "
                "before the first of them, the settings of each run were drawn independently of "
                "all others, the score reads no training row, and nothing of the other runs was "
                "released (`hf-dp sweep --private-selection` does so; this record cannot show it)",
            ),
        )


def check_mean_runs(name: str, value: object) -> float:
    """Return the expected number of runs of a search.

    Raises: InvalidArgumentError for what is no number above 1: a single run is no search.
    """
    mean = _validate.real(name, value)
    if not 1 + 1e-6 <= mean <= 1e9:
        raise _validate.invalid(
            name, value, "to be above 1, and at most 10^9", "A single run is no search."
        )
    return mean
