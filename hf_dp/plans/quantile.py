"""An adaptive clipping norm: a quantile of the norms, by noised counts (Andrew et al. 2021,
arXiv 1905.03871, algorithm 1).

**The count.** Each example that is drawn adds a number h to a second sum over the draw, which is
noised as a part of the step's event: in the paper 1/2 where the norm n is at most C_t, else -1/2.
Here h = (1 - n / C_t) / (2 w), clipped to [-1/2, 1/2], with w = 1/4, since a jump would break the
bound. When one example leaves, the norms of R *others* may change by their relative error. If these
are equal rows whose norm is next to C_t, the paper's count could move by R; this one moves by no
more than :func:`hf_dp.plans.rounding.count_margin` adds.

**The event.** An example moves the count by at most 1/2, so noise of standard deviation sigma_b has
the multiplier 2 sigma_b. Together with the gradients: 1 / sigma_eff^2 = 1 / sigma^2 +
1 / (2 sigma_b)^2 (section 2.3; :class:`hf_dp.accounting.event.NoisedSum`).

**The norm.** share = 1/2 + noised sum / B, with B the expected batch, estimates the share of
examples whose norms are at most C_t; and C_{t+1} = C_t exp(-eta (share - gamma)). So the norm is a
function of public numbers and of what was released before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_dp import _validate
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.draws import Schedule
from hf_dp.plans.mechanism import Words
from hf_dp.plans.rounding import COUNT_MOVES, RAMP, count_margin, regrouping_share

if TYPE_CHECKING:
    from torch import Tensor

COUNT = "count"  # the part of a step's event
LOG = "clipping_norm"  # what logs call the norm of a step

# The arguments.
NORM_QUANTILE, RATE = "clipping_quantile", "clipping_quantile_learning_rate"
RATIO = "clipping_quantile_budget_ratio"
LEARNING_RATE, BUDGET_RATIO = 0.2, 0.01  # the former is the paper's

# How far the norm may go from where it starts, as factors (:mod:`hf_dp.plans.rounding`). From the
# smallest start on, it stays far above what float32 can tell from 0.
LOWEST, HIGHEST, SMALLEST_START = 1 / 30, 1000.0, 1e-5
_MOST = 0.5  # that one example adds


def check_share(name: str, value: object) -> float:
    """Return a quantile or the counts' budget, in (0, 1). Raises: InvalidArgumentError."""
    why = "The quantile 0.5 is the median of the gradients' norms; 0.01 of the budget is enough."
    return _validate.in_unit_interval(name, value, why)


@dataclass(frozen=True)
class ClippingQuantile:
    """Noised counts of examples within the clipping norm, and the norms that follow.

    Args:
        quantile: gamma, in (0, 1): the share of examples that shall not be clipped.
        learning_rate: eta > 0, of the logarithm of the norm.
        budget_ratio: in (0, 1): the counts' part of 1 / noise_multiplier^2, gradients included.

    Raises: InvalidArgumentError.
    """

    quantile: float
    learning_rate: float = LEARNING_RATE
    budget_ratio: float = BUDGET_RATIO

    def __post_init__(self) -> None:
        check_share(NORM_QUANTILE, self.quantile)
        check_share(RATIO, self.budget_ratio)
        _validate.positive(RATE, self.learning_rate, "0.2 is the paper's.")

    def check(self, clipping: str, clipping_norm: float) -> None:
        """Raise InvalidArgumentError for a way to clip, or a first norm, that it does not go with;
        UnsupportedArgumentError for one that is not implemented."""
        why = "A moving norm of each layer is not implemented."
        error: type[InvalidArgumentError] = UnsupportedArgumentError
        if clipping == "automatic":
            why, error = "It scales all gradients, so no share is clipped.", InvalidArgumentError
        if clipping != "flat":
            expected = f"to be 'flat' with `{NORM_QUANTILE}`"
            raise _validate.invalid("clipping", clipping, expected, f"{why} Use 'flat'.", error)
        if clipping_norm < SMALLEST_START:
            expected = f"to be at least {SMALLEST_START:g} with `{NORM_QUANTILE}`"
            why = "It may fall to a thirtieth of that. Raise it, or scale the loss up."
            raise _validate.invalid("per_example_max_grad_norm", clipping_norm, expected, why)

    @property
    def sensitivities(self) -> dict[str, float]:
        """How far one example moves the count, with what rounding adds."""
        return {COUNT: _MOST * (1 + count_margin())}

    def part(self, noise_multiplier: float) -> Mapping[str, float]:
        """Return the noise multiplier of the count beside this one of the gradients."""
        return {COUNT: noise_multiplier * math.sqrt((1 - self.budget_ratio) / self.budget_ratio)}

    # -- what is counted, and what follows from it --

    def counted(
        self, sizes: Tensor, used: Tensor, norm: float, regrouped: int, schedule: Schedule
    ) -> Tensor:
        """Return what examples add to the count, (), float64. It is not private.

        Each adds a multiple of a power of two, and all N of them less than 2^53 such units, so that
        the sum is exact in whatever order and in however many parts it is formed.

        Args: sizes, used: (b,), norms, and which examples are in the sum of gradients. norm: C_t.
            regrouped: as :attr:`hf_dp.clipping.ClippingEngine.regrouped`.
        """
        unit = math.ldexp(1.0, schedule.num_examples.bit_length() - 53)
        h = ((1 - sizes.double() / norm) / (2 * RAMP)).clamp(-_MOST, _MOST)
        h = (h * regrouping_share(regrouped, COUNT_MOVES)).where(used, h.new_zeros(()))
        return (h / unit).trunc().mul(unit).sum()

    def moved(self, ratio: float, noised: float, schedule: Schedule) -> float:
        """Return the next norm, relative to the first one. Args: ratio: the present one. noised:
        the released sum of h."""
        share = 0.5 + noised / schedule.expected_batch_size
        step = min(-self.learning_rate * (share - self.quantile), 100.0)  # exp would overflow
        return min(max(ratio * math.exp(step), LOWEST), HIGHEST)

    # -- how it is spoken of --

    def outline(self, schedule: Schedule, noise_multiplier: float, joint: float) -> str:
        """Return its numbers, on one line. Args: joint: that of all of a step's sums, as of one."""
        counts = self.part(noise_multiplier)[COUNT]
        std = counts * self.sensitivities[COUNT] / schedule.expected_batch_size
        return (
            f"clipping norm: moves towards the norm that a share of {self.quantile:g} of the "
            f"gradients has at most, by noised counts with noise multiplier {counts:.6g}, standard "
            f"deviation of a step's share {std:.4g}; all sums of a step, as one with noise "
            f"multiplier {joint:.6g}"
        )

    def words(
        self, others: Words, schedule: Schedule, noise_multiplier: float, joint: float
    ) -> Words:
        """Return how a statement speaks of it. Args: others: how it does of the other sums."""
        counts = self.part(noise_multiplier)[COUNT]
        said = (
            "The clipping norm is that of the first step. It then moves towards the norm that a "
            f"share of {self.quantile!r} of the gradients has at most, within {1 / LOWEST:g} times "
            f"less and {HIGHEST:g} times more, with the learning rate {self.learning_rate!r}. To "
            f"this end each {schedule.one} that is drawn counts 0.5 where its gradient's norm is "
            "far below the step's, -0.5 where it is far above, and a number between them "
            f"elsewhere; Gaussian noise with standard deviation {counts:.6g} x 0.5 (and "
            f"{count_margin():.1e} of it more, for the rounding of norms) is added once to the sum "
            "of the counts. Gradients and their noise are in units of the step's norm, which is a "
            f"function of the noised counts before and is logged as {LOG}. All sums of a step are "
            f"accounted together, as one with noise multiplier {joint:.6g}"
        )
        also = others.also_covered or "and whatever is computed from them"
        return replace(
            others,
            name=f"{others.name} and a noised count",
            mechanism=f"{others.mechanism}. {said}",
            proof=f"{others.proof}, each with a bounded count and noise on it",
            also_covered=f"the clipping norms in its logs, {also}",
        )
