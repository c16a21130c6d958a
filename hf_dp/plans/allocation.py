"""DP-SGD whose logical batches are random allocations: each example once an epoch, in a uniformly
random step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hf_dp import _validate
from hf_dp.accounting import Event
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.mechanism import Schedule, Words, register_plan, rows_not_known
from hf_dp.plans.sampling import POISSON, RANDOM_ALLOCATION, AllocationSampler
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import Users


@register_plan
@dataclass(frozen=True)
class AllocatedPlan(DpSgdPlan):
    """Noise on the sum of clipped gradients over a random allocation's logical batches.

    An epoch has t = N / B steps, rounded, and each example takes part in one of them. The expected
    logical batch is then N / t. (Chua et al. 2025, arXiv 2412.16802; Feldman and Shenfeld 2025,
    arXiv 2502.08202.)

    Args: as in :class:`DpSgdPlan`; ``max_batch_size`` must be None.

    Raises: InvalidArgumentError.
    """

    name: ClassVar[str] = "dp_sgd_random_allocation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size is not None:
            raise _not_poisson("max_logical_batch_size", self.max_batch_size)

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int:
        steps = round(drawn_from / expected_batch_size)
        if steps < 2:
            raise _validate.invalid(
                "expected_batch_size",
                expected_batch_size,
                f"to be at most {drawn_from / 2:g}, half of the {drawn_from} examples, with "
                f"sampling={RANDOM_ALLOCATION!r}",
                "Each example takes part in one of two or more steps of an epoch. Lower it.",
            )
        return steps

    def sampler(self, schedule: Schedule, steps: int) -> AllocationSampler:
        """Return the sampler of one allocation, however many steps are asked for: each iteration
        of it is one that the ledger holds."""
        n, batch = schedule.drawn_from, schedule.expected_batch_size
        return AllocationSampler(n, self.steps_per_epoch(n, batch))

    def steps_released_together(self, schedule: Schedule) -> int:
        return self.sampler(schedule, 1).steps

    def check_users(self, users: Users) -> None:
        if users.by_row:
            raise rows_not_known(f"sampling={RANDOM_ALLOCATION!r}")

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        super().check(schedule, selection)
        if selection is not None:
            raise _not_poisson("peft_config", "one that selects what trains")
        if schedule.accountant != "pld":
            raise _validate.invalid(
                "accountant",
                schedule.accountant,
                f"to be 'pld' with sampling={RANDOM_ALLOCATION!r}",
                "No other accountant describes it.",
                UnsupportedArgumentError,
            )

    def words(self, schedule: Schedule) -> Words:
        words, one = super().words(schedule), schedule.one
        steps = self.steps_released_together(schedule)
        sampling = (
            f"random allocation: each {one} joins one of the {steps} steps of an allocation, "
            "uniformly and independently of all others; the next allocation is made anew; one that "
            "was begun is accounted in full"
        )
        if schedule.users is not None:
            sampling += words.sampling[words.sampling.index("; of a drawn") :]
        return replace(
            words,
            sampling=sampling,
            drawn="random allocation",
            proof=words.proof.replace("Poisson sampling", "random allocation"),
            sampling_code=RANDOM_ALLOCATION,
        )

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        of_one = self.steps_released_together(schedule)
        if steps == 0:
            return super().what_ran(schedule, steps, released)
        count = steps // of_one
        return (
            f"{count:,} random allocation{'s' * (count > 1)}, each of up to {of_one} steps, of "
            f"{self.words(schedule).name}"
        )


def _not_poisson(name: str, value: object) -> Exception:
    """Return the error for what has no bound with random allocation; the caller raises it."""
    return _validate.invalid(
        name,
        value,
        f"to be left out with sampling={RANDOM_ALLOCATION!r}",
        f"No bound is known for both. Remove it, or use sampling={POISSON!r}.",
        UnsupportedArgumentError,
    )
