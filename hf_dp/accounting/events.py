"""What ran, as frozen data: the mechanisms that a run applied to the private examples.

An event says nothing about epsilon; the accountants do, and they are told what a neighboring data
set is (``hf_dp.accounting.RELATIONS``). Fields that several events have mean the same in all:

- ``noise_multiplier`` is the standard deviation of the Gaussian noise divided by the clipping norm,
  with the noise added once to the *sum* of the clipped contributions, or to each single vector;
  0 means no noise and epsilon infinity.
- ``sample_rate`` is the probability, in [0, 1], with which each example joins a step, independently
  of everything else. Shuffled or fixed-size batches are another mechanism and must not be described
  by these events.
- ``steps`` is how many times it ran, adaptively, empty samples included.

A value that is out of range or not a number raises InvalidArgumentError.

Some events release something about each example by itself, and not a sum. What is released shows
how many examples there are and which of them took part. So no bound for these holds under
``add_remove``: one example more is one released vector more, which no noise hides. Sampling hides
nothing either: an adversary who knows the other examples sees whether this one took part. (Du and
Mi 2021, equation 10, claims otherwise: :class:`PublishedForwardNoise`.) Under ``zero_out`` the
vector of an absent example is still released, and holds only noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from hf_dp._validate import invalid, non_negative, one_of, real
from hf_dp.accounting.event import (
    SUM,
    VECTORS,
    Description,
    Event,
    NoisedSum,
    event_from_dict,
    register_event,
)
from hf_dp.errors import InvalidArgumentError

RUN_DISTRIBUTIONS = ("truncated_negative_binomial", "poisson")
_NO_CUT = 1e-300


@register_event
@dataclass(frozen=True)
class Gaussian(NoisedSum):
    """The Gaussian mechanism on all examples, without sampling."""

    noise_multiplier: float
    steps: int = 1

    def canonical(self) -> tuple[Event, ...]:
        return (PoissonSampledGaussian(self.joint_noise_multiplier, 1.0, self.steps),)


@register_event
@dataclass(frozen=True)
class PoissonSampledGaussian(NoisedSum):
    """The Gaussian mechanism on a fresh Poisson sample in each step."""

    noise_multiplier: float
    sample_rate: float
    steps: int


@register_event
@dataclass(frozen=True)
class TruncatedPoissonSampledGaussian(NoisedSum):
    """A :class:`PoissonSampledGaussian` whose samples are truncated to ``max_batch_size``.

    A larger Poisson sample is truncated uniformly at random. An example can then push another out
    of the sample, which costs more than leaving one out. The analysis is that of Ganesh 2025 (arXiv
    2508.15089).

    Args:
        sample_rate: that of the sample before it is truncated.
        num_examples: N, the examples drawn from, >= 1.
        max_batch_size: the maximum number of examples per step, >= 1.
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

    def canonical(self) -> tuple[Event, ...]:
        if self.sample_rate > 0 and self._cuts():
            return super().canonical()
        joint = self.joint_noise_multiplier
        return (PoissonSampledGaussian(joint, self.sample_rate, self.steps),)

    def _cuts(self) -> bool:
        """Return whether a sample is truncated with more than a negligible probability.

        If one step's sample is truncated with probability t, T steps are within total variation T t
        of T plain ones, so what is (e, d)-private without truncation is (e, d + (1 + exp(e)) T
        t)-private with it: at t = 1e-300, T = 1e9 and e = 500, that is d + 1e-74. (Below that,
        tails underflow and dp-accounting divides by them.)
        """
        if self.max_batch_size >= self.num_examples:
            return False
        # Imported here because it takes half a second: `import hf_dp.accounting` should not.
        from scipy.special import bdtrc

        # P(K >= max)
        return bool(bdtrc(self.max_batch_size - 1, self.num_examples, self.sample_rate) > _NO_CUT)


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
        noise_multiplier, sample_rate: of one row.
        max_rows: the most rows of one user that can be sampled from, >= 1.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_rows: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove")
    restriction: ClassVar[str] = "No bound is implemented for rows that become another user's."

    def canonical(self) -> tuple[Event, ...]:
        if self.sample_rate < 1 and self.max_rows > 1:
            return super().canonical()
        # Without sampling all rows of a user are in each sum.
        joint = self.joint_noise_multiplier / self.max_rows
        return (PoissonSampledGaussian(joint, self.sample_rate, self.steps),)


@register_event
@dataclass(frozen=True)
class GroupedGaussian(NoisedSum):
    """The Gaussian mechanism on a fresh Poisson sample of fixed groups, each clipped as one, where
    what is protected is one example of a group.

    An example's place alone says which group it is in. Without it, or with another in its place,
    the group contributes another vector of norm at most 1: it moves by up to 2, and is in a sample
    exactly when it was before. So under either relation a step is dominated by that of a
    :class:`PoissonSampledGaussian` under replace-one, (1 - q) N(0, sigma^2) + q N(1, sigma^2)
    against (1 - q) N(0, sigma^2) + q N(-1, sigma^2). (A group with all of its examples, replaced by
    nothing, costs what that event does under zero-out.)
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "replace_one")
    restriction: ClassVar[str] = "One more would move others into other groups."


@register_event
@dataclass(frozen=True)
class RandomAllocationGaussian(NoisedSum):
    """The Gaussian mechanism in which each example takes part once in ``steps_per_allocation``
    steps, in a uniformly random one, independently of all others; then it is allocated anew.

    The analysis is that of Chua et al. 2025 (arXiv 2412.16802, "balls and bins") and Feldman and
    Shenfeld 2025 (arXiv 2502.08202). An allocation counts as a whole from its first step on: how
    little a part of it costs is not known.

    Args:
        steps_per_allocation: t >= 2.
        steps: of all allocations together, a multiple of t.
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
        super().__post_init__()
        if self.steps % self.steps_per_allocation:
            expected = f"to be a multiple of steps_per_allocation ({self.steps_per_allocation})"
            why = "An allocation that was begun counts as a whole."
            raise invalid("steps", self.steps, expected, why)

    def with_steps(self, steps: int) -> Self:
        of_one = self.steps_per_allocation
        return dataclasses.replace(self, steps=-(-steps // of_one) * of_one)

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a given step."""
        return 1 / self.steps_per_allocation


@register_event
@dataclass(frozen=True)
class BandedGaussian(NoisedSum):
    """Noised sums whose noise is correlated over ``bands`` steps, each over a fresh Poisson sample
    of one of ``bands`` fixed parts of the examples, the classes (Choquette-Choo et al. 2023, arXiv
    2306.08153, Theorem 5; ``amplified_bandmf_event`` of jax_privacy). It describes a run only if:

    * Which class an example is in depends on its place alone, which no neighbor changes.
    * Step n of the run, of those that are recorded, samples from class n mod b.
    * Steps are cut into blocks. In one of T steps the released sums are G + C^-1 z: G (T, d) are
      the sums, of sensitivity 1 each; z (T, d) is N(0, noise_multiplier^2), independent of other
      blocks' and of all else; C (T, T) is fixed, lower triangular, C[s, t] = 0 for s >= t + b, and
      its columns have norms of at most 1. The steps of a block are consecutive.

    **Then its steps cost what those of the class with the most steps do**, ceil(steps / b) of a
    :class:`PoissonSampledGaussian` at the same rate, whatever the blocks. Fix an example, its class
    and the other examples. In a block the steps of its class lie b or more apart, so the columns of
    C at these steps have disjoint rows t .. t + b - 1, and the outcomes C G + z fall into segments,
    each with one of its steps, t, at most. Given all outcomes before a segment, the sum over its
    class in step t is a vector v, drawn as in a single step: g of norm <= 1 is a function of the
    past, and who is sampled is independent of it. The segment's outcome is c_t x v + (what other
    classes add, a function of the outcomes before and in the segment, given their draws, which are
    independent of v) + z, |c_t| <= 1. Take off what is known, and rotate so that c_t is one axis:
    |c_t| v + z along it, which is the step of the sampled mechanism with no less noise, and noise
    independent of the examples across it. So a segment is post-processing of one such step.
    Segments, and blocks, compose adaptively; a block that ends early is a leading principal
    submatrix of C, whose columns are only shorter. Nothing but "drawn as in a single step" was used
    of the sample: it may be truncated, too. A part of the step ``beside`` the sum, with independent
    noise, is a coordinate more of v and of z in row t.

    Args: noise_multiplier: that of z. sample_rate: of examples of a step's class. bands: b >= 2.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    bands: int

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "replace_one")
    restriction: ClassVar[str] = "One more would move the places of others, and so their classes."
    adds_up: ClassVar[bool] = False  # two runs both begin with class 0

    @property
    def correlated_steps(self) -> int:
        return self.bands

    def canonical(self) -> tuple[Event, ...]:
        of_class = -(-self.steps // self.bands)  # of the one with the most steps
        return (PoissonSampledGaussian(self.joint_noise_multiplier, self.sample_rate, of_class),)


@register_event
@dataclass(frozen=True)
class TruncatedBandedGaussian(BandedGaussian):
    """The same with samples as of a :class:`TruncatedPoissonSampledGaussian`, of one class with
    ``num_examples``, as many as each has."""

    num_examples: int
    max_batch_size: int

    def canonical(self) -> tuple[Event, ...]:
        (own,) = super().canonical()
        ran = own.noise_multiplier, own.sample_rate, own.steps  # type: ignore[attr-defined]
        cut = TruncatedPoissonSampledGaussian(*ran, self.num_examples, self.max_batch_size)
        return cut.canonical()


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
    """

    run: tuple[Gaussian | PoissonSampledGaussian | TruncatedPoissonSampledGaussian, ...]
    mean_runs: float
    distribution: str = "truncated_negative_binomial"
    shape: float | None = 1.0

    adds_up: ClassVar[bool] = False

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
            return
        object.__setattr__(self, "shape", non_negative("shape", self.shape))
        if self.shape and not 1e-6 <= self.shape <= 1e6:
            raise invalid("shape", self.shape, "to be 0 or from 10^-6 to 10^6")
        if mean < 1 + 1e-6:
            raise invalid(
                "mean_runs", mean, "to be above 1 by 10^-6 or more", "A single run is no search."
            )

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Those of one run."""
        return sum(event.steps for event in self.run)

    def with_steps(self, steps: int) -> Self:
        """Return the search whose runs have so many steps.

        Raises: InvalidArgumentError for runs of several events: of which is not known.
        """
        if len(self.run) > 1:
            raise invalid("steps", steps, f"to be left at {self.steps} for runs of several events")
        return dataclasses.replace(self, run=(self.run[0].with_steps(steps),))

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """Those of one run; of a run of several events none is the one."""
        return self.run[0].noise_multipliers if len(self.run) == 1 else {}

    def to_dict(self) -> Description:
        return {**super().to_dict(), "run": [event.to_dict() for event in self.run]}

    @classmethod
    def from_fields(cls, values: Description) -> Self:
        if not isinstance(values["run"], list):
            raise InvalidArgumentError(f"Expected a list of events as `run`: {values['run']!r}.")
        run = tuple(event_from_dict(each) for each in values["run"])
        return super().from_fields({**values, "run": run})


class RowByRow(Event):
    """What releases something about each example by itself."""

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "replace_one")
    restriction: ClassVar[str] = "What is released shows how many examples took part."
    parts: ClassVar[Mapping[str, str]] = {VECTORS: "noise_multiplier"}


@register_event
@dataclass(frozen=True)
class RecordRelease(RowByRow):
    """Each example's clipped vector is released, with its own Gaussian noise, ``steps`` times.

    Only an example's own vector depends on it, so this is the Gaussian mechanism of sensitivity C
    on that vector.
    """

    noise_multiplier: float
    steps: int = 1

    def canonical(self) -> tuple[Event, ...]:
        return (PoissonSampledGaussian(self.noise_multiplier, 1.0, self.steps),)


@register_event
@dataclass(frozen=True)
class SampledRecordRelease(RowByRow):
    """A :class:`RecordRelease` of the examples in a Poisson sample; membership is visible.

    An example that took part in k samples has released k noisy vectors: with T samples in all,
    ``delta(epsilon) = sum_k Binomial(k; T, q) delta_Gauss(epsilon; sqrt(k) / noise_multiplier)``,
    because k does not depend on the example's contents. Sampling scales delta and gives no other
    amplification.

    Args:
        num_micro_batches: independent samples in each step, M >= 1; T is ``steps *
            num_micro_batches``.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    num_micro_batches: int = 1

    def canonical(self) -> tuple[Event, ...]:
        draws = self.steps * self.num_micro_batches
        return (dataclasses.replace(self, steps=draws, num_micro_batches=1),)


@register_event
@dataclass(frozen=True)
class SumAndRows(RowByRow):
    """Each step releases a noisy sum over a Poisson sample, and noisy vectors of the examples in
    another, independent one.

    The vectors show which examples were sampled for them; the sum's sample stays secret. So these
    are a :class:`PoissonSampledGaussian` and a :class:`SampledRecordRelease`. (If one sample served
    both, the vectors would show whose sum it is, and its sample would not be secret.)

    Args:
        noise_multiplier: that of the sum.
        record_noise_multiplier: that of the vectors.
    """

    noise_multiplier: float
    record_noise_multiplier: float
    sample_rate: float
    steps: int

    parts: ClassVar[Mapping[str, str]] = {
        SUM: "noise_multiplier",
        VECTORS: "record_noise_multiplier",
    }

    def canonical(self) -> tuple[Event, ...]:
        return (
            PoissonSampledGaussian(self.noise_multiplier, self.sample_rate, self.steps),
            SampledRecordRelease(self.record_noise_multiplier, self.sample_rate, self.steps),
        )


@register_event
@dataclass(frozen=True)
class PublishedForwardNoise(Event):
    """DP-FP as published (Du and Mi 2021, Algorithm 1), for which *no epsilon is established*.

    The paper treats each micro-batch as ``p G_mu + (1 - p) Id`` (equation 10) and the update as
    post-processing of the noised representations. Neither holds: vectors are released one by one,
    and the encoder's gradient is computed from activations without noise. Only ``gdp_clt`` gives an
    answer, the figure that the paper computes.

    Args:
        noise_multiplier: noise standard deviation / clipping norm of the representation.
        sample_rate: p = B / (M D).
        num_micro_batches: M >= 1.
        steps: optimizer steps, T.
    """

    noise_multiplier: float
    sample_rate: float
    num_micro_batches: int
    steps: int

    reasons: ClassVar[tuple[str, ...]] = (
        "the noise protects what is computed from the noised representation. The encoder's "
        "gradient is not: it is computed from the activations below the noise. A word that occurs "
        "in one training row alone moves its embedding in the steps that draw this row and in no "
        "other, however large the noise",
        "noised rows are released one by one, so whoever knows the other rows sees whether a row "
        "took part; the formula for the secret sample of a sum, from which the paper computes its "
        "figure, does not apply",
        "the labels of the training rows enter the loss as they are",
        "the paper's figure is a limit theorem's estimate far outside its range: even if all of "
        "the above held, the true epsilon would be several times as large, so privacy much weaker",
    )
    several_forwards: ClassVar[bool] = True
    unestablished: ClassVar[str] = (
        "DP-FP as published, whose encoder is trained by gradients that were not noised"
    )
    parts: ClassVar[Mapping[str, str]] = {VECTORS: "noise_multiplier"}

    def canonical(self) -> tuple[Event, ...]:
        draws = self.steps * self.num_micro_batches
        return (dataclasses.replace(self, steps=draws, num_micro_batches=1),)
