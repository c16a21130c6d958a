"""What every mechanism's plan has: its numbers, its releases, its calibration and its words.

A mechanism is one plan (here and beside this file) and one step (:mod:`hf_dp.mechanisms`).
Arguments, ledger, statement, card and verification ask the plan; none of them knows a mechanism by
name. To add one, subclass :class:`MechanismPlan` and register it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

from hf_dp import _validate
from hf_dp._dataclasses import Named, register
from hf_dp.accounting import BOUNDS, RELEASE, SELECTION, TRAINING, Event, calibrate_noise_multiplier
from hf_dp.accounting.accountants import MakeEvent
from hf_dp.accounting.knows import NO_BOUND
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.draws import Draw, Poisson, Schedule
from hf_dp.plans.units import BY_ROW, BY_USER, EXAMPLE, ZERO_OUT, Users


@dataclass(frozen=True)
class Words:
    """How a statement speaks of a mechanism: sentences beside codes, which no program reads.

    Args:
        name: short, for example "DP-SGD".
        mechanism: what is clipped, noised and released, as a card describes it.
        sampling: who takes part in a step, as a card describes it.
        drawn: the sampling in two or three words, for "900 steps of DP-SGD with ...".
        proof: why the epsilon holds, as the reason of the status "proven".
        tag: on the Hub.
        sampling_code: the value of the argument ``sampling``, or "none" where all examples take
            part at once.
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
class PlannedRelease:
    """One event and the sensitivity of each part that it lets out.

    The noise is derived from the event itself, so what is drawn and what is accounted cannot
    differ.

    Args:
        event: what the ledger records.
        purpose: why, as the ledger names it: training, selection or release.
        sensitivities: by part of the event (:data:`hf_dp.accounting.SUM`,
            :data:`hf_dp.accounting.VECTORS`, :data:`hf_dp.accounting.LOSS`), the largest L2
            distance by which one example can move what is noised, above 0.

    Raises:
        ConfigError: the parts are not those of the event.
        InvalidArgumentError: the purpose or a sensitivity is invalid.
    """

    event: Event
    purpose: str
    sensitivities: Mapping[str, float]

    def __post_init__(self) -> None:
        _validate.one_of("purpose", self.purpose, (TRAINING, SELECTION, RELEASE))
        if set(self.sensitivities) != set(self.event.noise_multipliers):
            raise ConfigError(
                f"Expected the sensitivities of {sorted(self.event.noise_multipliers)}, which "
                f"{type(self.event).__name__} releases, got those of {sorted(self.sensitivities)}. "
                "Plan one release for each event."
            )
        checked = {
            part: _validate.positive(part, value) for part, value in self.sensitivities.items()
        }
        object.__setattr__(self, "sensitivities", MappingProxyType(checked))

    def noise_std(self, part: str) -> float:
        """Return the standard deviation of the noise on a part: noise multiplier x sensitivity.

        Raises: ConfigError for a part that the event does not release.
        """
        if part not in self.sensitivities:
            raise ConfigError(
                f"Expected a part that {type(self.event).__name__} releases "
                f"({sorted(self.sensitivities)}), got {part!r}."
            )
        return self.event.noise_multipliers[part] * self.sensitivities[part]


@dataclass(frozen=True)
class MechanismPlan(Named, ABC):
    """How privacy is obtained, as frozen data. Subclasses are frozen dataclasses.

    Args:
        clipping_norm: C, the largest L2 norm of one example's contribution.
        noise_multiplier: standard deviation of the noise / sensitivity; None until calibrated.

    Attributes (of the class):
        name: in ``privacy.json``; unique.
        privacy_mode: the ``privacy_mode`` argument that selects it.
        established: whether a bound on its epsilon is known.
        noises_gradients_alone: whether all its noise is on sums of gradients.

    Raises: InvalidArgumentError for a clipping norm or noise multiplier that is not positive.
    """

    clipping_norm: float
    noise_multiplier: float | None = None

    known: ClassVar[dict[str, type[Any]]] = {}
    privacy_mode: ClassVar[str]
    established: ClassVar[bool] = True
    noises_gradients_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        norm = _validate.positive("per_example_max_grad_norm", self.clipping_norm)
        object.__setattr__(self, "clipping_norm", norm)
        if self.noise_multiplier is not None:
            sigma = _validate.positive(
                "noise_multiplier", self.noise_multiplier, "Noise 0 gives no privacy."
            )
            object.__setattr__(self, "noise_multiplier", sigma)

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
    def draw(self) -> Draw:
        """Who takes part in a step."""
        return Poisson()

    @property
    def clipping(self) -> str:
        """How a norm becomes a weight."""
        return "flat"

    @property
    def views_per_example(self) -> int:
        """K, the random views as which a drawn row enters a step (:mod:`hf_dp.batches.views`)."""
        return 1

    @property
    def views_are_completions(self) -> bool:
        """Whether a row is a prompt, and its views are what the model writes to it."""
        return False

    @property
    def is_searched(self) -> bool:
        """Whether a run is one of several, of which the best by a score is released."""
        return False

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

    def forwarded(self, schedule: Schedule) -> float:
        """Return how many examples go through the model in all steps, on average."""
        return schedule.steps * schedule.expected_batch_size

    @abstractmethod
    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        """Return what ``steps`` optimizer steps with this noise release."""

    @abstractmethod
    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        """Return how far one example can move each part of a step's event."""

    def clips_to(self, schedule: Schedule) -> float:
        """Return the L2 norm that the engine clips to, at most ``clipping_norm``."""
        return self.clipping_norm

    def releases_before(self, schedule: Schedule) -> tuple[PlannedRelease, ...]:
        """Return what is released once, before the first step."""
        return ()

    # -- how the noise is decided --

    def check(self, schedule: Schedule, selects: bool) -> None:
        """Raise InvalidArgumentError for what does not go with this mechanism.

        Args: selects: whether a selection is released before the steps.
        """
        if schedule.accountant not in BOUNDS and schedule.target_epsilon is not None:
            raise _validate.invalid(
                "accountant", schedule.accountant, "to be a bound when `target_epsilon` is given"
            )

    def check_users(self, users: Users | None) -> None:
        """Raise an error where this mechanism cannot protect users in this way.

        By default it knows draws of users, not of their rows.

        Raises: UnsupportedArgumentError where no bound is known for several rows of a user.
        """
        if users is not None and users.by_row:
            expected, error = f"to be {BY_USER!r} with a {self.name}", UnsupportedArgumentError
            raise _validate.invalid("unit_sampling", BY_ROW, expected, NO_BOUND, error)

    def calibrated(
        self, schedule: Schedule, target_epsilon: float, prior_events: Sequence[Event]
    ) -> Self:
        """Return this plan with the noise with which its steps, and what ran before, just meet the
        target.

        Raises:
            InvalidArgumentError: noise is given beside a target.
            CalibrationError: no noise meets the target.
        """
        event = partial(self.step_event, schedule)
        sigma = self.smallest_noise(schedule, target_epsilon, prior_events, event)
        return replace(self, noise_multiplier=sigma)

    def smallest_noise(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        event: MakeEvent,
    ) -> float:
        """Return the smallest noise multiplier with which all steps stay inside the target.

        Args: event: ``(noise_multiplier, steps)`` -> what that many steps release.

        Raises: CalibrationError, AccountingRangeError.
        """
        return calibrate_noise_multiplier(
            target_epsilon,
            schedule.delta,
            self.draw.sample_rate(schedule),
            schedule.steps,
            schedule.accountant,
            prior_events,
            event,
        )

    def require_noise(self) -> None:
        """Raise InvalidArgumentError where noise is missing that only a target could decide."""

    # -- how it is spoken of --

    @abstractmethod
    def words(self, schedule: Schedule) -> Words:
        """Return how a statement speaks of it."""

    def outline(self, schedule: Schedule) -> tuple[str, ...]:
        """Return what to say of the plan beside its numbers, one line each."""
        return ()

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        """Return what ran, for the sentence of a statement.

        Args:
            steps: that ran, by the ledger.
            released: events that ran once, before them.
        """
        if steps == 0:
            return "no step on the training set has run"
        words = self.words(schedule)
        return self.draw.what_ran(schedule, steps, words.name, words.drawn)


register_plan = register  # a class decorator
