"""What every mechanism's plan has: its numbers, its releases, its calibration and its words.

A mechanism is one plan (here and beside this file), one step (:mod:`hf_dp.mechanisms`) and one set
of words (:class:`Words`). Arguments, ledger, statement, card and verification ask the plan; none of
them knows a mechanism by name. To add one, subclass :class:`MechanismPlan` and register it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting import TRAINING, Event, calibrate_noise_multiplier
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.release import PlannedRelease
from hf_dp.plans.sampling import LogicalSampler as Sampler
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import BY_ROW, BY_USER, EXAMPLE, ZERO_OUT, Users


@dataclass(frozen=True)
class Schedule:
    """The numbers that every mechanism reads: how much data, how often, and how it is accounted.

    Args:
        num_examples: N, stated as public.
        expected_batch_size: B, the expected logical batch.
        steps: optimizer steps.
        delta: of the (epsilon, delta) guarantee.
        accountant: the one whose epsilon is the headline.
        target_epsilon: what the noise is calibrated to; None when the noise is given.
        users: where users are protected and not rows. ``num_examples`` then counts users, and
            ``expected_batch_size`` what is drawn, users or rows.
    """

    num_examples: int
    expected_batch_size: float
    steps: int
    delta: float
    accountant: str
    target_epsilon: float | None = None
    users: Users | None = None

    @property
    def drawn_from(self) -> int:
        """How many users, or rows, a step draws from: N, or the rows of users that are drawn."""
        if self.users is None or self.users.num_rows is None:
            return self.num_examples
        return self.users.num_rows

    @property
    def one(self) -> str:
        """What one thing that is drawn is called: "row", or the name of a user."""
        return "row" if self.users is None or self.users.by_row else self.users.name

    @property
    def gradients_in_words(self) -> str:
        """What is clipped, as a card calls it."""
        if self.users is None or self.users.by_row:
            return "per-example gradients"
        return f"the gradient of each drawn {self.one}, the {self.users.reduction} over its rows,"

    @property
    def clipping_in_words(self) -> str:
        """How often something is clipped, in a proof."""
        if self.users is None or self.users.by_row:
            return "per-example clipping"
        return f"one clipping for all rows of a {self.one}"

    def calibrated(
        self,
        target_epsilon: float,
        prior_events: Sequence[Event],
        sample_rate: float,
        event: Callable[[float, int], Event],
    ) -> float:
        """Return the smallest noise multiplier with which all steps stay inside the target.

        Args: event: ``(noise_multiplier, steps)`` -> what that many steps release.

        Raises: CalibrationError, AccountingRangeError.
        """
        return calibrate_noise_multiplier(
            target_epsilon,
            self.delta,
            sample_rate,
            self.steps,
            accountant=self.accountant,
            prior_events=prior_events,
            event=event,
        )


@dataclass(frozen=True)
class Words:
    """How a statement speaks of a mechanism.

    Args:
        name: short, for example "DP-SGD".
        mechanism: what is clipped, noised and released, as a card describes it.
        sampling: who takes part in a step, as a card describes it.
        drawn: the sampling in two or three words, for "900 steps of DP-SGD with ...".
        proof: why the epsilon holds, as the reason of the status "proven".
        tag: on the Hub.
        sampling_code: "poisson", "random_allocation", or "none" where all examples take part at
            once.
        also_covered: what epsilon covers beside the weights; empty if nothing is released beside
            them.
        tuning: what epsilon does not cover of other runs.
        conditions: what else epsilon rests on that a record holds no evidence of.
    """

    name: str
    mechanism: str
    sampling: str
    drawn: str
    proof: str
    tag: str
    sampling_code: str = "poisson"
    also_covered: str = ""
    tuning: str = (
        "hyperparameter tuning and other runs on the same data: each run adds its own epsilon"
    )
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class MechanismPlan(ABC):
    """How privacy is obtained, as frozen data. Subclasses are frozen dataclasses.

    Args:
        clipping_norm: C, the largest L2 norm of one example's contribution.
        noise_multiplier: standard deviation of the noise / sensitivity; None until calibrated.

    Attributes (of the class):
        name: in ``privacy.json``; unique.
        privacy_mode: the ``privacy_mode`` argument that selects it.
        established: whether a bound on its epsilon is known.
    """

    clipping_norm: float
    noise_multiplier: float | None = None

    name: ClassVar[str]
    privacy_mode: ClassVar[str]
    established: ClassVar[bool] = True

    # -- what is protected --

    @property
    def unit(self) -> str:
        """The code of what is protected; one of :data:`hf_dp.plans.units.UNITS`."""
        return EXAMPLE

    @property
    def relation(self) -> str:
        """The code of the change against which it is protected."""
        return ZERO_OUT

    # -- what is drawn and released --

    @property
    def clipping(self) -> str:
        """How a norm becomes a weight."""
        return "flat"

    @property
    def max_batch_size(self) -> int | None:
        """The most examples of a draw that a step uses; None: all."""
        return None

    @property
    def releases_each_step(self) -> bool:
        """Whether steps release something; else all is released before the first one."""
        return True

    @property
    def sigma(self) -> float:
        """The noise multiplier. Raises: ConfigError before it is calibrated."""
        if self.noise_multiplier is None:
            raise ConfigError(
                f"This {type(self).__name__} has no noise multiplier yet. Give one, or let "
                "PrivacyRequest(..., target_epsilon=...).plan() calibrate it."
            )
        return self.noise_multiplier

    def sample_rate(self, schedule: Schedule) -> float:
        """Return q, the probability with which each example joins each draw: B / N."""
        return schedule.expected_batch_size / schedule.drawn_from

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int | None:
        """Return the whole number of steps in which each example takes part once, where there is
        one; None where it takes part once on average."""
        return None

    def steps_released_together(self, schedule: Schedule) -> int:
        """Return how many steps one entry of the ledger pays for, from the first of them on."""
        return 1

    @abstractmethod
    def sampler(self, schedule: Schedule, steps: int) -> Sampler:
        """Return a sampler of ``steps`` logical batches."""

    @abstractmethod
    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        """Return what ``steps`` optimizer steps with this noise release."""

    @abstractmethod
    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        """Return how far one example can move each part of a step's event."""

    def clips_to(self, schedule: Schedule) -> float:
        """Return the L2 norm that the engine clips to, at most ``clipping_norm``."""
        return self.clipping_norm

    def step_release(self, schedule: Schedule) -> PlannedRelease:
        """Return what one step releases."""
        event = self.step_event(schedule, self.sigma, 1)
        return PlannedRelease(event, TRAINING, self.sensitivities(schedule))

    def releases_before(self, schedule: Schedule) -> tuple[PlannedRelease, ...]:
        """Return what is released once, before the first step."""
        return ()

    # -- how the noise is decided --

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        """Raise InvalidArgumentError for what does not go with this mechanism."""

    def check_users(self, users: Users) -> None:
        """Raise InvalidArgumentError where this mechanism cannot protect users in this way.

        By default it knows draws of users, not of their rows.
        """
        if users.by_row:
            raise rows_not_known(f"a {type(self).__name__}")

    @abstractmethod
    def calibrated(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        selection: SelectionPlan | None,
    ) -> tuple[Self, SelectionPlan | None]:
        """Return this plan, and the selection's, with the noise that meets the target together.

        Raises: InvalidArgumentError for noise that is given beside a target; CalibrationError.
        """

    def require_noise(self) -> None:
        """Raise InvalidArgumentError where noise is missing that only a target could decide."""

    # -- how it is spoken of --

    @abstractmethod
    def words(self, schedule: Schedule) -> Words:
        """Return how a statement speaks of it."""

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        """Return what ran, for the sentence of a statement.

        Args: steps: that ran, by the ledger. released: events that ran once, before them.
        """
        if steps == 0:
            return "no step on the training set has run"
        words = self.words(schedule)
        counted = f"{steps:,} steps" if steps != 1 else "1 step"
        return f"{counted} of {words.name} with {words.drawn}"

    # -- as JSON --

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :func:`mechanism_from_dict` reads it back."""
        return {"name": self.name, **asdict(self)}


def rows_not_known(what: str) -> InvalidArgumentError:
    """Return the error for something that cannot draw rows of users; the caller raises it."""
    return _validate.invalid(
        "unit_sampling",
        BY_ROW,
        f"to be {BY_USER!r} with {what}",
        "No bound is known for several rows of a user there.",
        UnsupportedArgumentError,
    )


MECHANISM_PLANS: dict[str, type[MechanismPlan]] = {}

Plan = TypeVar("Plan", bound=MechanismPlan)


def register_plan(cls: type[Plan]) -> type[Plan]:
    """Make a mechanism's plan known by its ``name``: a class decorator.

    Raises: ConfigError when another plan has that name.
    """
    if MECHANISM_PLANS.get(cls.name, cls) is not cls:
        raise ConfigError(
            f"Expected a mechanism name of its own, got {cls.name!r}, which is taken."
        )
    MECHANISM_PLANS[cls.name] = cls
    return cls


def mechanism_from_dict(values: Any) -> MechanismPlan:
    """Read back what :meth:`MechanismPlan.to_dict` wrote.

    Raises: ConfigError for an unknown mechanism, or fields that it does not have;
        InvalidArgumentError for a value that could not have been written.
    """
    given = dict(values) if isinstance(values, Mapping) else {}
    name = given.pop("name", None)
    if name not in MECHANISM_PLANS:
        raise ConfigError(
            f"Expected the mechanism of a plan to be one of {sorted(MECHANISM_PLANS)}, got "
            f"{name!r}. Read it with the version or extension of hf_dp that wrote it."
        )
    cls = MECHANISM_PLANS[name]
    return cls(**checked_fields(cls, given, ConfigError))
