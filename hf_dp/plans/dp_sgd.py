"""DP-SGD: per-example gradients, clipped, summed, noised (Li et al., algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from hf_dp import _validate
from hf_dp.accounting import SUM, Event
from hf_dp.plans.mechanism import (
    MechanismPlan,
    Schedule,
    Words,
    register_plan,
    rows_not_known,
)
from hf_dp.plans.rounding import clipping_share, rounding_margin
from hf_dp.plans.sampling import AllocationSampler, PoissonSampler
from hf_dp.plans.selection import SelectionPlan, calibrated_together
from hf_dp.plans.units import Users

CLIPPINGS = ("flat", "automatic", "per_layer")

_CLIPPED = {
    "flat": "clipped to an L2 norm of at most",
    "automatic": "rescaled (automatic clipping) to an L2 norm of at most",
    "per_layer": "clipped layer by layer to a total L2 norm of at most",
}


@register_plan
@dataclass(frozen=True)
class DpSgdPlan(MechanismPlan):
    """Noise on the sum of clipped gradients over a Poisson draw.

    Args:
        clipping_norm: C, the largest L2 norm with which one example's gradient enters the sum.
        noise_multiplier: standard deviation of the noise on the sum / its sensitivity.
        clipping: one of :data:`CLIPPINGS`.
        max_batch_size: the most examples of a draw that a step uses, a uniformly random part of a
            larger one; None: all of them.

    Raises: InvalidArgumentError.
    """

    clipping: str = "flat"
    max_batch_size: int | None = None

    name: ClassVar[str] = "dp_sgd"
    privacy_mode: ClassVar[str] = "dp_sgd"

    def __post_init__(self) -> None:
        check_noise(self)
        _validate.one_of("clipping", self.clipping, CLIPPINGS)
        if self.max_batch_size is not None:
            size = _validate.integer("max_logical_batch_size", self.max_batch_size, 1)
            object.__setattr__(self, "max_batch_size", size)

    def margin(self, schedule: Schedule) -> float:
        """Return what the rounding of float32 sums can add to C, in units of it."""
        return rounding_margin(schedule.expected_batch_size, self._most(schedule))

    def clips_to(self, schedule: Schedule) -> float:
        share = clipping_share(schedule.expected_batch_size, self._most(schedule))
        return self.clipping_norm * share

    def _most(self, schedule: Schedule) -> int:
        """Return how many examples a step uses at the most."""
        most = schedule.drawn_from
        return most if self.max_batch_size is None else min(self.max_batch_size, most)

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler | AllocationSampler:
        users = schedule.users
        return PoissonSampler(
            schedule.drawn_from,
            self.sample_rate(schedule),
            steps,
            max_batch_size=self.max_batch_size,
            rows_of_a_user=1 if users is None or not users.by_row else users.max_rows,
        )

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        return self.sampler(schedule, 1).event(noise_multiplier, steps)

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {SUM: self.clipping_norm * (1 + self.margin(schedule))}

    def check_users(self, users: Users) -> None:
        if users.by_row and self.max_batch_size is not None:
            raise rows_not_known("max_logical_batch_size")

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        refuse_estimates(schedule)
        batch = schedule.expected_batch_size
        if self.max_batch_size is not None and self.max_batch_size < batch:
            raise _validate.invalid(
                "max_logical_batch_size",
                self.max_batch_size,
                f"to be at least expected_batch_size ({batch:g})",
                "Most draws would be cut, which costs privacy; 1.2 times expected_batch_size costs "
                "little at 1024.",
            )

    def calibrated(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        selection: SelectionPlan | None,
    ) -> tuple[Self, SelectionPlan | None]:
        def event(noise_multiplier: float, steps: int) -> Event:
            return self.step_event(schedule, noise_multiplier, steps)

        rate = self.sample_rate(schedule)
        if selection is None:
            sigma = schedule.calibrated(target_epsilon, prior_events, rate, event)
            return replace(self, noise_multiplier=sigma), None
        sigma, noised = calibrated_together(
            selection,
            target_epsilon,
            schedule.delta,
            sample_rate=rate,
            steps=schedule.steps,
            accountant=schedule.accountant,
            prior_events=prior_events,
            event=event,
        )
        return replace(self, noise_multiplier=sigma), noised

    def words(self, schedule: Schedule) -> Words:
        cut, users, one = self.max_batch_size, schedule.users, schedule.one
        sampling = (
            f"Poisson: each {one} joins each step independently with the probability sample_rate; "
            "an empty draw is a step"
        )
        if cut is not None:
            of_them = f"{cut} rows" if users is None else f"{cut} (each a {one})"
            sampling += (
                f"; of a draw of more than {of_them} a uniformly random part of that size is used"
            )
        if users is not None and users.by_row:
            sampling += (
                f"; at most {users.max_rows} rows of each {users.name} are drawn from, "
                f"{users.num_rows} rows in all, and the accountant counts how many of these a step "
                "can have"
            )
        elif users is not None:
            sampling += (
                f"; of a drawn {one} with more than {users.max_rows} rows, that many of them are "
                "used, chosen uniformly at random in each draw"
            )
        return Words(
            name="DP-SGD",
            mechanism=(
                f"DP-SGD: {schedule.gradients_in_words} {_CLIPPED[self.clipping]} "
                f"{self.clipping_norm!r}; Gaussian noise with standard deviation noise_multiplier "
                f"x clipping_norm (and {self.margin(schedule):.1e} of it more, for the rounding of "
                "sums) is added once to their sum, which is divided by the expected batch size and "
                "handed to the optimizer"
            ),
            sampling=sampling,
            drawn="Poisson sampling" if cut is None else "truncated Poisson sampling",
            proof=(
                f"Poisson sampling, {schedule.clipping_in_words} and Gaussian noise, composed over "
                "the steps in the ledger"
            ),
            tag="dp-sgd",
        )


def check_noise(plan: Any) -> None:
    """Raise InvalidArgumentError for a clipping norm or noise multiplier that is not positive."""
    norm = _validate.positive("per_example_max_grad_norm", plan.clipping_norm)
    object.__setattr__(plan, "clipping_norm", norm)
    if plan.noise_multiplier is not None:
        sigma = _validate.positive(
            "noise_multiplier", plan.noise_multiplier, "Noise 0 gives no privacy."
        )
        object.__setattr__(plan, "noise_multiplier", sigma)


def refuse_estimates(schedule: Schedule) -> None:
    """Raise InvalidArgumentError for an accountant that cannot calibrate."""
    if schedule.accountant == "gdp_clt" and schedule.target_epsilon is not None:
        raise _validate.invalid(
            "accountant", "gdp_clt", "to be a bound when `target_epsilon` is given"
        )
