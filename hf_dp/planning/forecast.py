"""Forecast what a plan will cost: epsilon by each accountant, noise beside signal, time, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_dp import _validate
from hf_dp.accounting.accountants import Answer, compare
from hf_dp.plans.privacy import PrivacyPlan

# Of `most_signal`. Our runs of pretrained models at 0.06 to 0.29 stayed at chance. Those at 0.4
# (the quickstart), 0.5 and more learned, but for one at 1.7, of random partitions.
LEAST_SIGNAL = 0.35
# Weights, gradient sums, and Adam's two moments, float32.
_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Forecast:
    """What a plan will cost. Nothing has been run.

    Attributes:
        plan: as given.
        answers: epsilon after all steps, by accountant.
        signal_to_noise: norm of the mean clipped gradient / expected norm of its noise, for one
            step; None without ``gradient_norm`` and ``parameters``.
        most_signal: that of :func:`most_signal`; None without ``parameters``, or for DP-FP.
        examples: expected number of examples that go through the model.
        seconds: their time at the given throughput, without start, evaluation and saving; None
            without one.
        state_bytes: weights, gradient sums and Adam's moments in float32, without activations; None
            without ``parameters``.
    """

    plan: PrivacyPlan
    answers: tuple[Answer, ...]
    signal_to_noise: float | None
    most_signal: float | None
    examples: float
    seconds: float | None
    state_bytes: int | None

    @property
    def effective_noise_multiplier(self) -> float:
        """Return sigma / q (Li et al. 2022, section 3.1.1).

        The noise on the mean gradient is proportional to it.
        """
        return self.plan.noise_multiplier / self.plan.sample_rate

    @property
    def epochs(self) -> float:
        """Return the expected number of times that an example is used."""
        return self.examples / self.plan.drawn_from


def forecast(
    plan: PrivacyPlan,
    accountants: Sequence[str] | None = None,
    *,
    gradient_norm: float | None = None,
    parameters: int | None = None,
    throughput: float | None = None,
) -> Forecast:
    """Forecast what ``plan`` will cost.

    Args:
        accountants: which to ask; default the plan's own.
        gradient_norm: L2 norm of the mean clipped gradient, at most the clipping norm, > 0.
        parameters: number of trainable parameters, >= 1.
        throughput: examples per second, > 0.

    Raises: InvalidArgumentError naming the argument.
    """
    if parameters is not None:
        parameters = _validate.integer("parameters", parameters, 1)
    ratio = None if gradient_norm is None else _signal_to_noise(plan, gradient_norm, parameters)
    examples = plan.mechanism.forwarded(plan)
    if plan.selection is not None:
        examples += plan.selection.iterations * plan.selection.sample_rate * plan.num_examples
    return Forecast(
        plan=plan,
        answers=compare(plan.events(), plan.delta, accountants or (plan.accountant,)),
        signal_to_noise=ratio,
        most_signal=None
        if parameters is None or not plan.mechanism.noises_gradients_alone
        else most_signal(plan, parameters),
        examples=examples,
        seconds=None
        if throughput is None
        else examples / _validate.positive("throughput", throughput),
        state_bytes=None if parameters is None else _BYTES_PER_PARAMETER * parameters,
    )


def _signal_to_noise(plan: PrivacyPlan, gradient_norm: float, parameters: int | None) -> float:
    signal = _validate.positive("gradient_norm", gradient_norm)
    if signal > plan.clipping_norm:
        raise _validate.invalid(
            "gradient_norm",
            gradient_norm,
            f"to be at most the clipping norm {plan.clipping_norm:g}",
            "It is the norm of a mean of clipped gradients.",
        )
    if parameters is None:
        raise _validate.invalid(
            "parameters", None, "to be given with `gradient_norm`", "Noise grows with it."
        )
    # The noise on the mean is N(0, (noise_std / B)^2) in each of p coordinates, so its norm is
    # about that standard deviation times sqrt(p).
    return signal * plan.expected_batch_size / (plan.noise_std * math.sqrt(parameters))


def most_signal(plan: PrivacyPlan, parameters: int) -> float:
    """Return the largest possible ratio of all steps' gradients to all steps' noise, in norms.

    A step's mean gradient has norm C at most, so T of them add up to T C. Their noise has a
    standard deviation of noise_std / B a coordinate and step, so its sum has the norm sqrt(T p)
    noise_std / B.
    """
    of_noise = plan.noise_std * math.sqrt(plan.steps * parameters) / plan.expected_batch_size
    return plan.steps * plan.clipping_norm / of_noise
