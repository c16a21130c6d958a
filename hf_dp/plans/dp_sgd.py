"""DP-SGD: per-example gradients, clipped, summed, noised (Li et al., algorithm 1).

Its plan is composed of a draw, of a noised loss and a noised count of norms beside the gradients,
and of a search of which the run is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from hf_dp import _validate
from hf_dp._dataclasses import unless_asked
from hf_dp.accounting import LOSS, SUM, BestOfRandomRuns, Event
from hf_dp.accounting.event import joint_noise_multiplier
from hf_dp.accounting.knows import LOSS as LOSS_KIND
from hf_dp.accounting.knows import SEARCH, SELECTION, USER_ROWS, Asked, refuse_together
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.balance import BUDGET_RATIO as BALANCE_RATIO
from hf_dp.plans.balance import COEFFICIENT, RouterBalance
from hf_dp.plans.bands import BANDS, Banded, banded
from hf_dp.plans.draws import POISSON, Draw, Poisson, Schedule, draw_of
from hf_dp.plans.mechanism import MechanismPlan, Words, register_plan
from hf_dp.plans.quantile import BUDGET_RATIO, LEARNING_RATE, NORM_QUANTILE, ClippingQuantile
from hf_dp.plans.rounding import clipping_share, rounding_margin
from hf_dp.plans.scaling import BETA, check_beta, scaled
from hf_dp.plans.units import BY_USER, Users

DP_SGD = "dp_sgd"
CLIPPINGS = ("flat", "automatic", "per_layer")

# How clipped sums may be computed, and in how much memory: never what they are. One backward pass
# with all records held, two passes over one graph, or explicit per-example gradients.
STRATEGIES = ("book_keeping", "two_pass", "per_example")
MEMORY_RATIO = 1.05

# The arguments of a noised loss, and of a search.
BOUND, RATIO = "noised_loss_bound", "noised_loss_budget_ratio"
MEAN_RUNS = "private_selection_mean_runs"

_LARGEST_BOUND = 1e30  # near the ends of float32 a loss is not computed any more
_VIEWS = "views of each drawn row"
_OF_COMPLETIONS = (
    "reward functions: what they keep outside of a call, and the data that a model in them was "
    "trained on",
    "completions that cannot be scored: their prompt adds exactly 0, and nothing says so",
)
_CLIPPED = {
    "flat": "clipped to an L2 norm of at most",
    "automatic": "rescaled (automatic clipping) to an L2 norm of at most",
    "per_layer": "clipped layer by layer to a total L2 norm of at most",
}


@dataclass(frozen=True)
class NoisedLoss:
    """Noise on the sum of clipped losses, over the draw whose gradients are summed.

    The two sums are one Gaussian mechanism. Its budget is divided in the terms in which it adds up,
    1 / noise_multiplier^2: the losses get ``budget_ratio`` of it, the gradients the rest. A noise
    multiplier that is given is that of the gradients; that of the losses follows, and costs extra.

    Args:
        bound: B > 0. Each loss is clipped to [0, B]; one that is not finite counts as 0.
        budget_ratio: in (0, 1).

    Raises: InvalidArgumentError.
    """

    bound: float
    budget_ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", loss_bound(BOUND, self.bound))
        object.__setattr__(self, "budget_ratio", budget_ratio(RATIO, self.budget_ratio))

    def part(self, noise_multiplier: float) -> Mapping[str, float]:
        """Return the noise multiplier of the losses beside this one of the gradients."""
        return {LOSS: noise_multiplier * math.sqrt((1 - self.budget_ratio) / self.budget_ratio)}

    def std(self, schedule: Schedule, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise in one step's noised mean loss."""
        return self.part(noise_multiplier)[LOSS] * self.bound / schedule.expected_batch_size

    def unit(self, schedule: Schedule) -> float:
        """Return the power of two of which each clipped loss is made a multiple before it is added.

        The losses of all N examples are together less than 2^53 such units, so their sum is exact
        in float64, in whatever order and in however many parts it is formed: one example moves it
        by at most B, and adding rounds nothing. What the forward rounds is not covered: the losses
        of examples that regroup may change by that (made-up logits of 1e7 moved the sum by 4 B).
        """
        above = math.frexp(self.bound)[1] + schedule.num_examples.bit_length()
        return math.ldexp(1.0, above - 53)  # N < 2^bits and B < 2^exponent: N B < 2^above

    def outline(self, schedule: Schedule, noise_multiplier: float) -> str:
        """Return its numbers, on one line."""
        losses = self.part(noise_multiplier)[LOSS]
        return (
            f"noised loss of each step: losses clipped to [0, {self.bound:g}], noise multiplier "
            f"{losses:.6g}, standard deviation of the mean "
            f"{self.std(schedule, noise_multiplier):.4g}; with the gradients, as one sum with "
            f"noise multiplier {joint_noise_multiplier(noise_multiplier, losses):.6g}"
        )

    def words(
        self, alone: Words, schedule: Schedule, noise_multiplier: float, joint: float, whose: str
    ) -> Words:
        """Return how a statement speaks of both sums. Args: alone: how it does of the gradients.
        joint: that of all of a step's sums, as of one. whose: the losses are, where not users'."""
        losses = self.part(noise_multiplier)[LOSS]
        of_same = f"The losses of the same {whose}"
        if schedule.users is not None:
            of_same = f"The losses of the same draw, the mean over the rows of each {schedule.one}"
        return replace(
            alone,
            name=f"{alone.name} and a noised loss",
            mechanism=(
                f"{alone.mechanism}. {of_same}, each clipped to [0, {self.bound!r}], are summed, "
                f"too; Gaussian noise with standard deviation {losses:.6g} x {self.bound!r} is "
                "added once to their sum, which is divided by the expected batch size and logged "
                "as noised_loss. All sums of a step are accounted together, as one with noise "
                f"multiplier {joint:.6g}"
            ),
            also_covered="the noised losses in its logs, and whatever is computed from them",
        )


def loss_bound(name: str, value: object) -> float:
    """Return the bound of one example's loss, a number above 0. Raises: InvalidArgumentError."""
    bound = _validate.positive(name, value, "It is public: choose it without looking at the rows.")
    if not 1 / _LARGEST_BOUND <= bound <= _LARGEST_BOUND:
        raise _validate.invalid(
            name, value, "to be from 1e-30 to 1e30", "Losses are computed in float32."
        )
    return bound


def budget_ratio(name: str, value: object) -> float:
    """Return the part of the budget that goes to the loss. Raises: InvalidArgumentError."""
    return _validate.in_unit_interval(name, value, "A hundredth is enough for a curve.")


@dataclass(frozen=True)
class Search:
    """K runs, K geometric with the mean ``mean_runs`` > 1, of which this is one, and only the best
    is released. The noise is calibrated so that the whole search meets the target, and each run
    states what the whole search costs (Papernot and Steinke 2021, arXiv 2110.03620).

    The conditions are those of :class:`hf_dp.accounting.BestOfRandomRuns`; ``hf-dp sweep
    --private-selection`` meets them. A run refuses evaluation sets with a training row, and those
    that cannot be compared, so that the score reads none.
    """

    mean_runs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean_runs", check_mean_runs(MEAN_RUNS, self.mean_runs))

    def words(self, of_one: Words) -> Words:
        """Return how a statement speaks of a run in it. Args: of_one: how it does outside of it."""
        return replace(
            of_one,
            name=f"{of_one.name} in a private selection",
            mechanism=(
                f"{of_one.mechanism}; this is the best of a secret number of independent runs, "
                f"which is random (geometric, mean {self.mean_runs:g}), and nothing of the others "
                "is released"
            ),
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
    """Return the expected number of runs of a search, above 1: a single run is no search."""
    mean = _validate.real(name, value)
    if not 1 + 1e-6 <= mean <= 1e9:
        raise _validate.invalid(
            name, value, "to be above 1, and at most 10^9", "A single run is no search."
        )
    return mean


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
        search: the search of which this is one run; None: there is none.
        clipping_quantile: how a step's clipping norm, the unit of its gradients and noise, follows
            from noised counts; C is then the first. None: it is C in all steps.
        gradient_scaling_beta: how slowly scales, by which gradients are multiplied before they are
            clipped, follow noised gradients. None: they are 1.
        router_balance: the loads of experts that a step releases with noise of their own, and the
            loss that they make; None: none.
        views_per_example: K; a drawn row enters a step as K random views, of which neither draw nor
            event know (:mod:`hf_dp.batches.views`).
        views_are_completions: whether a row is a prompt, and its views are K completions that the
            model writes to it (:mod:`hf_dp.trainer.grpo`).

    Raises: InvalidArgumentError.
    """

    clipping: str = "flat"
    draw: Draw = Poisson()
    loss: NoisedLoss | None = None
    search: Search | None = None
    clipping_quantile: ClippingQuantile | None = unless_asked(None)
    gradient_scaling_beta: float | None = unless_asked(None)
    views_per_example: int = unless_asked(1)
    router_balance: RouterBalance | None = unless_asked(None)
    views_are_completions: bool = unless_asked(False)

    name: ClassVar[str] = "dp_sgd"
    privacy_mode: ClassVar[str] = DP_SGD
    noises_gradients_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("clipping", self.clipping, CLIPPINGS)
        if self.clipping_quantile is not None:
            self.clipping_quantile.check(self.clipping, self.clipping_norm)
        if self.gradient_scaling_beta is not None:
            check_beta(BETA, self.gradient_scaling_beta)
        adapts = {
            NORM_QUANTILE: self.clipping_quantile,
            BETA: self.gradient_scaling_beta,
            COEFFICIENT: self.router_balance,
        }
        found = next((name for name, value in adapts.items() if value is not None), None)
        if found is not None and isinstance(self.draw, Banded):
            expected, error = f"to be unset with `{found}`", UnsupportedArgumentError
            why = "The two are not implemented together. Remove one."
            raise _validate.invalid(BANDS, self.draw.bands, expected, why, error)
        _validate.integer("views_per_example", self.views_per_example, 1)

    @classmethod
    def of(
        cls,
        clipping_norm: float,
        noise_multiplier: float | None = None,
        clipping: str = "flat",
        *,
        sampling: str = POISSON,
        max_batch_size: int | None = None,
        bands: int | None = None,
        by_row: bool = False,
        noised_loss_bound: float | None = None,
        noised_loss_budget_ratio: float | None = None,
        mean_runs: float | None = None,
        clipping_quantile: float | None = None,
        clipping_quantile_learning_rate: float = LEARNING_RATE,
        clipping_quantile_budget_ratio: float = BUDGET_RATIO,
        gradient_scaling_beta: float | None = None,
        views_per_example: int = 1,
        router_balance: float | None = None,
        router_balance_budget_ratio: float = BALANCE_RATIO,
        views_are_completions: bool = False,
    ) -> Self:
        """Return the plan that these arguments ask for; the draw's as :func:`draw_of`, and then
        :func:`banded`.

        Raises: InvalidArgumentError.
        """
        loss = None
        if (noised_loss_bound is None) != (noised_loss_budget_ratio is None):
            missing, given = (BOUND, RATIO) if noised_loss_bound is None else (RATIO, BOUND)
            both = "A noised loss needs both; for none, remove both."
            raise _validate.invalid(missing, None, f"to be given with `{given}`", both)
        if noised_loss_bound is not None and noised_loss_budget_ratio is not None:
            loss = NoisedLoss(noised_loss_bound, noised_loss_budget_ratio)
        search = None if mean_runs is None else Search(mean_runs)
        draw = draw_of(sampling, max_batch_size, by_row)
        if bands is not None:
            draw = banded(draw, bands)
        own = (clipping_norm, noise_multiplier, clipping, draw, loss, search)
        plan = cls(
            *own, views_per_example=views_per_example, views_are_completions=views_are_completions
        )
        if clipping_quantile is not None:
            counts = (clipping_quantile_learning_rate, clipping_quantile_budget_ratio)
            plan = replace(plan, clipping_quantile=ClippingQuantile(clipping_quantile, *counts))
        if router_balance is not None:
            balance = RouterBalance(router_balance, router_balance_budget_ratio)
            plan = replace(plan, router_balance=balance)
        return replace(plan, gradient_scaling_beta=gradient_scaling_beta)

    @property
    def is_searched(self) -> bool:
        return self.search is not None

    def margin(self, schedule: Schedule) -> float:
        """Return what the rounding of float32 sums can add to C, in units of it."""
        return rounding_margin(schedule.expected_batch_size, self.draw.most(schedule))

    def clips_to(self, schedule: Schedule) -> float:
        share = clipping_share(schedule.expected_batch_size, self.draw.most(schedule))
        return self.clipping_norm * share

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        event: Any = self.draw.event(schedule, noise_multiplier, steps)
        if beside := self._beside(noise_multiplier):
            event = replace(event, beside=beside)
        return event if self.search is None else BestOfRandomRuns((event,), self.search.mean_runs)

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        own = {SUM: self.clipping_norm * (1 + self.margin(schedule))}
        own |= {} if self.loss is None else {LOSS: self.loss.bound}
        for part in (self.clipping_quantile, self.router_balance):
            own |= {} if part is None else part.sensitivities
        return own

    @property
    def gradients(self) -> Self:
        """The plan of the gradients: here all of it."""
        return self

    def _beside(self, noise_multiplier: float) -> dict[str, float]:
        """Return the noise multipliers beside this one of the gradients, by part."""
        found: dict[str, float] = {}
        for each in (self.loss, self.clipping_quantile, self.router_balance):
            found |= {} if each is None else each.part(noise_multiplier)
        return found

    def check_users(self, users: Users | None) -> None:
        by_row = users is not None and users.by_row
        if by_row != (self.draw.kind == USER_ROWS):
            sampling = BY_USER if users is None else users.sampling
            expected = f"to be that of the draw, {self.draw.asked}"
            raise _validate.invalid("unit_sampling", sampling, expected)

    def check(self, schedule: Schedule, selects: bool) -> None:
        super().check(schedule, selects)
        asked = [] if self.search is None else [Asked(SEARCH, MEAN_RUNS, self.search.mean_runs)]
        asked.append(self.draw.asked)
        if self.loss is not None:
            asked.append(Asked(LOSS_KIND, BOUND, self.loss.bound))
        if self.clipping_quantile is not None:  # another sum over the draw, as losses are
            asked.append(Asked(LOSS_KIND, NORM_QUANTILE, self.clipping_quantile.quantile))
        if self.router_balance is not None:
            asked.append(Asked(LOSS_KIND, COEFFICIENT, self.router_balance.coefficient))
        if selects:
            asked.append(Asked(SELECTION, "peft_config", "one that selects what trains"))
        refuse_together(asked, schedule.accountant)
        self.draw.check(schedule)

    def outline(self, schedule: Schedule) -> tuple[str, ...]:
        views = self.views_per_example
        what = "completions of each drawn prompt" if self.views_are_completions else _VIEWS
        lines = [f"{views} {what}: {views} x as many go through the model"]
        loss = [] if self.loss is None else [self.loss.outline(schedule, self.sigma)]
        counts = self.clipping_quantile
        norm = [] if counts is None else [counts.outline(schedule, self.sigma, self._joint())]
        balance = self.router_balance
        loads = [] if balance is None else [balance.outline(self.sigma, self._joint())]
        return (*lines[views == 1 :], *loss, *norm, *loads)

    def _joint(self) -> float:
        """Return the noise multiplier of all sums of a step, as of one."""
        return joint_noise_multiplier(self.sigma, *self._beside(self.sigma).values())

    def words(self, schedule: Schedule) -> Words:
        users, one, conditions = schedule.users, schedule.one, self.draw.conditions
        sampling, gradients = self.draw.words(schedule), "per-example gradients"
        clipping, views, name = "per-example clipping", "", "DP-SGD"
        if (k := self.views_per_example) > 1:
            name = f"DP-SGD on {k} views of each row"
            views = f"mean of {k} random views, made anew in each step"
            gradients = f"the gradient of each drawn row, the {views},"
            clipping = "one clipping for all views of a row"
        if self.views_are_completions:
            name = f"DP-SGD on {k} completions of each prompt"
            views = f"mean over {k} completions, written anew in each step"
            conditions += _OF_COMPLETIONS
        if users is not None and not users.by_row:
            gradients = f"the gradient of each drawn {one}, the {users.reduction} over its rows,"
            gradients += f" of which each is the {views}," * bool(views)
            clipping = f"one clipping for all rows of a {one}"
            if self.views_are_completions:
                gradients = f"the gradient of each drawn {one}, the {views},"
                clipping = "one clipping for all completions of a prompt"
            sampling += (
                f"; of a drawn {one} with more than {users.max_rows} rows, that many of them are "
                "used, chosen uniformly at random in each draw"
            )
        if (k := self.draw.group_size) > 1:
            gradients = f"the gradient of each drawn group of {k} rows,"
            clipping = "one clipping for all rows of a group"
        noise = "and Gaussian noise"
        if self.loss is not None:
            noise = "of gradients and losses, and Gaussian noise on both sums"
        words = Words(
            name=name,
            mechanism=(
                f"DP-SGD: {gradients} {_CLIPPED[self.clipping]} "
                f"{self.clipping_norm!r}; Gaussian noise with standard deviation noise_multiplier "
                f"x clipping_norm (and {self.margin(schedule):.1e} of it more, for the rounding of "
                "sums) is added once to their sum, which is divided by the expected batch size and "
                "handed to the optimizer"
            ),
            sampling=sampling,
            drawn=self.draw.drawn,
            proof=f"{self.draw.drawn}, {clipping} {noise}, composed over the steps in the ledger",
            tag="dp-sgd",
            sampling_code=self.draw.sampling,
            conditions=conditions,
        )
        if isinstance(self.draw, Banded):
            words = self.draw.of_noise(words)
        if self.gradient_scaling_beta is not None:
            words = scaled(words, self.gradient_scaling_beta)
        if self.loss is not None:
            whose = "rows, each the mean over its views" if self.views_per_example > 1 else "rows"
            whose = "groups" if self.draw.group_size > 1 else whose
            words = self.loss.words(words, schedule, self.sigma, self._joint(), whose)
        if self.clipping_quantile is not None:
            words = self.clipping_quantile.words(words, schedule, self.sigma, self._joint())
        if self.router_balance is not None:
            words = self.router_balance.words(words, self.sigma, self._joint())
        return words if self.search is None else self.search.words(words)


def check_memory_ratio(name: str, value: object) -> float:
    """Return the memory that clipping may take relative to training without, at least 1."""
    ratio = _validate.positive(name, value)
    if ratio < 1:
        expected = "to be at least 1, the memory of training without privacy"
        raise _validate.invalid(name, value, expected, "1.05 allows 5 % more, for speed.")
    return ratio
