"""What ran, as frozen data: the mechanisms that a run applied to the private records.

An event says nothing about epsilon; the accountants do. In every event ``noise_multiplier`` is the standard deviation
of the Gaussian noise divided by the clipping norm, the noise being added once to the *sum* of the clipped
contributions, and the neighboring relation is zero-out: one record's contribution is replaced by nothing while the
number of records stays public (it gives the same epsilon as add-or-remove-one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_dp._validate import in_unit_interval, integer, non_negative
from hf_dp.errors import InvalidArgumentError, UnsupportedEventError


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian mechanism on all records (no sampling), run ``steps`` times, adaptively.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise and epsilon infinity.
        steps: how many times it ran, >= 0.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    steps: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", non_negative("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "steps", integer("steps", self.steps, 0))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that :func:`event_from_dict` reads back."""
        return _to_dict(self)


@dataclass(frozen=True)
class PoissonSampledGaussian:
    """The Gaussian mechanism on a fresh Poisson sample of the records, run ``steps`` times, adaptively.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise and epsilon infinity.
        sample_rate: the probability with which each record joins a step, independently of all else, in [0, 1].
            Shuffled or fixed-size batches are another mechanism and must not be described by this event.
        steps: how many times it ran, empty samples included, >= 0.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", non_negative("noise_multiplier", self.noise_multiplier))
        hint = "It is expected_batch_size / num_examples."
        object.__setattr__(
            self, "sample_rate", in_unit_interval("sample_rate", self.sample_rate, hint, zero=True, one=True)
        )
        object.__setattr__(self, "steps", integer("steps", self.steps, 0))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that :func:`event_from_dict` reads back."""
        return _to_dict(self)


Event = Gaussian | PoissonSampledGaussian

EVENT_TYPES: dict[str, type[Gaussian] | type[PoissonSampledGaussian]] = {
    "Gaussian": Gaussian,
    "PoissonSampledGaussian": PoissonSampledGaussian,
}


def _to_dict(event: Event) -> dict[str, Any]:
    return {"type": type(event).__name__, **dataclasses.asdict(event)}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The event that ``to_dict`` described.

    Nothing is guessed: an unknown type, an unknown field, a missing field or a bad value is refused, since an event
    read wrongly would be an epsilon computed wrongly.

    Raises:
        UnsupportedEventError: the description is not one of an event this version knows.
    """
    if not isinstance(data, Mapping):
        raise UnsupportedEventError(f"Expected an event as a mapping with a `type`, got {data!r}.")
    name = data.get("type")
    if not isinstance(name, str) or name not in EVENT_TYPES:
        raise UnsupportedEventError(
            f"Unknown event type {name!r}; this version of hf_dp knows {sorted(EVENT_TYPES)}. "
            "Read it with the version that wrote it."
        )
    cls = EVENT_TYPES[name]
    known = [field.name for field in dataclasses.fields(cls)]
    values = {key: value for key, value in data.items() if key != "type"}
    unknown, missing = sorted(set(values) - set(known)), sorted(set(known) - set(values))
    if unknown or missing:
        raise UnsupportedEventError(
            f"Event {name} has fields {known}; unknown here: {unknown}, missing: {missing}. "
            "Read it with the version of hf_dp that wrote it."
        )
    try:
        return cls(**values)
    except InvalidArgumentError as error:
        raise UnsupportedEventError(f"Event {name} cannot be read: {error}") from error
