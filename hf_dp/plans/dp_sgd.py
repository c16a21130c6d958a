"""DP-SGD: per-example gradients, clipped, summed, noised (Li et al., algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting import BOUNDS, SUM, BestOfRandomRuns, Event
from hf_dp.accounting.knows import SELECTION, USER_ROWS, Asked, refuse_together
from hf_dp.errors import ConfigError
from hf_dp.plans.draws import Draw, Poisson, Sampler, UserRows, draw_from_dict
from hf_dp.plans.mechanism import MechanismPlan, register_plan
from hf_dp.plans.noised_loss import NoisedLoss
from hf_dp.plans.rounding import clipping_share, rounding_margin
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.search import Search
from hf_dp.plans.selection import SelectionPlan, calibrated_together
from hf_dp.plans.units import BY_USER, Users
from hf_dp.plans.words import Words

DP_SGD = "dp_sgd"
CLIPPINGS = ("flat", "automatic", "per_layer")

_CLIPPED = {
    "flat": "clipped to an L2 norm of at most",
    "automatic": "rescaled (automatic clipping) to an L2 norm of at most",
    "per_layer": "clipped layer by layer to a total L2 norm of at most",
}


@register_plan
@dataclass(frozen=True)
class DpSgdPlan(MechanismPlan):
    """Noise on the sum of clipped gradients over a draw.

    Args:
        clipping_norm: C, the largest L2 norm with which one example's gradient enters the sum.
        noise_multiplier: standard deviation of the noise on the sum / its sensitivity.
        clipping: one of :data:`CLIPPINGS`.
        draw: who takes part in a step.
        loss: the sum of losses that a step releases with noise of its own; None: none.
        search: the search of which this is one run; None: it is none.

    Raises: InvalidArgumentError.
    """

    clipping: str = "flat"
    draw: Draw = Poisson()
    loss: NoisedLoss | None = None
    search: Search | None = None

    name: ClassVar[str] = "dp_sgd"
    privacy_mode: ClassVar[str] = DP_SGD
    noises_gradients_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_noise(self)
        _validate.one_of("clipping", self.clipping, CLIPPINGS)

    def margin(self, schedule: Schedule) -> float:
        """Return what the rounding of float32 sums can add to C, in units of it."""
        return rounding_margin(schedule.expected_batch_size, self.most(schedule))

    def clips_to(self, schedule: Schedule) -> float:
        share = clipping_share(schedule.expected_batch_size, self.most(schedule))
        return self.clipping_norm * share

    def sample_rate(self, schedule: Schedule) -> float:
        return self.draw.sample_rate(schedule)

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int | None:
        return self.draw.steps_per_epoch(drawn_from, expected_batch_size)

    def steps_released_together(self, schedule: Schedule) -> int:
        return self.draw.steps_released_together(schedule)

    def most(self, schedule: Schedule) -> int:
        return self.draw.most(schedule)

    def used(self, schedule: Schedule) -> float:
        return self.draw.used(schedule)

    @property
    def moved(self) -> int:
        return self.draw.moved

    def sampler(self, schedule: Schedule, steps: int) -> Sampler:
        return self.draw.sampler(schedule, steps)

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        event: Any = self.draw.event(schedule, noise_multiplier, steps)
        if self.loss is not None:
            event = replace(event, beside=self.loss.part(noise_multiplier))
        return event if self.search is None else BestOfRandomRuns((event,), self.search.mean_runs)

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        own = {SUM: self.clipping_norm * (1 + self.margin(schedule))}
        return own if self.loss is None else {**own, **self.loss.sensitivities}

    def check_users(self, users: Users | None) -> None:
        by_row = users is not None and users.by_row
        if by_row != (self.draw.kind == USER_ROWS):
            raise _validate.invalid(
                "unit_sampling",
                BY_USER if users is None else users.sampling,
                f"to be that of the draw, {self.draw.asked}",
                f"With unit_sampling='examples' the draw is {UserRows()!r}.",
            )

    def by_row(self) -> Self:
        if self != replace(self, draw=Poisson(), loss=None, search=None):
            return super().by_row()
        return replace(self, draw=UserRows())

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        refuse_estimates(schedule)
        asked = [part.asked for part in (self.search, self.draw, self.loss) if part is not None]
        if selection is not None:
            asked.append(Asked(SELECTION, "peft_config", "one that selects what trains"))
        refuse_together(asked, schedule.accountant)
        self.draw.check(schedule)

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
        draw, users, one = self.draw.words(schedule), schedule.users, schedule.one
        sampling, gradients, clipping = (
            draw.sampling,
            "per-example gradients",
            "per-example clipping",
        )
        if users is not None and not users.by_row:
            gradients = f"the gradient of each drawn {one}, the {users.reduction} over its rows,"
            clipping = f"one clipping for all rows of a {one}"
            sampling += (
                f"; of a drawn {one} with more than {users.max_rows} rows, that many of them are "
                "used, chosen uniformly at random in each draw"
            )
        noise = "and Gaussian noise"
        if self.loss is not None:
            noise = "of gradients and losses, and Gaussian noise on both sums"
        words = Words(
            name="DP-SGD",
            mechanism=(
                f"DP-SGD: {gradients} {_CLIPPED[self.clipping]} "
                f"{self.clipping_norm!r}; Gaussian noise with standard deviation noise_multiplier "
                f"x clipping_norm (and {self.margin(schedule):.1e} of it more, for the rounding of "
                "sums) is added once to their sum, which is divided by the expected batch size and "
                "handed to the optimizer"
            ),
            sampling=sampling,
            drawn=draw.name,
            proof=f"{draw.name}, {clipping} {noise}, composed over the steps in the ledger",
            tag="dp-sgd",
            sampling_code=self.draw.sampling,
            conditions=self.draw.conditions,
        )
        if self.loss is not None:
            words = self.loss.words(words, schedule, self.sigma)
        return words if self.search is None else self.search.words(words)

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        if steps == 0:
            return super().what_ran(schedule, steps, released)
        return self.draw.what_ran(schedule, steps, self.words(schedule).name)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "draw": self.draw.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        given = checked_fields(cls, values, ConfigError)
        given["draw"] = draw_from_dict(given["draw"])
        for name, part in (("loss", NoisedLoss), ("search", Search)):
            if given[name] is not None:
                given[name] = part(**checked_fields(part, given[name], ConfigError))
        return cls(**given)


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
    if schedule.accountant not in BOUNDS and schedule.target_epsilon is not None:
        raise _validate.invalid(
            "accountant", schedule.accountant, "to be a bound when `target_epsilon` is given"
        )
