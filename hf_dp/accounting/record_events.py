"""Events of mechanisms that release something about each example by itself, and not a sum.

What is released shows how many examples there are and which of them took part. So none of these
events holds under ``add_remove``: one example more is one released vector more, which no noise
hides. Sampling hides nothing either: an adversary who knows the other examples sees whether this
one took part. (Du and Mi 2021, equation 10, claims otherwise: :class:`PublishedForwardNoise`.)
Under ``zero_out`` the vector of an absent example is still released, and holds only noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hf_dp._validate import invalid, positive
from hf_dp.accounting.event import SUM, VECTORS, Event, joint_noise_multiplier, register_event

ROW_BY_ROW = ("zero_out", "replace_one")
_SHOWS_HOW_MANY = "The released vectors show how many examples took part."


@register_event
@dataclass(frozen=True)
class RecordRelease(Event):
    """Each example's clipped vector is released, with its own Gaussian noise, ``steps`` times.

    Only an example's own vector depends on it, so this is the Gaussian mechanism of sensitivity C
    on that vector.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0.
        steps: how many times every example's vector was released, >= 0.

    Raises: InvalidArgumentError.
    """

    noise_multiplier: float
    steps: int = 1

    relations: ClassVar[tuple[str, ...]] = ROW_BY_ROW
    restriction: ClassVar[str] = (
        "One vector is released for each example, which shows how many examples there are."
    )

    def __post_init__(self) -> None:
        self._check()

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {VECTORS: self.noise_multiplier}


@register_event
@dataclass(frozen=True)
class SampledRecordRelease(Event):
    """A :class:`RecordRelease` of the examples in a Poisson sample; membership is visible.

    An example that took part in k samples has released k noisy vectors: with T samples in all,
    ``delta(epsilon) = sum_k Binomial(k; T, q) delta_Gauss(epsilon; sqrt(k) / noise_multiplier)``,
    because k does not depend on the example's contents. Sampling scales delta and gives no other
    amplification.

    Args:
        noise_multiplier: noise standard deviation / clipping norm, >= 0.
        sample_rate: the probability with which each example joins a sample, in [0, 1].
        steps: optimizer steps, empty ones included, >= 0.
        num_micro_batches: independent samples in each step, M >= 1; T is ``steps *
            num_micro_batches``.

    Raises: InvalidArgumentError.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    num_micro_batches: int = 1

    relations: ClassVar[tuple[str, ...]] = ROW_BY_ROW
    restriction: ClassVar[str] = _SHOWS_HOW_MANY

    def __post_init__(self) -> None:
        self._check(whole={"num_micro_batches": 1})

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {VECTORS: self.noise_multiplier}


@register_event
@dataclass(frozen=True)
class SumAndRows(Event):
    """Each step releases a noisy sum over a Poisson sample, and noisy vectors of single examples.

    The vectors show which examples were sampled. With two independent samples the sum's stays
    secret: a :class:`PoissonSampledGaussian` and a :class:`SampledRecordRelease`. If one sample
    serves both, the vectors show whose sum it is, so its sample is not secret. Given that the
    example was sampled, sum and vector are one Gaussian mechanism with
    ``mu^2 = 1 / noise_multiplier^2 + 1 / record_noise_multiplier^2``, so
    ``delta(epsilon) = sum_k Binomial(k; T, q) delta_Gauss(epsilon; sqrt(k) mu)``.

    Args:
        noise_multiplier: that of the sum, noise standard deviation / clipping norm, >= 0.
        record_noise_multiplier: that of the vectors, >= 0.
        sample_rate: the probability with which each example joins a sample, in [0, 1].
        steps: how many, empty samples included, >= 0.
        one_draw: whether the sum is over the same examples whose vectors are released.

    Raises: InvalidArgumentError.
    """

    noise_multiplier: float
    record_noise_multiplier: float
    sample_rate: float
    steps: int
    one_draw: bool

    relations: ClassVar[tuple[str, ...]] = ROW_BY_ROW
    restriction: ClassVar[str] = _SHOWS_HOW_MANY

    def __post_init__(self) -> None:
        self._check()
        if not isinstance(self.one_draw, bool):
            raise invalid("one_draw", self.one_draw, "to be True or False")

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {SUM: self.noise_multiplier, VECTORS: self.record_noise_multiplier}

    @property
    def joint_noise_multiplier(self) -> float:
        """1 / mu of sum and vector together."""
        return joint_noise_multiplier(self.noise_multiplier, self.record_noise_multiplier)


@register_event
@dataclass(frozen=True)
class PublishedForwardNoise(Event):
    """DP-FP as published (Du and Mi 2021, Algorithm 1), for which *no epsilon is established*.

    The paper treats each micro-batch as ``p G_mu + (1 - p) Id`` (equation 10) and the update as
    post-processing of the noised representations. Neither holds: vectors are released one by one,
    and the encoder's gradient is computed from activations without noise. Only ``gdp_clt`` gives an
    answer, the figure that the paper computes.

    Args:
        noise_multiplier: noise standard deviation / clipping norm of the representation, >= 0.
        sample_rate: p = B / (M D), in [0, 1].
        num_micro_batches: M >= 1.
        steps: optimizer steps, T >= 0.

    Raises: InvalidArgumentError.
    """

    noise_multiplier: float
    sample_rate: float
    num_micro_batches: int
    steps: int

    reasons: ClassVar[tuple[str, ...]] = (
        "the noise protects functions of the noised representation, and the encoder's gradient is "
        "none: it is computed from the activations below the noise, as they are. A word that "
        "occurs in one training row alone moves its embedding in the steps that draw this row and "
        "in no other, whatever the noise",
        "noised rows are released one by one, so whoever knows the other rows sees whether a row "
        "took part; the formula for the secret sample of a sum, from which the paper computes its "
        "figure, does not apply",
        "the labels of the training rows enter the loss as they are",
        "the paper's figure is a limit theorem's estimate far outside its range: even if all of "
        "the above held, the true value would be several times as large",
    )
    several_forwards: ClassVar[bool] = True
    unestablished: ClassVar[str] = (
        "DP-FP as published, whose encoder is trained by gradients that were not noised"
    )

    def __post_init__(self) -> None:
        self._check(whole={"num_micro_batches": 1})

    @property
    def noise_multipliers(self) -> dict[str, float]:
        return {VECTORS: self.noise_multiplier}


@register_event
@dataclass(frozen=True)
class RandomizedResponse(Event):
    """Each example's label is replaced by randomized response, ``steps`` times.

    The label stays with probability ``exp(epsilon) / (exp(epsilon) + K - 1)``; otherwise it becomes
    one of the others uniformly (Warner 1965). The answers for two labels differ by a factor of at
    most exp(epsilon). An absent example's answer is uniform, which is a mixture of those of all
    labels and therefore no further away.

    Args:
        epsilon: > 0 and at most 20.
        num_classes: K >= 2.
        steps: how many times, >= 0.

    Raises: InvalidArgumentError.
    """

    epsilon: float
    num_classes: int
    steps: int = 1

    relations: ClassVar[tuple[str, ...]] = ROW_BY_ROW
    restriction: ClassVar[str] = (
        "One label is released for each example, which shows how many examples there are."
    )

    def __post_init__(self) -> None:
        value = positive("epsilon", self.epsilon)
        # There one answer in 5e8 is another label; beyond it, 1 - that number loses its digits.
        if value > 20:
            raise invalid(
                "epsilon",
                self.epsilon,
                "to be at most 20",
                "Above that, labels are effectively public.",
            )
        object.__setattr__(self, "epsilon", value)
        self._check(whole={"num_classes": 2})

    @property
    def keep_probability(self) -> float:
        """The probability with which a label stays as it is; rounded down."""
        others = (self.num_classes - 1) * math.exp(-self.epsilon)
        return math.nextafter(1 - others / (1 + others), 0)
