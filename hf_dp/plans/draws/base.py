"""What every draw has: its sampler, the event of its steps, and its words.

To add one, from here or from outside: a frozen dataclass that subclasses :class:`Draw`, decorated
by :func:`register_draw`. ``DPTrainingArguments(sampling=...)`` then selects it, and ledger,
statement and card know it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from hf_dp.accounting import Event
from hf_dp.accounting.knows import Asked
from hf_dp.errors import ConfigError
from hf_dp.plans.schedule import Schedule

RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class Share:
    """The examples of one of ``count`` processes: ``rank``, ``rank + count``, and so on.

    It is fixed, so that every example belongs to one process for the whole run.
    """

    rank: int = 0
    count: int = 1

    def of(self, num_examples: int) -> np.ndarray:
        """Return the indices, in increasing order."""
        return np.arange(self.rank, num_examples, self.count)


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Sampler(ABC):
    """Yields logical batches: lists of indices of examples, in increasing order, possibly empty.

    Args:
        random_bytes: the source of randomness, ``n -> n bytes``; by default the operating system's
            cryptographic source. Another source is for tests only: a predictable sampler voids the
            amplification that the accountant counts on.
        share: which examples this sampler draws from; those of the other shares are drawn by other
            processes.
        begin: called as an iteration begins, before anything of it is known, by a sampler whose
            steps are released together.
    """

    random_bytes: RandomBytes = field(default=os.urandom, repr=False, compare=False, kw_only=True)
    share: Share = field(default=Share(), kw_only=True)
    begin: Callable[[], None] = field(default=_nothing, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def __iter__(self) -> Iterator[list[int]]: ...

    @abstractmethod
    def __len__(self) -> int: ...


class AccountedSampler(Sampler):
    """A sampler that makes its own event, so that the accountant is told exactly what was drawn."""

    @abstractmethod
    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        """Return the event of ``steps`` draws, each released with this noise multiplier."""


@dataclass(frozen=True)
class DrawWords:
    """How a statement speaks of a draw.

    Args:
        sampling: who takes part in a step, as a card describes it.
        name: in two or three words, for "900 steps of DP-SGD with ...".
    """

    sampling: str
    name: str


class Draw(ABC):
    """Who takes part in a step. Subclasses are frozen dataclasses.

    Attributes (of the class):
        name: in ``privacy.json``; unique.
        sampling: the value of the argument ``sampling`` that asks for it.
        kind: in the table of what accountants bound (:mod:`hf_dp.accounting.knows`).
    """

    name: ClassVar[str]
    sampling: ClassVar[str]
    kind: ClassVar[str]

    @property
    def asked(self) -> Asked:
        """What a user set to get it, for a refusal."""
        return Asked(self.kind, "sampling", self.sampling)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What epsilon rests on beside the record: for a draw from outside hf_dp, whose it is."""
        module = type(self).__module__
        if module.startswith("hf_dp."):
            return ()
        return (
            f"whether the draw {self.name!r}, which is not hf_dp's but of the module {module!r}, "
            "draws what its event tells the accountant",
        )

    @abstractmethod
    def sampler(self, schedule: Schedule, steps: int) -> AccountedSampler:
        """Return a sampler of ``steps`` logical batches."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :func:`hf_dp.plans.draws.draw_from_dict` reads it back."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    @abstractmethod
    def words(self, schedule: Schedule) -> DrawWords:
        """Return how a statement speaks of it."""

    def event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        """Return what ``steps`` steps with this noise release."""
        return self.sampler(schedule, 1).event(noise_multiplier, steps)

    def sample_rate(self, schedule: Schedule) -> float:
        """Return q, the probability with which each example takes part in a step."""
        return schedule.expected_batch_size / schedule.drawn_from

    def most(self, schedule: Schedule) -> int:
        """Return how many examples a step uses at the most."""
        return schedule.drawn_from

    def used(self, schedule: Schedule) -> float:
        """Return how many examples a step uses on average."""
        return schedule.expected_batch_size

    @property
    def moved(self) -> int:
        """How many examples join or leave a step with one example more, at the most."""
        return 1

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int | None:
        """Return the whole number of steps in which each example takes part once, where there is
        one; None where it takes part once on average."""
        return None

    def steps_released_together(self, schedule: Schedule) -> int:
        """Return how many steps one entry of the ledger pays for, from the first of them on."""
        return 1

    def check(self, schedule: Schedule) -> None:
        """Raise InvalidArgumentError for numbers that do not go with it."""

    def what_ran(self, schedule: Schedule, steps: int, mechanism: str) -> str:
        """Say what ran, for the sentence of a statement. Args: mechanism: its name."""
        counted = f"{steps:,} steps" if steps != 1 else "1 step"
        return f"{counted} of {mechanism} with {self.words(schedule).name}"


DRAWS: dict[str, type[Draw]] = {}


def register_draw(cls: type[Draw]) -> type[Draw]:
    """Make a draw known by its ``name``: a class decorator.

    Raises: ConfigError when another draw has that name.
    """
    if DRAWS.get(cls.name, cls) is not cls:
        raise ConfigError(f"Expected a draw with a name of its own, got {cls.name!r}.")
    DRAWS[cls.name] = cls
    return cls
