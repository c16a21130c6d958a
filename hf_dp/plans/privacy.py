"""The privacy plan: the one place where sample rate, steps, noise and delta are decided and
coupled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import Any, Self

from hf_dp import _validate
from hf_dp._dataclasses import plain, read
from hf_dp.accounting import ACCOUNTANTS, RELEASE, SELECTION, SUM, TRAINING, Event, LedgerEntry
from hf_dp.accounting.composition import LARGE_DELTA
from hf_dp.plans import units
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.draws import Schedule
from hf_dp.plans.mechanism import MechanismPlan, PlannedRelease, Words
from hf_dp.plans.samplers import Sampler
from hf_dp.plans.selection import SelectionPlan

MAX_STEPS = 10**9


@dataclass(frozen=True)
class PrivacyPlan(Schedule):
    """What a private run will do. Sampler, noise and accountant all read it; nothing else computes
    these numbers.

    Made by :meth:`solve`.

    Args:
        mechanism: how privacy is obtained, with its clipping norm and noise.
        selection: what is released before training to choose what trains; None: nothing.
        privacy_unit, neighboring_relation: what the user asked to be protected, and against what.
        others: as in :class:`hf_dp.plans.draws.Schedule`.
    """

    mechanism: MechanismPlan
    selection: SelectionPlan | None = field(default=None, kw_only=True)
    privacy_unit: str = field(default=units.PRIVACY_UNITS[0], kw_only=True)
    neighboring_relation: str = field(default=units.NEIGHBORING_RELATIONS[0], kw_only=True)

    def __post_init__(self) -> None:
        _validate.integer("num_examples", self.num_examples, 2)
        _validate.positive("expected_batch_size", self.expected_batch_size)
        _validate.integer("steps", self.steps, 1)
        if _validate.in_unit_interval("target_delta", self.delta) >= 1 / self.num_examples:
            expected = f"to be < 1/num_examples ({1 / self.num_examples:.3g})"
            why = "At 1/N publishing one random row would count as private."
            large = 1 / (2 * self.num_examples) >= LARGE_DELTA
            why += " Set target_delta=1e-5." if large else " Leave it unset for 1/(2N)."
            raise _validate.invalid("target_delta", self.delta, expected, why)
        _validate.one_of("accountant", self.accountant, ACCOUNTANTS)
        _validate.one_of("privacy_unit", self.privacy_unit, units.PRIVACY_UNITS)
        _validate.one_of(
            "neighboring_relation", self.neighboring_relation, units.NEIGHBORING_RELATIONS
        )
        _validate.one_of("unit", self.mechanism.unit, units.UNITS)
        _validate.one_of("relation", self.mechanism.relation, units.RELATIONS)
        if self.target_epsilon is not None:
            _validate.positive("target_epsilon", self.target_epsilon)
        self._check_users()
        self._check_batch()

    def _check_users(self) -> None:
        users = self.users
        if (users is not None) != (self.privacy_unit == units.USER):
            expected = f"to be {units.USER!r} exactly where `users` is given, which is {users!r}"
            raise _validate.invalid("privacy_unit", self.privacy_unit, expected)
        if users is not None:
            n, most = self.num_examples, self.num_examples * users.max_rows
            rows, expected = users.num_rows, "to be None with unit_sampling='users'"
            fits = rows is None
            if users.by_row:
                fits = rows is not None and n <= rows <= most
                expected = (
                    f"to be from {n} (one of each user) to {most} (max_rows_per_unit of each)"
                )
            if not fits:
                raise _validate.invalid("num_rows", rows, expected)
        self.mechanism.check_users(users)

    def _check_batch(self) -> None:
        n, b = self.drawn_from, self.expected_batch_size
        if b > n:
            name = "num_examples" if n == self.num_examples else "num_rows"
            name = "the number of groups" if n < self.num_examples else name
            expected = f"to be at most {name} ({n})"
            raise _validate.invalid("expected_batch_size", b, expected, "Lower it.")
        of_epoch = self.mechanism.draw.steps_per_epoch(n, b)
        if of_epoch is not None and b != n / of_epoch:
            expected = f"to be {n} / {of_epoch}, as PrivacyPlan.solve makes it"
            raise _validate.invalid("expected_batch_size", b, expected)

    # -- numbers --

    @property
    def drawn_from(self) -> int:
        return self.mechanism.draw.drawn_from(super().drawn_from)

    @property
    def unit(self) -> str:
        """The code of what is protected; one of :data:`hf_dp.plans.units.UNITS`."""
        protects_users = self.users is not None and self.mechanism.unit == units.EXAMPLE
        return units.USER if protects_users else self.mechanism.unit

    @property
    def of_delta(self) -> str:
        """Where delta comes from, as said behind it."""
        if self.delta != 1 / (2 * self.num_examples):
            return ", as chosen"
        what = "rows" if self.users is None else "users"
        return f", by default 1/(2 x {self.num_examples:,} {what})"

    @property
    def sample_rate(self) -> float:
        """q: the probability with which each example (or user) joins each draw."""
        return self.mechanism.draw.sample_rate(self)

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the mechanism's noise / its sensitivity."""
        return self.mechanism.sigma

    @property
    def clipping_norm(self) -> float:
        """C, the largest L2 norm of one example's contribution."""
        return self.mechanism.clipping_norm

    @property
    def clipping(self) -> str:
        """How a norm becomes a weight."""
        return self.mechanism.clipping

    @property
    def clips_to(self) -> float:
        """The L2 norm that the engine clips to: ``clipping_norm``, less the room that rounding of
        sums over large draws needs (:func:`hf_dp.plans.rounding.clipping_share`)."""
        return self.mechanism.clips_to(self)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum, in units of its step's gauge, or on a vector
        where there is no sum."""
        sensitivities = self.mechanism.sensitivities(self)
        part = SUM if SUM in sensitivities else next(iter(sensitivities))
        return self.noise_multiplier * sensitivities[part]

    @property
    def releases_each_step(self) -> bool:
        """Whether steps release something of the private rows; else the ledger counts none."""
        return self.mechanism.releases_each_step

    @property
    def correlated_steps(self) -> int:
        """In how many consecutive steps the noise may be correlated; 1: it is independent."""
        return self.event().correlated_steps if self.releases_each_step else 1

    @property
    def words(self) -> Words:
        """How a statement speaks of the mechanism."""
        return self.mechanism.words(self)

    @property
    def steps_recorded(self) -> int:
        """The steps that the ledger will hold: all, and what was released together with the last
        of them."""
        together = self.mechanism.draw.steps_released_together(self)
        return -(-self.steps // together) * together

    # -- what is drawn and released --

    def sampler(self, steps: int | None = None) -> Sampler:
        """Return a sampler of ``steps`` (default: all) logical batches of this plan.

        It draws from the operating system's cryptographic source.
        """
        return self.mechanism.draw.sampler(self, self.steps if steps is None else steps)

    @property
    def epoch(self) -> int:
        """Steps after which every example was drawn once on average."""
        return max(1, round(self.drawn_from / self.expected_batch_size))

    def event(self, steps: int | None = None) -> Event:
        """Return what the accountant is told about ``steps`` (default: all) training steps."""
        count = self.steps if steps is None else steps
        return self.mechanism.step_event(self, self.noise_multiplier, count)

    def step_release(self) -> PlannedRelease:
        """Return what one training step releases."""
        return PlannedRelease(self.event(1), TRAINING, self.mechanism.sensitivities(self))

    def releases_before(self) -> tuple[PlannedRelease, ...]:
        """Return what is released once, before the first step, other than by a selection."""
        return self.mechanism.releases_before(self)

    def events(self, steps: int | None = None) -> tuple[Event, ...]:
        """Return all that the plan will release with ``steps`` (default: all) training steps."""
        selected = () if self.selection is None else (self.selection.event(),)
        before = (release.event for release in self.releases_before())
        trained = (self.event(steps),) if self.releases_each_step else ()
        return (*selected, *before, *trained)

    def makes(self, entry: LedgerEntry) -> bool:
        """Return whether an entry of a ledger is a release that this plan makes."""
        steps = entry.event.steps
        if entry.purpose == SELECTION:
            return self.selection is not None and entry.event == self.selection.event(steps)
        if entry.purpose == RELEASE:
            return any(entry.event == release.event for release in self.releases_before())
        if entry.purpose != TRAINING or not self.releases_each_step:
            return False
        return entry.event == self.event(steps)

    # -- made and read --

    @classmethod
    def create(cls, *, users: units.Users | None = None, **given: Any) -> Self:
        """Plan DP-SGD by the arguments of :meth:`DpSgdPlan.of`, and :meth:`solve` with the others.

        Raises: InvalidArgumentError, CalibrationError, as there.
        """
        own = {name: given.pop(name) for name in signature(DpSgdPlan.of).parameters.keys() & given}
        by_row = users is not None and users.by_row
        return cls.solve(mechanism=DpSgdPlan.of(**own, by_row=by_row), users=users, **given)

    @classmethod
    def solve(
        cls,
        *,
        num_examples: int,
        expected_batch_size: float | None,
        mechanism: MechanismPlan,
        num_train_epochs: float = 3.0,
        max_steps: int = -1,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        prior_events: Sequence[Event] = (),
        users: units.Users | None = None,
        **others: Any,
    ) -> Self:
        """Return the plan that a user asks for, its noise calibrated where a target is given.

        Args:
            num_examples: N >= 2, rows, or users where they are protected.
            expected_batch_size: B in (0, N].
            mechanism: how privacy is obtained. It has its noise, or ``target_epsilon`` decides it.
            num_train_epochs: expected passes over the rows; the steps are ``ceil(epochs * N / B)``.
                Where the mechanism has whole epochs, B is made N / their steps.
            max_steps: the steps, where positive.
            target_epsilon: what everything together may cost; None with given noise.
            target_delta: delta; None for 1/(2N), as in Li et al.
            prior_events: what already ran on the same rows, paid from the same target.
            others: further fields of the plan.

        Raises:
            InvalidArgumentError: names the argument.
            CalibrationError: no noise meets the target.
        """
        least = "A private training set has at least two rows, or users."
        n = _validate.integer("num_examples", num_examples, 2, least)
        hint = "It is the logical batch size; 1024 suits many tasks."
        b = _validate.positive("expected_batch_size", expected_batch_size, hint)
        drawn_from = n if users is None or users.num_rows is None else users.num_rows
        drawn_from = mechanism.draw.drawn_from(drawn_from)
        of_epoch = mechanism.draw.steps_per_epoch(drawn_from, b)
        if of_epoch is None:
            steps = steps_of(max_steps, num_train_epochs, drawn_from, b)
        else:
            b, steps = drawn_from / of_epoch, steps_of(max_steps, num_train_epochs, of_epoch, 1)
        sigma = mechanism.noise_multiplier
        if (target_epsilon is None) == (sigma is None):
            expected = f"or `noise_multiplier` ({sigma!r}) to be given, exactly one of them"
            raise _validate.invalid("target_epsilon", target_epsilon, expected)
        delta = 1 / (2 * n) if target_delta is None else target_delta
        own = {"target_epsilon": target_epsilon, "users": users, **others}
        asked = cls(n, b, steps, delta, mechanism, **own)
        mechanism.check(asked, asked.selection is not None)
        if target_epsilon is not None:
            return asked._calibrated(target_epsilon, prior_events)
        asked._require_noise()
        return asked

    def _calibrated(self, target_epsilon: float, prior_events: Sequence[Event]) -> Self:
        """Return this plan with the noise of training, and then that of the selection, with which
        everything together just meets the target."""
        selection = self.selection
        share = 1.0 if selection is None else selection.training_share()
        mechanism = self.mechanism.calibrated(self, share * target_epsilon, prior_events)
        trained = replace(self, mechanism=mechanism, selection=None)
        if selection is None:
            return trained
        others = (*prior_events, *trained.events())
        solved = selection.calibrated(target_epsilon, self.delta, self.accountant, others)
        return replace(trained, selection=solved)

    def _require_noise(self) -> None:
        if self.selection is not None and self.selection.noise_multiplier is None:
            expected, why = "to be given beside `noise_multiplier`", "Only a target can decide it."
            raise _validate.invalid("selection_noise_multiplier", None, expected, why)
        self.mechanism.require_noise()
        _validate.positive("noise_multiplier", self.noise_multiplier)

    def to_dict(self) -> dict[str, object]:
        """Return all fields and what is derived from them, for ``privacy.json``."""
        own: dict[str, object] = plain(self)
        if self.users is None:
            del own["users"]
        derived = ("noise_multiplier", "clipping_norm", "sample_rate", "noise_std")
        return {**own, **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Read back what :meth:`to_dict` wrote.

        Raises:
            ConfigError: a field is missing.
            InvalidArgumentError: a field could not have been written.
        """
        names = {item.name for item in fields(cls)}  # the others are derived
        own = {name: value for name, value in values.items() if name in names}
        if own.get("privacy_unit") != units.USER:
            own["users"] = None
        plan = read(cls, own)
        plan._require_noise()
        return plan


def steps_of(max_steps: int, num_train_epochs: float, drawn_from: int, batch_size: float) -> int:
    """Return how many steps a run has: ``max_steps`` where above 0, else those of its epochs."""
    if max_steps > 0:
        return _validate.integer("max_steps", max_steps, 1)
    steps = _validate.positive("num_train_epochs", num_train_epochs) * drawn_from / batch_size
    if steps > MAX_STEPS:
        expected = f"to give at most {MAX_STEPS:,} steps"
        raise _validate.invalid("num_train_epochs", num_train_epochs, expected, "Lower it.")
    return math.ceil(steps)
