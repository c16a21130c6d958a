"""Noise that is correlated over ``bands`` steps, and the draw that keeps its epsilon small.

The noise of step t is row t of C^-1 z for a lower triangular Toeplitz matrix C with ``bands``
diagonals: what one step adds, later ones take back in part (Choquette-Choo et al. 2023, arXiv
2306.08153). A step draws from one of ``bands`` classes of examples, in turn, so that the steps of
one example lie ``bands`` apart (:class:`hf_dp.accounting.events.BandedGaussian`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import Event
from hf_dp.accounting.events import BandedGaussian, TruncatedBandedGaussian
from hf_dp.accounting.knows import BANDED, TRUNCATED_BANDED, Asked
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.draws import BY_PLACE, Draw, Poisson, Schedule, TruncatedPoisson, register_draw
from hf_dp.plans.mechanism import Words
from hf_dp.plans.samplers import PoissonSampler

BANDS, AUTO = "bands", "auto"


def check_bands(name: str, value: object) -> int | str:
    """Return a number of bands, or "auto". Raises: InvalidArgumentError."""
    if value == AUTO:
        return AUTO
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    return _validate.integer(name, number, 2, f"Or {AUTO!r}. Leave it out for independent noise.")


# -- C, by its first column c_0 .. c_{b-1} --


def square_root_column(bands: int) -> tuple[float, ...]:
    """Return the first b coefficients of (1 - x)^(-1/2), binom(2k, k) / 4^k, divided by their norm.

    The whole Toeplitz matrix is the square root of the prefix sums' (Fichtenberger, Henzinger,
    Upadhyay 2022, arXiv 2202.11205; cut to bands: Kalinin and Lampert 2024, arXiv 2405.13763). All
    are made smaller by 2^-50, more than their rounding, so the exact norm is below 1.
    """
    if bands == 1:
        return (1.0,)
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
    """Return the standard deviation of ``sum_t weights[t] x_t``, x = C^-1 z, that of z being 1: the
    norm of C^-T weights, which is solved from the end."""
    return float(np.linalg.norm(solved(column, np.asarray(weights)[::-1])))


def noise_of_steps(column: Sequence[float], steps: int) -> np.ndarray:
    """Return the standard deviation of each x_t, (T,): the norms of the rows of C^-1."""
    return np.asarray(np.cumsum(solved(column, np.eye(1, steps)[0]) ** 2) ** 0.5)


# -- the draw --


def member(block: np.ndarray, of_class: int, bands: int) -> np.ndarray:
    """Return the place, among b consecutive ones, of the class, below b, in each of these blocks: a
    function of block, class and b alone.

    Each b consecutive places are in b different classes, in the order of SplitMix64's outputs
    (Steele, Lea, Flood 2014, seed 0): also where rows are sorted by label, each class has its part.
    Places from N on, without an example, make all equal.
    """
    first = block * bands
    own = _mixed(first + of_class)
    before = (_mixed(first + other) < own for other in range(bands))  # no two outputs are equal
    return first + sum(before, np.zeros_like(block))


def _mixed(place: np.ndarray) -> np.ndarray:
    mixed = (place + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed


@dataclass(frozen=True)
class BandedSampler(PoissonSampler):
    """Draws, for each step n of a run from ``first`` on, each example of class n mod b with
    probability ``sample_rate``."""

    bands: int = 2
    first: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        blocks = -(-self.num_examples // self.bands)
        for step in range(self.first, self.first + self.steps):
            # A place without an example is drawn, and can be cut off, as any other.
            drawn = self.cut(member(self.joining(blocks), step % self.bands, self.bands))
            yield drawn[drawn < self.num_examples].tolist()

    def draw(self) -> list[int]:
        raise ConfigError("Expected a step to draw for. Iterate over the sampler.")

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        ran = noise_multiplier, self.sample_rate, steps, self.bands
        if self.max_batch_size is None:
            return BandedGaussian(*ran)
        of_class = -(-self.num_examples // self.bands)
        return TruncatedBandedGaussian(*ran, of_class, self.max_batch_size)


class OfStep(list[Any]):
    """What was drawn for one step of a run, and for no other."""

    step: int  # from 0 on, among those that the run's ledger holds


@dataclass(frozen=True)
class InTurn:
    """A loader of draws, each an :class:`OfStep`, from the step on that is next as it begins. The
    k-th draw that a loader gives is its sampler's k-th, also where workers draw ahead."""

    sampler: BandedSampler
    loader: Callable[[BandedSampler], Iterable[Any]]
    recorded: Callable[[], int]  # how many steps the ledger holds

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[OfStep]:
        sampler = replace(self.sampler, first=self.recorded())
        steps, draws = range(sampler.first, sampler.first + sampler.steps), self.loader(sampler)
        for step, drawn in zip(steps, map(OfStep, draws), strict=True):
            drawn.step = step
            yield drawn


@register_draw
@dataclass(frozen=True)
class Banded(Poisson):
    """Each example of the step's class, of b >= 2 in turn, joins with probability b B / N."""

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
        rate = self.sample_rate(schedule)
        return BandedSampler(schedule.drawn_from, rate, steps, bands=self.bands)

    @property
    def conditions(self) -> tuple[str, ...]:
        return (*super().conditions, BY_PLACE)

    def check(self, schedule: Schedule) -> None:
        _validate.integer(BANDS, self.bands, 2)
        most = schedule.drawn_from / schedule.expected_batch_size
        expected = f"to be at most N / expected_batch_size ({most:.6g})"
        if self.sample_rate(schedule) <= 1:
            expected = f"to be at most the steps of the run ({schedule.steps})"
        if self.sample_rate(schedule) > 1 or self.bands > schedule.steps:
            raise _validate.invalid(BANDS, self.bands, expected, "Lower one of the two.")

    def words(self, schedule: Schedule) -> str:
        b, one = self.bands, schedule.one
        return (
            f"Poisson, in each step from one of {b} parts of the {one}s, in turn: the part of a "
            f"{one} is fixed by its place alone; in its part's steps each {one} joins "
            "independently with the probability sample_rate; an empty draw is a step"
        )

    def of_noise(self, words: Words) -> Words:
        """Return a mechanism's words with those of its noise."""
        b = self.bands
        earlier = "c_1 x_(t-1)" + f" - ... - c_{b - 1} x_(t-{b - 1})" * (b > 2)
        noise = (
            ". The noise is correlated over steps: of z_t, drawn anew with that standard deviation "
            f"(noise_std), the step adds x_t = (z_t - {earlier}) / c_0, "
            "with c_k proportional to binom(2k, k) / 4^k, their squares "
            "adding up to 1; x begins anew after each interruption, and is never saved"
        )
        of_parts = f", which are ceil(steps / {b}) steps of each part at the most"
        mechanism, proof = words.mechanism + noise, words.proof + of_parts
        return replace(words, mechanism=mechanism, proof=proof, sampling_code=Banded.name)


@register_draw
@dataclass(frozen=True)
class TruncatedBanded(TruncatedPoisson, Banded):
    """A :class:`Banded` draw of which a step uses a uniformly random part where it is too large."""

    name: ClassVar[str] = "truncated_banded"
    kind: ClassVar[str] = TRUNCATED_BANDED
    drawn: ClassVar[str] = "truncated cyclic Poisson sampling and banded noise"

    asked = Banded.asked

    def check(self, schedule: Schedule) -> None:
        super().check(schedule)
        Banded.check(self, schedule)


def banded(draw: Draw, bands: int) -> Draw:
    """Return a draw with its classes and its noise. Raises: UnsupportedArgumentError."""
    if type(draw) is Poisson:
        return Banded(bands)
    if type(draw) is TruncatedPoisson:
        return TruncatedBanded(bands, draw.max_batch_size)
    why = "Bands of Poisson draws alone are implemented. Remove one of the two."
    expected, error = f"to be unset with {draw.asked}", UnsupportedArgumentError
    raise _validate.invalid(BANDS, bands, expected, why, error)
