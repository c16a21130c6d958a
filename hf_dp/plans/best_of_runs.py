"""DP-SGD in a search: one of a secret, random number of runs, of which only the best is released.

The noise is calibrated so that the whole search meets the target, and each run states what the
whole search costs (Papernot and Steinke 2021, arXiv 2110.03620).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hf_dp import _validate
from hf_dp.accounting import BestOfRandomRuns, Event
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.mechanism import Schedule, Words, register_plan, rows_not_known
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import Users

ARGUMENT = "private_selection_mean_runs"


@register_plan
@dataclass(frozen=True)
class BestOfRunsPlan(DpSgdPlan):
    """DP-SGD in each of K runs, K geometric with the mean ``mean_runs``.

    The conditions are those of :class:`hf_dp.accounting.BestOfRandomRuns`; ``hf-dp sweep
    --private-selection`` meets them. A run refuses evaluation sets with a training row, and those
    that cannot be compared, so that the score reads none.

    Args: as in :class:`DpSgdPlan`, whose ``max_batch_size`` must be None; and mean_runs: the
        expectation of K, above 1.

    Raises: InvalidArgumentError.
    """

    mean_runs: float = field(kw_only=True)

    name: ClassVar[str] = "dp_sgd_best_of_runs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size is not None:
            raise not_in_a_search("max_logical_batch_size", self.max_batch_size)
        object.__setattr__(self, "mean_runs", check_mean_runs(ARGUMENT, self.mean_runs))

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        of_one: Any = super().step_event(schedule, noise_multiplier, steps)
        return BestOfRandomRuns((of_one,), self.mean_runs)

    def check_users(self, users: Users) -> None:
        if users.by_row:
            raise rows_not_known(ARGUMENT)

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        super().check(schedule, selection)
        if selection is not None:
            raise not_in_a_search("peft_config", "one that selects what trains")
        if schedule.accountant != "rdp":
            raise _validate.invalid(
                "accountant",
                schedule.accountant,
                f"to be 'rdp' with {ARGUMENT}",
                "No other accountant describes a search.",
                UnsupportedArgumentError,
            )

    def words(self, schedule: Schedule) -> Words:
        words = super().words(schedule)
        search = (
            "this is the best of a secret number of independent runs, which is random (geometric, "
            f"mean {self.mean_runs:g})"
        )
        return replace(
            words,
            name="DP-SGD in a private selection",
            mechanism=f"{words.mechanism}; {search}, and nothing of the others is released",
            proof=(
                f"{words.proof}, in each of a secret, random number of runs, the best of which by "
                "a score on data that epsilon does not cover was released (Papernot and Steinke "
                "2021)"
            ),
            tuning=(
                "hyperparameter tuning outside of this search, and other runs on the same data: "
                "each run adds its own epsilon"
            ),
            conditions=(
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


def not_in_a_search(name: str, value: object) -> Exception:
    """Return the error for what has no bound in a search; the caller raises it."""
    return _validate.invalid(
        name,
        value,
        f"to be left out with {ARGUMENT}",
        f"No bound is implemented for both. Remove it, or leave {ARGUMENT} out and count each run.",
        UnsupportedArgumentError,
    )
