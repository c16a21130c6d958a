"""What a private selection releases before training, to choose what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from hf_dp import _validate
from hf_dp.accounting import (
    SELECTION,
    SUM,
    Event,
    PoissonSampledGaussian,
    calibrate_noise_multiplier,
)
from hf_dp.errors import CalibrationError, ConfigError
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.samplers import PoissonSampler

# What a release holds, and so what bounds one example's part in it: magnitudes of partitions
# (DP-FROST, definition 9) or the whole summed gradient (PARAM).
MAGNITUDES = {
    "mg": "as they are",
    "mgn": "normalized by partition",
    "mgna": "absolute and normalized by partition",
}
QUANTITIES = (*MAGNITUDES, "gradient")


@dataclass(frozen=True)
class SelectionPlan:
    """Noisy sums over Poisson draws, from which is chosen what trains (DP-FROST, sections 4.4 to
    4.6).

    Args:
        quantity: what is released: ``mg``, ``mgn``, ``mgna`` (magnitudes of partitions) or
            ``gradient``.
        sample_rate: q_ps, with which each example joins a draw.
        iterations: the most releases: T for each selection.
        clipping_norm: c, of one example's gradient in the norm of order ``norm_order``.
        norm_order: a, 1 or 2.
        noise_multiplier: sigma_ps, standard deviation of the noise / sensitivity; None until a
            target decides it.
        budget_ratio: 1 - r_eps, how much of the target the training leaves to the selection; None
            with given noise.
    """

    quantity: str
    sample_rate: float
    iterations: int
    clipping_norm: float
    norm_order: int
    noise_multiplier: float | None
    budget_ratio: float | None

    def __post_init__(self) -> None:
        _validate.one_of("quantity", self.quantity, QUANTITIES)
        _validate.in_unit_interval("selection_sample_rate", self.sample_rate, one=True)
        _validate.integer("selection_iterations", self.iterations, 1)
        _validate.positive("selection_clipping_norm", self.clipping_norm)
        if self.norm_order not in (1, 2):
            raise _validate.invalid(
                "norm_order", self.norm_order, "to be 1 or 2", "1 is the paper's choice."
            )
        if self.noise_multiplier is not None:
            why = "A selection without noise is not private."
            _validate.positive("selection_noise_multiplier", self.noise_multiplier, why)
        if self.budget_ratio is not None:
            _validate.in_unit_interval("selection_budget_ratio", self.budget_ratio)

    def sampler(self, num_examples: int, iterations: int | None = None) -> PoissonSampler:
        """Return a sampler of ``iterations`` (default: all) of its draws."""
        return PoissonSampler(num_examples, self.sample_rate, iterations or self.iterations)

    def event(self, iterations: int | None = None) -> PoissonSampledGaussian:
        """Return what the accountant is told about ``iterations`` (default: all) releases."""
        if self.noise_multiplier is None:
            raise ConfigError(
                "This SelectionPlan has no noise multiplier yet; PrivacyPlan.solve decides it."
            )
        steps = self.iterations if iterations is None else iterations
        return PoissonSampledGaussian(self.noise_multiplier, self.sample_rate, steps)

    def release(self, sensitivity: float) -> PlannedRelease:
        """Return one release of a noisy sum. Args: sensitivity: how far one example can move it."""
        return PlannedRelease(self.event(1), SELECTION, {SUM: sensitivity})

    def training_share(self) -> float:
        """Return how much of a target epsilon the training may cost, before the selection is paid
        from what is left (DP-FROST, section 4.6, algorithm 3)."""
        if self.noise_multiplier is not None or self.budget_ratio is None:
            given, expected = self.noise_multiplier, "to be None with a target, which decides it"
            other = "Set `selection_budget_ratio`, or give `noise_multiplier`, not the target."
            raise _validate.invalid("selection_noise_multiplier", given, expected, other)
        return 1 - self.budget_ratio

    def calibrated(
        self, target_epsilon: float, delta: float, accountant: str, others: Sequence[Event]
    ) -> Self:
        """Return it with the smallest noise with which everything together, the ``others``
        included, meets the target (algorithm 3). Epsilons do not add up, so it gets more than its
        ratio."""
        try:
            sigma = calibrate_noise_multiplier(
                target_epsilon, delta, self.sample_rate, self.iterations, accountant, others
            )
        except CalibrationError as problem:
            raise CalibrationError(
                f"The selection does not fit beside the training: {problem} Raise "
                f"`selection_budget_ratio` (now {self.budget_ratio:g}), or lower "
                "`selection_sample_rate` or `selection_iterations`."
            ) from problem
        return replace(self, noise_multiplier=sigma)

    def in_words(self, one: str = "row") -> str:
        """Return how what trains is chosen, and what bounds one example's part in it (DP-FROST,
        lemma 3).

        Args: one: what is drawn, in a word.
        """
        of_each, drawn = "per-example gradients", "rows"
        if one != "row":
            of_each, drawn = f"the gradients of each {one}", f"each {one}"
        what = f"the sum of {of_each} clipped to an L2 norm of at most"
        if self.quantity in MAGNITUDES:
            what = (
                f"one magnitude for each partition of the model, of {of_each} "
                f"({MAGNITUDES[self.quantity]}) clipped in the {self.norm_order}-norm to"
            )
        return (
            'What trains was chosen from noisy releases (of purpose "selection" in the ledger), '
            f"each on its own Poisson draw of {drawn} with probability {self.sample_rate!r}: "
            f"{what} {self.clipping_norm!r}; Gaussian noise with standard deviation "
            f"{self.noise_multiplier!r} x sensitivity"
        )
