"""Forecast what a plan, or a range of settings, will cost. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_dp._validate import integer, invalid, one_of
from hf_dp.accounting import (
    Event,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RecordRelease,
    SampledRecordRelease,
)
from hf_dp.accounting.accountants import Answer, compare
from hf_dp.plans.privacy import PrivacyPlan

# Of `most_signal`. Our runs of pretrained models at 0.06 to 0.29 stayed at chance. Those at 0.4
# (the quickstart), 0.5 and more learned, but for one at 1.7, of random partitions.
LEAST_SIGNAL = 0.35
_MOST_VALUES = 100  # of a sweep


@dataclass(frozen=True)
class Forecast:
    """What a plan will cost.

    Attributes:
        plan: as given.
        answers: epsilon after all steps, by accountant.
        most_signal: that of :func:`most_signal`; None without ``parameters``, or for DP-FP.
        examples: expected number of examples that go through the model.
    """

    plan: PrivacyPlan
    answers: tuple[Answer, ...]
    most_signal: float | None
    examples: float

    @property
    def effective_noise_multiplier(self) -> float:
        """Return sigma / q, to which the noise on the mean gradient is proportional (Li et al.
        2022, section 3.1.1)."""
        return self.plan.noise_multiplier / self.plan.sample_rate

    @property
    def epochs(self) -> float:
        """Return the expected number of times that an example is used."""
        return self.examples / self.plan.drawn_from


def forecast(
    plan: PrivacyPlan,
    accountants: Sequence[str] | None = None,
    *,
    parameters: int | None = None,
) -> Forecast:
    """Forecast what ``plan`` will cost.

    Args:
        accountants: which to ask; default the plan's own.
        parameters: number of trainable parameters, >= 1.

    Raises: InvalidArgumentError naming the argument.
    """
    count = None if parameters is None else integer("parameters", parameters, 1)
    examples = plan.mechanism.forwarded(plan)
    if plan.selection is not None:
        examples += plan.selection.iterations * plan.selection.sample_rate * plan.num_examples
    gradients_alone = plan.mechanism.noises_gradients_alone
    return Forecast(
        plan=plan,
        answers=compare(plan.events(), plan.delta, accountants or (plan.accountant,)),
        most_signal=most_signal(plan, count) if count and gradients_alone else None,
        examples=examples,
    )


def most_signal(plan: PrivacyPlan, parameters: int) -> float:
    """Return the largest possible ratio of all steps' gradients to all steps' noise, in norms.

    A step's mean gradient has norm C at most, so T of them add up to T C. Their noise has a
    standard deviation of noise_std / B a coordinate and step, so its sum has the norm sqrt(T p)
    noise_std / B.
    """
    of_noise = plan.noise_std * math.sqrt(plan.steps * parameters) / plan.expected_batch_size
    return plan.steps * plan.clipping_norm / of_noise


def assumptions(published: PublishedForwardNoise) -> list[tuple[str, Event | None]]:
    """Return what is assumed of DP-FP as published, and what would then be released; None where
    nothing is known.

    The paper's figure rests on assumptions that do not hold for what runs: everything below the
    noise would have to be out of reach, and who took part in which step a secret. Each row takes
    assumptions that come nearer to what runs.
    """
    sigma, rate = published.noise_multiplier, published.sample_rate
    draws, steps = published.num_micro_batches, published.steps
    return [
        (
            "all of the paper's, with a bound in place of its limit theorem's estimate",
            PoissonSampledGaussian(sigma, rate, steps * draws),
        ),
        (
            "nothing trains below the noise, and who took part in which step is visible",
            SampledRecordRelease(sigma, rate, steps, draws),
        ),
        ("nothing trains below the noise, and each row is released once", RecordRelease(sigma, 1)),
        ("none: what is below the noise trains", None),
    ]


def parse_sweep(text: str, keys: Mapping[str, type]) -> tuple[str, list[float]]:
    """Return the key and the values of ``key=64..4096``, a range by doubling with both ends, or
    ``key=1,2,4``.

    Args:
        keys: what may be swept, and whether it counts (int) or measures (float).

    Raises: InvalidArgumentError.
    """
    name, _, values = text.partition("=")
    key = one_of("sweep", name.strip().replace("-", "_"), keys, "Write KEY=64..4096 or KEY=1,2.")
    kind = keys[key]
    try:
        low, dots, high = values.partition("..")
        numbers = [kind(value) for value in ((low, high) if dots else values.split(","))]
    except ValueError as error:
        hint = f"{str(error).capitalize()}."
        expected = f"to have values like 64..4096 or 64,128 ({kind.__name__})"
        raise invalid("sweep", text, expected, hint) from error
    if dots:
        least, most = numbers
        if not 0 < least <= most <= least * 2**_MOST_VALUES:
            hint = "A range goes from a positive number to one that is not smaller."
            raise invalid("sweep", text, "to be a range like 64..4096", hint)
        numbers = [least]
        while numbers[-1] * 2 < most:
            numbers.append(numbers[-1] * 2)
        numbers += [most] if most > numbers[-1] else []
    return key, numbers
