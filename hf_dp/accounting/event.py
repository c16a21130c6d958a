"""What every event has: a description to read back, and the relations that it holds for.

To add one, from here or from outside: a frozen dataclass that subclasses :class:`Event`, decorated
by :func:`register_event`. Fields that are named as those of hf_dp are checked as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from hf_dp._validate import in_unit_interval, integer, invalid, non_negative
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedEventError

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

Description = dict[str, object]  # of an event, ready for JSON

# What an event releases with noise: a sum over examples, vectors of one example each, or the sum of
# the examples' losses.
SUM, VECTORS, LOSS = "sum", "vectors", "loss"

# The least value of fields that are whole numbers.
_LEAST = {
    "steps": 0,
    "num_examples": 1,
    "max_batch_size": 1,
    "max_rows": 1,
    "num_micro_batches": 1,
    "steps_per_allocation": 2,
    "bands": 2,
}


class Event:
    """What ran: base of the events, which are frozen dataclasses.

    Attributes:
        steps: how many times it ran, >= 0.

    Class attributes:
        relations: those of :data:`hf_dp.accounting.RELATIONS` under which the analysis holds.
        restriction: why it does not hold under the others; empty if it holds under all.
        reasons: why no bound on its epsilon is established; empty where there is one.
        unestablished: how a sentence names it then.
        several_forwards: whether one step noises vectors in several forward passes.
        paid_ahead: whether it is recorded before the first of several steps, which it all pays for.
        adds_up: whether the steps of two runs cost what as many steps of one run do.
        parts: what it releases with Gaussian noise, such as :data:`SUM`, :data:`VECTORS` and
            :data:`LOSS`, and which field is the noise multiplier of each.
    """

    steps: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove", "replace_one")
    restriction: ClassVar[str] = ""
    reasons: ClassVar[tuple[str, ...]] = ()
    unestablished: ClassVar[str] = ""
    several_forwards: ClassVar[bool] = False
    paid_ahead: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name in _field_names(type(self)):
            value = getattr(self, name)
            if name.endswith("noise_multiplier"):
                value = non_negative(name, value)
            elif name == "sample_rate":
                hint = "It is expected_batch_size / num_examples."
                value = in_unit_interval(name, value, hint, zero=True, one=True)
            elif name in _LEAST:
                value = integer(name, value, _LEAST[name])
            object.__setattr__(self, name, value)

    @property
    def established(self) -> bool:
        """Whether a bound on its epsilon is known at all."""
        return not self.reasons

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """The noise multiplier of each part."""
        return {part: getattr(self, name) for part, name in self.parts.items()}

    @property
    def correlated_steps(self) -> int:
        """In how many consecutive steps the noise may be correlated; 1: it is independent."""
        return 1

    def dp_event(self) -> DpEvent | None:
        """Return one step (what ``with_steps(1)`` is) as a ``dp_accounting.DpEvent``.

        It describes an event from outside hf_dp. Use tuples in it, so that it has a hash. None for
        the events of hf_dp, which the accountants know themselves.
        """
        return None

    def canonical(self) -> tuple[Event, ...]:
        """Return what it costs, in the form that accountants take.

        Two of these events add up their steps if they differ in nothing else.
        """
        return (self,)

    def with_steps(self, steps: int) -> Self:
        """Return the event of so many steps of the same kind, or of the fewest whole allocations
        that have them."""
        return dataclasses.replace(self, steps=steps)  # type: ignore[type-var]

    def to_dict(self) -> Description:
        """Return a JSON-ready description that :func:`event_from_dict` reads."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_fields(cls, values: Description) -> Self:
        """Return the event with these fields, as :meth:`to_dict` has them."""
        return cls(**values)


@dataclass(frozen=True)
class NoisedSum(Event):
    """A sum over a draw with Gaussian noise, and other sums over the same draw.

    Each sum has noise of its own, independent of the others'. Divide each by the standard deviation
    of its noise. All noise is then standard normal, and an example adds one vector: its gradient,
    of norm at most ``1 / noise_multiplier``, and its part of each other sum in coordinates of its
    own. So together they are the Gaussian mechanism of one sum, with the
    :attr:`joint_noise_multiplier`, whatever the draw and the relation.

    Args:
        beside: the noise multipliers, >= 0, of other sums by part, such as :data:`LOSS`.
    """

    beside: Mapping[str, float] | tuple[tuple[str, float], ...] = field(default=(), kw_only=True)

    parts: ClassVar[Mapping[str, str]] = {SUM: "noise_multiplier"}

    def __post_init__(self) -> None:
        super().__post_init__()
        own = dict(self.beside)
        if SUM in own or not all(isinstance(part, str) for part in own):
            raise invalid("beside", own, f"to name parts other than {SUM!r}")
        checked = tuple((part, non_negative(part, own[part])) for part in sorted(own))
        object.__setattr__(self, "beside", checked)

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {**super().noise_multipliers, **dict(self.beside)}

    @property
    def joint_noise_multiplier(self) -> float:
        """That of all parts together, as one Gaussian mechanism."""
        return joint_noise_multiplier(*self.noise_multipliers.values())

    def canonical(self) -> tuple[Event, ...]:
        joint = self.joint_noise_multiplier
        return (dataclasses.replace(self, noise_multiplier=joint, beside=()),)  # type: ignore[call-arg]

    def to_dict(self) -> Description:
        described = super().to_dict()
        del described["beside"]
        return {**described, "beside": dict(self.beside)} if self.beside else described


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return 1 / mu of several Gaussian mechanisms on one example, which are one together: its mu^2
    is the sum of theirs."""
    if len(noise_multipliers) == 1:
        return noise_multipliers[0]
    if 0 in noise_multipliers:
        return 0.0
    return 1 / math.hypot(*(1 / sigma for sigma in noise_multipliers))


EVENT_TYPES: dict[str, type[Event]] = {}

_E = TypeVar("_E", bound=Event)


def register_event(cls: type[_E]) -> type[_E]:
    """Make an event known to ledgers by the name of its class: a class decorator.

    Raises: ConfigError when another event has that name.
    """
    if EVENT_TYPES.get(cls.__name__, cls) is not cls:
        raise ConfigError(f"Expected an event with a name of its own, got {cls.__name__!r}.")
    EVENT_TYPES[cls.__name__] = cls
    return cls


def refuse_stranger(event: object) -> None:
    """Raise UnsupportedEventError for what is not a registered event. (Exact classes: a subclass
    could mean another mechanism.)"""
    if type(event) not in EVENT_TYPES.values():
        raise UnsupportedEventError(
            f"Expected an event, one of {sorted(EVENT_TYPES)}, got {event!r} of {type(event)}."
        )


def as_events(events: Event | Iterable[Event]) -> tuple[Event, ...]:
    """Return one event, or several, as a tuple."""
    return (events,) if isinstance(events, Event) else tuple(events)


def event_from_dict(data: Mapping[str, object]) -> Event:
    """Return the event that ``to_dict`` described.

    Nothing is guessed: an unknown type, an unknown field, a missing field or a bad value is
    refused, since an event read wrongly would give a wrong epsilon.

    Raises: UnsupportedEventError.
    """
    if not isinstance(data, Mapping):
        raise UnsupportedEventError(f"Expected an event as a mapping with a `type`, got {data!r}.")
    name = data.get("type")
    if not isinstance(name, str) or name not in EVENT_TYPES:
        raise UnsupportedEventError(
            f"Unknown event type {name!r}; this version of hf_dp knows {sorted(EVENT_TYPES)}. "
            "Read it with the version that wrote it, or import the module that registers it."
        )
    cls = EVENT_TYPES[name]
    known = _field_names(cls)
    values = {key: value for key, value in data.items() if key != "type"}
    unknown = sorted(set(values) - set(known))
    missing = sorted(set(known) - set(values) - {"beside"})  # which most events have none of
    if unknown or missing:
        raise UnsupportedEventError(
            f"Event {name} has fields {known}; unknown here: {unknown}, missing: {missing}. "
            "Read it with the version of hf_dp that wrote it."
        )
    try:
        return cls.from_fields(values)
    except (InvalidArgumentError, TypeError, ValueError) as error:
        raise UnsupportedEventError(f"Event {name} cannot be read: {error}") from error


def _field_names(cls: type[Event]) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
