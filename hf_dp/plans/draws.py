"""Who takes part in a step: each draw with its sampler, its event and its words.

To add one, here or from outside: a frozen dataclass that subclasses :class:`Draw`, decorated by
:func:`register_draw`. ``DPTrainingArguments(sampling=...)`` then selects it, and ledger, statement
and card know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hf_dp import _validate
from hf_dp._dataclasses import Named, register
from hf_dp.accounting import Event
from hf_dp.accounting.events import GroupedGaussian
from hf_dp.accounting.knows import ALLOCATION, GROUPED, TRUNCATED, USER_ROWS, Asked
from hf_dp.accounting.knows import POISSON as POISSON_SAMPLED
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.samplers import AllocationSampler, PoissonSampler, Sampler
from hf_dp.plans.units import BY_ROW, Users


@dataclass(frozen=True)
class Schedule:
    """The numbers of a plan that draws and mechanisms read.

    Args:
        num_examples: N, the rows of the training set (the users, where they are protected), stated
            as public.
        expected_batch_size: B, the expected logical batch; also the divisor of the noisy sum. Where
            users' rows are drawn one by one, it counts rows; of groups, groups.
        accountant: the one that calibrates, and whose epsilon is the headline.
        target_epsilon: what the noise is calibrated to; None when the noise is given.
        users: whose rows are one unit, where users are protected.
    """

    num_examples: int
    expected_batch_size: float
    steps: int
    delta: float
    accountant: str = field(default="pld", kw_only=True)
    target_epsilon: float | None = field(default=None, kw_only=True)
    users: Users | None = field(default=None, kw_only=True)

    @property
    def drawn_from(self) -> int:
        """How many users, or rows, a step draws from: N, or the rows of users that are drawn."""
        rows = None if self.users is None else self.users.num_rows
        return self.num_examples if rows is None else rows

    @property
    def one(self) -> str:
        """What one thing that is drawn is called: "row", or the name of a user."""
        return "row" if self.users is None or self.users.by_row else self.users.name


class Draw(Named, ABC):
    """Who takes part in a step. Subclasses are frozen dataclasses.

    Attributes (of the class):
        name: in ``privacy.json``; unique.
        sampling: the value of the argument ``sampling`` that asks for it.
        kind: in the table of what accountants bound (:mod:`hf_dp.accounting.knows`).
        drawn: what it is in two or three words, for "900 steps of DP-SGD with ...".
        moved: how many examples join or leave a step with one example more, at the most.
    """

    known: ClassVar[dict[str, type[Any]]] = {}
    sampling: ClassVar[str]
    kind: ClassVar[str]
    drawn: ClassVar[str]
    moved: ClassVar[int] = 1

    @abstractmethod
    def sampler(self, schedule: Schedule, steps: int) -> Sampler:
        """Return a sampler of ``steps`` logical batches."""

    @abstractmethod
    def words(self, schedule: Schedule) -> str:
        """Return who takes part in a step, as a card describes it."""

    @property
    def asked(self) -> Asked:
        """What a user set to get it, for a refusal."""
        return Asked(self.kind, "sampling", self.sampling)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What epsilon rests on besides the record: for a draw from outside hf_dp, whose it is."""
        module = type(self).__module__
        if module.startswith("hf_dp."):
            return ()
        return (
            f"whether the draw {self.name!r}, which is not hf_dp's but of the module {module!r}, "
            "draws what its event tells the accountant",
        )

    def event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        """Return what ``steps`` steps with this noise release."""
        return self.sampler(schedule, 1).event(noise_multiplier, steps)

    def drawn_from(self, rows: int) -> int:
        """Return how many things a step draws from, of so many rows or users."""
        return rows

    @property
    def group_size(self) -> int:
        """How many rows are drawn, and clipped, as one."""
        return 1

    def sample_rate(self, schedule: Schedule) -> float:
        """Return q, the probability with which each example takes part in a step."""
        return schedule.expected_batch_size / schedule.drawn_from

    def most(self, schedule: Schedule) -> int:
        """Return how many examples a step uses at the most."""
        return schedule.drawn_from

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int | None:
        """Return the whole number of steps in which each example takes part once, where there is
        one; None where it takes part once on average."""
        return None

    def steps_released_together(self, schedule: Schedule) -> int:
        """Return how many steps one entry of the ledger pays for, from the first of them on."""
        return 1

    def check(self, schedule: Schedule) -> None:
        """Raise InvalidArgumentError for numbers that do not go with it."""

    def what_ran(self, schedule: Schedule, steps: int, mechanism: str, drawn: str) -> str:
        """Say what ran, for a statement's sentence. Args: mechanism, drawn: the plan's words."""
        counted = f"{steps:,} steps" if steps != 1 else "1 step"
        return f"{counted} of {mechanism} with {drawn}"


register_draw = register  # a class decorator


@register_draw
@dataclass(frozen=True)
class Poisson(Draw):
    """Each example, or user, joins each step independently with the probability B / N."""

    name: ClassVar[str] = "poisson"
    sampling: ClassVar[str] = "poisson"
    kind: ClassVar[str] = POISSON_SAMPLED
    drawn: ClassVar[str] = "Poisson sampling"

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        return PoissonSampler(schedule.drawn_from, self.sample_rate(schedule), steps)

    def words(self, schedule: Schedule) -> str:
        return (
            f"Poisson: each {schedule.one} joins each step independently with the probability "
            "sample_rate; an empty draw is a step"
        )


@register_draw
@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """A Poisson draw of which a step uses a uniformly random part where it is too large.

    Args: max_batch_size: the most examples that a step uses, >= 1.
    """

    max_batch_size: int

    name: ClassVar[str] = "truncated_poisson"
    kind: ClassVar[str] = TRUNCATED
    drawn: ClassVar[str] = "truncated Poisson sampling"
    moved: ClassVar[int] = 2  # another example joins or leaves with the first

    def __post_init__(self) -> None:
        _validate.integer("max_logical_batch_size", self.max_batch_size, 1)

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, "max_logical_batch_size", self.max_batch_size)

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        return replace(super().sampler(schedule, steps), max_batch_size=self.max_batch_size)

    def most(self, schedule: Schedule) -> int:
        return min(self.max_batch_size, schedule.drawn_from)

    def check(self, schedule: Schedule) -> None:
        if self.max_batch_size < schedule.expected_batch_size:
            expected = f"to be at least expected_batch_size ({schedule.expected_batch_size:g})"
            why = "Cutting most draws costs privacy; 1.2 times that costs little at 1024."
            raise _validate.invalid("max_logical_batch_size", self.max_batch_size, expected, why)

    def words(self, schedule: Schedule) -> str:
        most = f"{self.max_batch_size} rows"
        if schedule.users is not None:
            most = f"{self.max_batch_size} (each a {schedule.one})"
        return (
            f"{super().words(schedule)}; of a draw of more than {most} a uniformly random part of "
            "that size is used"
        )


@register_draw
@dataclass(frozen=True)
class UserRows(Poisson):
    """Each row that is drawn from joins each step independently, and is clipped by itself; the
    accountant counts how many of them one user can have (Charles et al. 2024, arXiv 2407.07737)."""

    name: ClassVar[str] = "user_rows"
    kind: ClassVar[str] = USER_ROWS

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, "unit_sampling", BY_ROW)

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        return replace(super().sampler(schedule, steps), rows_of_a_user=_users(schedule).max_rows)

    def words(self, schedule: Schedule) -> str:
        users = _users(schedule)
        return (
            f"{super().words(schedule)}; at most {users.max_rows} rows of each {users.name} are "
            f"drawn from, {users.num_rows} rows in all, and the accountant counts how many of "
            "these a step can have"
        )


def _users(schedule: Schedule) -> Users:
    if schedule.users is None:
        raise ConfigError("Expected a plan whose `users` say how many rows are one user's.")
    return schedule.users


GROUP = "rows_per_group"
# What epsilon rests on where places decide who takes part together.
BY_PLACE = (
    "whether the place of each row, or user, in the training set depends on no other's content: "
    "sorting, filtering or removing rows by what they say moves others"
)


@register_draw
@dataclass(frozen=True)
class Groups(Poisson):
    """Each group of rows joins each step independently with the probability B / (their number), and
    is clipped as one.

    Rows 0 to k - 1 are the first group, the next k the second, and so on: places alone decide,
    before any draw, and the last N mod k rows take no part. (Groups cut from a draw would not do:
    one row less in it moves all that follow into other groups.) B counts groups, and N rows. What
    is protected is one row, whose absence changes its group's gradient and not who is drawn.

    Args: rows_per_group: k >= 2.
    """

    rows_per_group: int

    name: ClassVar[str] = "groups"
    kind: ClassVar[str] = GROUPED
    drawn: ClassVar[str] = "Poisson sampling of fixed groups"
    moved: ClassVar[int] = 2  # a group of another length leaves one batch and joins another

    def __post_init__(self) -> None:
        _validate.integer(GROUP, self.rows_per_group, 2)

    @property
    def group_size(self) -> int:
        return self.rows_per_group

    @property
    def conditions(self) -> tuple[str, ...]:
        return (*super().conditions, BY_PLACE)

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, GROUP, self.rows_per_group)

    def drawn_from(self, rows: int) -> int:
        if rows < self.rows_per_group:
            expected = f"to be at most the number of rows ({rows})"
            raise _validate.invalid(GROUP, self.rows_per_group, expected, "Lower it.")
        return rows // self.rows_per_group

    def event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        return GroupedGaussian(noise_multiplier, self.sample_rate(schedule), steps)

    def words(self, schedule: Schedule) -> str:
        return (
            f"Poisson: each group of {self.rows_per_group} rows, formed by their places before any "
            "draw, joins each step independently with the probability sample_rate and is clipped "
            "as one; an empty draw is a step"
        )


def grouped(draw: Draw, rows_per_group: int) -> Draw:
    """Return a draw of groups in place of one of rows. Raises: UnsupportedArgumentError."""
    if type(draw) is Poisson:
        return Groups(rows_per_group)
    expected, error = f"to be unset with {draw.asked}", UnsupportedArgumentError
    why = "Groups are drawn as Poisson samples. Remove one of the two."
    raise _validate.invalid(GROUP, rows_per_group, expected, why, error)


@register_draw
@dataclass(frozen=True)
class RandomAllocation(Draw):
    """An epoch has t = N / B steps, rounded, and each example takes part in one of them; B is then
    N / t. (Chua et al. 2025, arXiv 2412.16802; Feldman and Shenfeld 2025, arXiv 2502.08202.)"""

    name: ClassVar[str] = "random_allocation"
    sampling: ClassVar[str] = "random_allocation"
    kind: ClassVar[str] = ALLOCATION
    drawn: ClassVar[str] = "random allocation"

    def sampler(self, schedule: Schedule, steps: int) -> AllocationSampler:
        """Return the sampler of one allocation, however many steps are asked for: each iteration
        of it is one that the ledger holds."""
        return AllocationSampler(schedule.drawn_from, self.steps_released_together(schedule))

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int:
        steps = round(drawn_from / expected_batch_size)
        if steps < 2:
            most = f"{drawn_from / 1.5:g}, two thirds of the {drawn_from} examples,"
            expected = f"to be at most {most} with sampling={self.sampling!r}"
            why = "Each example takes part in one of two or more steps of an epoch. Lower it."
            raise _validate.invalid("expected_batch_size", expected_batch_size, expected, why)
        return steps

    def steps_released_together(self, schedule: Schedule) -> int:
        return self.steps_per_epoch(schedule.drawn_from, schedule.expected_batch_size)

    def words(self, schedule: Schedule) -> str:
        return (
            f"random allocation: each {schedule.one} joins one of the "
            f"{self.steps_released_together(schedule)} steps of an allocation, uniformly and "
            "independently of all others; the next allocation is made anew; one that was begun is "
            "accounted in full"
        )

    def what_ran(self, schedule: Schedule, steps: int, mechanism: str, drawn: str) -> str:
        of_one = self.steps_released_together(schedule)
        count = steps // of_one
        return f"{count:,} {drawn}{'s' * (count > 1)}, each of up to {of_one} steps, of {mechanism}"


# -- from arguments --

POISSON = Poisson.sampling


def check_sampling(name: str, value: object) -> str:
    """Return the value of the argument ``sampling``. Raises: InvalidArgumentError."""
    return _validate.one_of(
        name, value, dict.fromkeys(draw.sampling for draw in Draw.known.values())
    )


def draw_of(
    sampling: str = POISSON, max_batch_size: int | None = None, by_row: bool = False
) -> Draw:
    """Return the draw that these arguments ask for.

    Args:
        max_batch_size: ``max_logical_batch_size``.
        by_row: whether rows of users are drawn.

    Raises: InvalidArgumentError; UnsupportedArgumentError for arguments that ask for two draws.
    """
    check_sampling("sampling", sampling)
    asked: list[Draw] = [
        draw() for draw in Draw.known.values() if draw.sampling == sampling != POISSON
    ]
    if by_row:
        asked.append(UserRows())
    if max_batch_size is not None:
        asked.append(TruncatedPoisson(max_batch_size))
    for other in asked[1:]:
        argument, value = other.asked.argument, other.asked.value
        expected = f"to be left out with {asked[0].asked}"
        why = "A step has one draw. Remove one of the two."
        raise _validate.invalid(argument, value, expected, why, UnsupportedArgumentError)
    return asked[0] if asked else Poisson()
