"""What ran, as frozen data: the mechanisms that a run applied to the private examples.

An event says nothing about epsilon; the accountants do. In every event ``noise_multiplier`` is the
standard deviation of the Gaussian noise divided by the clipping norm, with the noise added once to
the *sum* of the clipped contributions. The accountant is told what a neighboring data set is
(``hf_dp.accounting.RELATIONS``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

from hf_dp._validate import in_unit_interval, integer, invalid, non_negative, one_of, real
from hf_dp.accounting.described import LOSS, SUM, Described, joint_noise_multiplier
from hf_dp.accounting.record_events import (
    PublishedForwardNoise,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
)
from hf_dp.errors import InvalidArgumentError, UnsupportedEventError


@dataclass(frozen=True)
class Gaussian(Described):
    """The Gaussian mechanism on all examples (no sampling), run ``steps`` times, adaptively.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise and
            epsilon infinity.
        steps: how many times it ran, >= 0.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    steps: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "noise_multiplier", non_negative("noise_multiplier", self.noise_multiplier)
        )
        object.__setattr__(self, "steps", integer("steps", self.steps, 0))


@dataclass(frozen=True)
class PoissonSampledGaussian(Described):
    """The Gaussian mechanism on a fresh Poisson sample, run ``steps`` times, adaptively.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise and
            epsilon infinity.
        sample_rate: the probability, in [0, 1], with which each example joins a step, independently
            of everything else. Shuffled or fixed-size batches are another mechanism and must not be
            described by this event.
        steps: how many times it ran, empty samples included, >= 0.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "noise_multiplier", non_negative("noise_multiplier", self.noise_multiplier)
        )
        hint = "It is expected_batch_size / num_examples."
        object.__setattr__(
            self,
            "sample_rate",
            in_unit_interval("sample_rate", self.sample_rate, hint, zero=True, one=True),
        )
        object.__setattr__(self, "steps", integer("steps", self.steps, 0))


@dataclass(frozen=True)
class TruncatedPoissonSampledGaussian(Described):
    """A :class:`PoissonSampledGaussian` whose samples are truncated to ``max_batch_size``.

    A larger Poisson sample is truncated uniformly at random. An example can then push another out
    of the sample, which costs more than leaving one out. The analysis is that of Chua et al. 2025
    (arXiv 2508.15089).

    Args:
        noise_multiplier, sample_rate, steps: as there; ``sample_rate`` is that of the sample before
            it is truncated.
        num_examples: N, the examples drawn from, >= 1.
        max_batch_size: the maximum number of examples per step, >= 1.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    num_examples: int
    max_batch_size: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "replace_one")
    restriction: ClassVar[str] = (
        "Samples are truncated to a maximum size: with one example more, which a neighbor has, "
        "other examples would be left out."
    )

    def __post_init__(self) -> None:
        poisson = PoissonSampledGaussian(self.noise_multiplier, self.sample_rate, self.steps)
        for name, value in dataclasses.asdict(poisson).items():
            object.__setattr__(self, name, value)
        for name in ("num_examples", "max_batch_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))


@dataclass(frozen=True)
class SumAndLoss(Described):
    """A :class:`PoissonSampledGaussian` that also releases the noisy sum of its sample's losses.

    Each of the two sums has Gaussian noise of its own, independent of the other's. Divide each by
    the standard deviation of its noise. All noise is then standard normal, and an example adds one
    vector: its gradient, of norm at most ``1 / noise_multiplier``, and its loss, at most
    ``1 / loss_noise_multiplier``, in a coordinate of its own. So the two are :attr:`joint`, the
    Gaussian mechanism of one sum, with ``1 / sigma^2 = 1 / noise_multiplier^2 + 1 /
    loss_noise_multiplier^2``, whatever the sampling and the relation.

    Args:
        noise_multiplier: of the sum of gradients, noise standard deviation / clipping norm, >= 0.
        loss_noise_multiplier: of the sum of losses, noise standard deviation / bound of one loss,
            >= 0.
        sample_rate, steps: as there.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    loss_noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "loss_noise_multiplier"):
            object.__setattr__(self, name, non_negative(name, getattr(self, name)))
        sampled = dataclasses.asdict(self.joint)
        del sampled["noise_multiplier"]
        for name, value in sampled.items():
            object.__setattr__(self, name, value)

    @property
    def joint(self) -> PoissonSampledGaussian | TruncatedPoissonSampledGaussian:
        """The Gaussian mechanism that the two sums are together."""
        return PoissonSampledGaussian(self.joint_noise_multiplier, self.sample_rate, self.steps)

    @property
    def joint_noise_multiplier(self) -> float:
        """The noise multiplier of :attr:`joint`."""
        return joint_noise_multiplier(self.noise_multiplier, self.loss_noise_multiplier)

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {SUM: self.noise_multiplier, LOSS: self.loss_noise_multiplier}


@dataclass(frozen=True)
class TruncatedSumAndLoss(SumAndLoss):
    """A :class:`SumAndLoss` whose samples are truncated, as in
    :class:`TruncatedPoissonSampledGaussian`.

    Args: num_examples, max_batch_size: as there; the others as in :class:`SumAndLoss`.

    Raises: InvalidArgumentError.
    """

    num_examples: int
    max_batch_size: int

    relations: ClassVar[tuple[str, ...]] = TruncatedPoissonSampledGaussian.relations
    restriction: ClassVar[str] = TruncatedPoissonSampledGaussian.restriction

    @property
    def joint(self) -> TruncatedPoissonSampledGaussian:
        """The Gaussian mechanism that the two sums are together."""
        return TruncatedPoissonSampledGaussian(
            self.joint_noise_multiplier,
            self.sample_rate,
            self.steps,
            self.num_examples,
            self.max_batch_size,
        )


@dataclass(frozen=True)
class UserRowsGaussian(Described):
    """The Gaussian mechanism on a fresh Poisson sample of rows, each clipped by itself, where what
    is protected is a user with up to ``max_rows`` of the rows.

    A step's sample has K of the user's rows, K binomial, and they move the sum by up to K clipping
    norms. So a step is dominated by a mixture of Gaussians: N(0, sigma^2) against N(K, sigma^2)
    with K ~ Binomial(max_rows, sample_rate) (Choquette-Choo et al. 2023, arXiv 2310.15526,
    Corollary 4.7; as example-level sampling in Charles et al. 2024, arXiv 2407.07737, section 3).
    Users with fewer rows lose less, since K grows with the number of rows.

    Args:
        noise_multiplier: noise standard deviation / clipping norm of one row, >= 0.
        sample_rate: the probability, in [0, 1], with which each row joins a step, independently of
            everything else.
        steps: how many times it ran, empty samples included, >= 0.
        max_rows: the most rows of one user that can be sampled from, >= 1.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_rows: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove")
    restriction: ClassVar[str] = "No bound is implemented for rows that become another user's."

    def __post_init__(self) -> None:
        poisson = PoissonSampledGaussian(self.noise_multiplier, self.sample_rate, self.steps)
        for name, value in dataclasses.asdict(poisson).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "max_rows", integer("max_rows", self.max_rows, 1))


@dataclass(frozen=True)
class RandomAllocationGaussian(Described):
    """The Gaussian mechanism in which each example takes part once in ``steps_per_allocation``
    steps, in a uniformly random one, independently of all others; then it is allocated anew.

    The analysis is that of Chua et al. 2025 (arXiv 2412.16802, "balls and bins") and Feldman and
    Shenfeld 2025 (arXiv 2502.08202). An allocation counts as a whole from its first step on: how
    little a part of it costs is not known.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise and
            epsilon infinity.
        steps_per_allocation: t >= 2.
        steps: of all allocations together, a multiple of t, >= 0.

    Raises:
        InvalidArgumentError: a value is out of range or not a number.
    """

    noise_multiplier: float
    steps_per_allocation: int
    steps: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove")
    restriction: ClassVar[str] = (
        "No bound is implemented for one example replaced by another that is allocated."
    )
    paid_ahead: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sigma = non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        of_one = integer("steps_per_allocation", self.steps_per_allocation, 2)
        object.__setattr__(self, "steps_per_allocation", of_one)
        steps = integer("steps", self.steps, 0)
        if steps % of_one:
            raise invalid(
                "steps",
                self.steps,
                f"to be a multiple of steps_per_allocation ({of_one})",
                "An allocation that was begun counts as a whole.",
            )
        object.__setattr__(self, "steps", steps)

    def with_steps(self, steps: int) -> Self:
        of_one = self.steps_per_allocation
        return dataclasses.replace(self, steps=-(-steps // of_one) * of_one)

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a given step."""
        return 1 / self.steps_per_allocation


RUN_DISTRIBUTIONS = ("truncated_negative_binomial", "poisson")


@dataclass(frozen=True)
class BestOfRandomRuns(Described):
    """A search: K independent runs, K random, of which only the best is released.

    The analysis is that of Papernot and Steinke 2021 (arXiv 2110.03620). This event describes a
    search only if all of the following hold; otherwise all runs compose.

    * K was drawn secretly and stays secret.
    * Each run drew its hyperparameters independently from one distribution fixed beforehand
      (nothing adaptive, no early stopping of runs).
    * The score that chose the best run was public, or an accounted release that is part of ``run``.
    * Nothing about the other runs is released, not even their number.

    Args:
        run: the events of one run; where hyperparameters change privacy, those of the most
            expensive choice. None of them is a search.
        mean_runs: the expectation of K, from 1 to 10^9.
        distribution: of K: "truncated_negative_binomial" (K >= 1) or "poisson" (K may be 0: then
            nothing is released).
        shape: that of the truncated negative binomial, 0 or from 10^-6 to 10^6: 1 (default) is the
            geometric distribution, 0 the logarithmic one. With "poisson" it must be None.

    Raises:
        InvalidArgumentError: a value is out of range, or ``run`` holds no event or a search.
    """

    run: tuple[Gaussian | PoissonSampledGaussian | TruncatedPoissonSampledGaussian, ...]
    mean_runs: float
    distribution: str = "truncated_negative_binomial"
    shape: float | None = 1.0

    def __post_init__(self) -> None:
        simple = (Gaussian, PoissonSampledGaussian, TruncatedPoissonSampledGaussian)
        run = (self.run,) if isinstance(self.run, simple) else self.run
        if (
            not isinstance(run, (tuple, list))
            or not run
            or not all(type(event) in simple for event in run)
        ):
            raise invalid("run", self.run, "to be the events of one run, none of them a search")
        object.__setattr__(self, "run", tuple(run))
        mean = real("mean_runs", self.mean_runs)
        if not 1 <= mean <= 1e9:
            raise invalid("mean_runs", self.mean_runs, "to be from 1 to 10^9")
        object.__setattr__(self, "mean_runs", mean)
        one_of("distribution", self.distribution, RUN_DISTRIBUTIONS)
        if self.distribution == "poisson":
            if self.shape is not None:
                raise invalid("shape", self.shape, "to be None with distribution 'poisson'")
        else:
            object.__setattr__(self, "shape", non_negative("shape", self.shape))
            if self.shape and not 1e-6 <= self.shape <= 1e6:
                raise invalid("shape", self.shape, "to be 0 or from 10^-6 to 10^6")
            if mean < 1 + 1e-6:
                raise invalid(
                    "mean_runs",
                    self.mean_runs,
                    "to be above 1 by 10^-6 or more",
                    "A single run is no search.",
                )

    @property
    def steps(self) -> int:
        """Those of one run."""
        return sum(event.steps for event in self.run)

    def with_steps(self, steps: int) -> Self:
        """Return the search whose runs have so many steps. Raises: InvalidArgumentError for runs of
        several events: of which is not known."""
        if len(self.run) > 1:
            raise invalid("steps", steps, f"to be left at {self.steps} for runs of several events")
        return dataclasses.replace(self, run=(self.run[0].with_steps(steps),))

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """Those of one run; of a run of several events none is the one."""
        return self.run[0].noise_multipliers if len(self.run) == 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description that :func:`event_from_dict` reads."""
        return {**super().to_dict(), "run": [event.to_dict() for event in self.run]}


Event = (
    Gaussian
    | PoissonSampledGaussian
    | TruncatedPoissonSampledGaussian
    | SumAndLoss
    | TruncatedSumAndLoss
    | UserRowsGaussian
    | RandomAllocationGaussian
    | BestOfRandomRuns
    | RecordRelease
    | SampledRecordRelease
    | SumAndRows
    | PublishedForwardNoise
    | RandomizedResponse
)

EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that ``to_dict`` described.

    Nothing is guessed: an unknown type, an unknown field, a missing field or a bad value is
    refused, since an event read wrongly would give a wrong epsilon.

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
    values: dict[str, Any] = {key: value for key, value in data.items() if key != "type"}
    unknown, missing = sorted(set(values) - set(known)), sorted(set(known) - set(values))
    if unknown or missing:
        raise UnsupportedEventError(
            f"Event {name} has fields {known}; unknown here: {unknown}, missing: {missing}. "
            "Read it with the version of hf_dp that wrote it."
        )
    if cls is BestOfRandomRuns:
        if not isinstance(values["run"], list):
            raise UnsupportedEventError(
                f"Event {name} has no list of events as `run`: {values['run']!r}."
            )
        values["run"] = tuple(event_from_dict(each) for each in values["run"])
    try:
        return cls(**values)
    except InvalidArgumentError as error:
        raise UnsupportedEventError(f"Event {name} cannot be read: {error}") from error
