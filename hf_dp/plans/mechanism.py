"""What every mechanism's plan has: its numbers, its releases, its calibration and its words.

A mechanism is one plan (here and beside this file), one step (:mod:`hf_dp.mechanisms`) and one set
of words (:class:`Words`). Arguments, ledger, statement, card and verification ask the plan; none of
them knows a mechanism by name. To add one, subclass :class:`MechanismPlan` and register it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting import TRAINING, Event
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.draws.base import Sampler
from hf_dp.plans.noised_loss import NoisedLoss
from hf_dp.plans.release import PlannedRelease
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.search import Search
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import BY_ROW, BY_USER, EXAMPLE, ZERO_OUT, Users
from hf_dp.plans.words import Words


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
        noises_gradients_alone: whether all its noise is on sums of gradients.
    """

    clipping_norm: float
    noise_multiplier: float | None = None

    name: ClassVar[str]
    privacy_mode: ClassVar[str]
    established: ClassVar[bool] = True
    noises_gradients_alone: ClassVar[bool] = False

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
    def loss(self) -> NoisedLoss | None:
        """The noised loss that a step releases beside its gradients, if it does."""
        return None

    @property
    def search(self) -> Search | None:
        """The search of which a run is one, if it is."""
        return None

    @property
    def moved(self) -> int:
        """How many examples join or leave a step with one example more, at the most."""
        return 1

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
                "PrivacyPlan.solve(..., target_epsilon=...) calibrate it."
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

    def most(self, schedule: Schedule) -> int:
        """Return how many examples a step uses at the most."""
        return schedule.drawn_from

    def used(self, schedule: Schedule) -> float:
        """Return how many examples a step uses on average."""
        return schedule.expected_batch_size

    def forwarded(self, schedule: Schedule) -> float:
        """Return how many examples go through the model in all steps, on average."""
        return schedule.steps * self.used(schedule)

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

    def check_users(self, users: Users | None) -> None:
        """Raise InvalidArgumentError where this mechanism cannot protect users in this way.

        By default it knows draws of users, not of their rows.
        """
        if users is not None and users.by_row:
            self.by_row()

    def by_row(self) -> Self:
        """Return this plan for draws of the rows of users.

        Raises: UnsupportedArgumentError where no bound is known for several rows of a user.
        """
        raise _validate.invalid(
            "unit_sampling",
            BY_ROW,
            f"to be {BY_USER!r} with a {type(self).__name__}",
            "No bound is known for several rows of a user there.",
            UnsupportedArgumentError,
        )

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote, without the name; errors as there."""
        return cls(**checked_fields(cls, values, ConfigError))


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
    return MECHANISM_PLANS[name].from_dict(given)
