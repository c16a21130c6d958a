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
from typing import Any, ClassVar, Self

from hf_dp._validate import invalid, non_negative, one_of, real
from hf_dp.accounting.event import Event, NoisedSum, event_from_dict, register_event
from hf_dp.errors import InvalidArgumentError


@register_event
@dataclass(frozen=True)
class Gaussian(NoisedSum):
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
        self._check()


@register_event
@dataclass(frozen=True)
class PoissonSampledGaussian(NoisedSum):
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
        self._check()


@register_event
@dataclass(frozen=True)
class TruncatedPoissonSampledGaussian(NoisedSum):
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
        self._check(whole={"num_examples": 1, "max_batch_size": 1})


@register_event
@dataclass(frozen=True)
class UserRowsGaussian(NoisedSum):
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
        self._check(whole={"max_rows": 1})


@register_event
@dataclass(frozen=True)
class RandomAllocationGaussian(NoisedSum):
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
        self._check(whole={"steps_per_allocation": 2})
        if self.steps % self.steps_per_allocation:
            raise invalid(
                "steps",
                self.steps,
                f"to be a multiple of steps_per_allocation ({self.steps_per_allocation})",
                "An allocation that was begun counts as a whole.",
            )

    def with_steps(self, steps: int) -> Self:
        of_one = self.steps_per_allocation
        return dataclasses.replace(self, steps=-(-steps // of_one) * of_one)

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a given step."""
        return 1 / self.steps_per_allocation


RUN_DISTRIBUTIONS = ("truncated_negative_binomial", "poisson")


@register_event
@dataclass(frozen=True)
class BestOfRandomRuns(Event):
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
    def steps(self) -> int:  # type: ignore[override]
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

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        if not isinstance(values["run"], list):
            raise InvalidArgumentError(f"Expected a list of events as `run`: {values['run']!r}.")
        return cls(**{**values, "run": tuple(event_from_dict(each) for each in values["run"])})
