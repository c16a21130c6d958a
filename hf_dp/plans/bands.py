"""Noise that is correlated over ``bands`` steps, and the draw that keeps its epsilon small.

The noise of step t is row t of C^-1 z for a lower triangular Toeplitz matrix C with ``bands``
diagonals, so what one step adds, later ones take back in part, and the sum over steps has less
noise than independent noise of the same epsilon would leave in it (Choquette-Choo et al. 2023,
arXiv 2306.08153). A step's own noise is larger: only an optimizer that adds up steps gains.

A step draws from one of ``bands`` classes of examples, in turn, so that the steps of one example
lie ``bands`` apart: see :class:`hf_dp.accounting.BandedGaussian` for what that costs, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import BandedGaussian, Event, TruncatedBandedGaussian
from hf_dp.accounting.knows import BANDED, TRUNCATED_BANDED, Asked
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.draws import Draw, Poisson, Schedule, TruncatedPoisson, register_draw
from hf_dp.plans.samplers import OfStep, PoissonSampler

BANDS, AUTO = "bands", "auto"


def check_bands(name: str, value: object) -> int | str:
    """Return a number of bands, or "auto". Raises: InvalidArgumentError."""
    if value == AUTO:
        return AUTO
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    return _validate.integer(name, number, 2, f"Or {AUTO!r}. Leave it out for independent noise.")


# -- C --


def square_root_column(bands: int) -> tuple[float, ...]:
    """Return the first column of C, its b diagonals c_0 .. c_{b-1}, of norm 1.

    They are the first b coefficients of (1 - x)^(-1/2), binom(2k, k) / 4^k, whose Toeplitz matrix
    is the square root of the prefix sums' (Fichtenberger, Henzinger, Upadhyay 2022, arXiv
    2202.11205; cut to bands, with columns of norm 1: Kalinin and Lampert 2024, arXiv 2405.13763).
    All are made smaller by 2^-50, more than their rounding, so the exact norm is below 1.
    """
    values = [1.0]
    for k in range(1, bands):
        values.append(values[-1] * (2 * k - 1) / (2 * k))
    norm = math.hypot(*values) * (1 + 2**-50)
    return tuple(value / norm for value in values)


def solved(column: Sequence[float], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return x with C x = weights, (T,)."""
    if len(column) == 1:
        return np.asarray(weights) / column[0]
    from scipy.signal import lfilter  # takes half a second to import

    return np.asarray(lfilter([1.0], column, weights))


def noise_of_sum(column: Sequence[float], weights: Sequence[float]) -> float:
    """Return the standard deviation of ``sum_t weights[t] x_t``, where x = C^-1 z and that of z is
    1: the norm of C^-T weights."""
    backwards = np.asarray(weights)[::-1]  # the transpose of a Toeplitz matrix, from the end
    return float(np.linalg.norm(solved(column, backwards)))


def noise_of_steps(column: Sequence[float], steps: int) -> np.ndarray:
    """Return the standard deviation of each x_t, (T,): the norms of the rows of C^-1."""
    return np.asarray(np.cumsum(solved(column, np.eye(1, steps)[0]) ** 2) ** 0.5)


def noise_of_prefixes(column: Sequence[float], steps: int) -> np.ndarray:
    """Return the standard deviation of each ``x_0 + .. + x_t``, (T,)."""
    return np.asarray(np.cumsum(solved(column, np.ones(steps)) ** 2) ** 0.5)


# -- the draw --


def classes(num_examples: int, bands: int) -> np.ndarray:
    """Return the class, below b, of each place, (b ceil(N / b),): a function of place and b alone.

    Each b consecutive places are in b different classes, in the order of SplitMix64's outputs
    (Steele, Lea, Flood 2014, seed 0). So a class has as many rows of each label as any other where
    rows are sorted by label, and each process, which has every W-th place, has rows of each class.
    Places from N on have no example; they make all classes equally large.
    """
    blocks = -(-num_examples // bands)
    mixed = np.arange(1, blocks * bands + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed.reshape(blocks, bands).argsort(axis=1, kind="stable").ravel()


@dataclass(frozen=True)
class BandedSampler(PoissonSampler):
    """Draws, for step n of a run, each example of class n mod b with probability ``sample_rate``.

    Each draw carries the number of its step, which the run compares with its ledger: a draw is
    released as that step or never.
    """

    bands: int = 2

    def __iter__(self) -> Iterator[list[int]]:
        first = self.begin()
        of_place = classes(self.num_examples, self.bands)
        places = self.share.of(len(of_place))
        parts = [places[of_place[places] == each] for each in range(self.bands)]
        for step in range(first, first + self.steps):
            # A place without an example is drawn, and can be cut off, as any other: of a truncated
            # draw all classes are then the same.
            drawn = self.drawn_from(parts[step % self.bands])
            yield OfStep([index for index in drawn if index < self.num_examples], step)

    def draw(self) -> list[int]:
        """Refuse: from which class to draw depends on the step."""
        raise ConfigError("Expected a step to draw for. Iterate over the sampler.")

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        ran = noise_multiplier, self.sample_rate, steps, self.bands
        if self.max_batch_size is None:
            return BandedGaussian(*ran)
        of_class = -(-self.num_examples // self.bands)
        return TruncatedBandedGaussian(*ran, of_class, self.max_batch_size)


@register_draw
@dataclass(frozen=True)
class Banded(Poisson):
    """Each example of the step's class joins with the probability b B / N.

    Args: bands: b >= 2, the classes, which take turns, and the steps over which noise is
        correlated.
    """

    bands: int

    name: ClassVar[str] = "banded"
    kind: ClassVar[str] = BANDED
    drawn: ClassVar[str] = "cyclic Poisson sampling and banded noise"

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, BANDS, self.bands)

    def sample_rate(self, schedule: Schedule) -> float:
        return self.bands * schedule.expected_batch_size / schedule.drawn_from

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        poisson = super().sampler(schedule, steps)
        own = {field.name: getattr(poisson, field.name) for field in fields(PoissonSampler)}
        return BandedSampler(**own, bands=self.bands)

    @property
    def noise_column(self) -> tuple[float, ...]:
        return square_root_column(self.bands)

    @property
    def conditions(self) -> tuple[str, ...]:
        return (
            *super().conditions,
            "whether the place of each row, or user, in the training set depends on no other's "
            "content: sorting, filtering or removing rows by what they say moves others, and so "
            "changes the part that they are in",
        )

    def check(self, schedule: Schedule) -> None:
        super().check(schedule)
        _validate.integer(BANDS, self.bands, 2)
        most = schedule.drawn_from / schedule.expected_batch_size
        if self.sample_rate(schedule) > 1:
            expected = f"to be at most N / expected_batch_size ({most:.6g})"
            why = "A step draws from N / bands examples. Lower one of the two."
            raise _validate.invalid(BANDS, self.bands, expected, why)
        if self.bands > schedule.steps:
            expected = f"to be at most the steps of the run ({schedule.steps})"
            raise _validate.invalid(BANDS, self.bands, expected, "Lower it, or make more steps.")

    def words(self, schedule: Schedule) -> str:
        one = schedule.one
        return (
            f"Poisson, in each step from one of {self.bands} parts of the {one}s, in turn: the "
            f"part of a {one} is fixed by its place alone; in its part's steps each {one} joins "
            "independently with the probability sample_rate; an empty draw is a step"
        )

    @property
    def words_of_noise(self) -> tuple[str, str]:
        b = self.bands
        noise = (
            ". The noise is correlated over steps: of z_t, drawn anew with that standard deviation "
            f"(noise_std), the step adds x_t = (z_t - c_1 x_(t-1) - ... - c_{b - 1} "
            f"x_(t-{b - 1})) / c_0, with c_k proportional to binom(2k, k) / 4^k, their squares "
            "adding up to 1; x begins anew after each interruption, and is never saved"
        )
        return noise, f", which are ceil(steps / {b}) steps of each part at the most"


@register_draw
@dataclass(frozen=True)
class TruncatedBanded(TruncatedPoisson, Banded):
    """A :class:`Banded` draw of which a step uses a uniformly random part where it is too large."""

    name: ClassVar[str] = "truncated_banded"
    kind: ClassVar[str] = TRUNCATED_BANDED
    drawn: ClassVar[str] = "truncated cyclic Poisson sampling and banded noise"

    asked = Banded.asked


def banded(draw: Draw, bands: int) -> Draw:
    """Return a draw with its classes and its noise.

    Raises: UnsupportedArgumentError for a draw of which that is not implemented.
    """
    if type(draw) is Poisson:
        return Banded(bands)
    if type(draw) is TruncatedPoisson:
        return TruncatedBanded(bands, draw.max_batch_size)
    why = "Bands of Poisson draws alone are implemented. Remove one of the two."
    expected, error = f"to be unset with {draw.asked}", UnsupportedArgumentError
    raise _validate.invalid(BANDS, bands, expected, why, error)
