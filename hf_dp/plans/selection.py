"""What a private selection releases before training: part of the
:class:`hf_dp.plans.privacy.PrivacyPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting import SELECTION, SUM, Event, PoissonSampledGaussian
from hf_dp.accounting.budget import compute_sigma
from hf_dp.accounting.calibration import MakeEvent
from hf_dp.errors import ConfigError
from hf_dp.plans.draws import PoissonSampler
from hf_dp.plans.release import PlannedRelease

# What a release holds, and so what bounds one example's part in it: magnitudes of partitions
# (DP-FROST, definition 9) or the whole summed gradient (PARAM).
MAGNITUDES = ("mg", "mgn", "mgna")
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
            _validate.positive(
                "selection_noise_multiplier",
                self.noise_multiplier,
                "A selection without noise is not private.",
            )
        if self.budget_ratio is not None:
            _validate.in_unit_interval("selection_budget_ratio", self.budget_ratio)

    def sampler(self, num_examples: int, iterations: int | None = None) -> PoissonSampler:
        """Return a sampler of ``iterations`` (default: all) of its draws."""
        return PoissonSampler(
            num_examples, self.sample_rate, self.iterations if iterations is None else iterations
        )

    def event(self, iterations: int | None = None) -> PoissonSampledGaussian:
        """Return what the accountant is told about ``iterations`` (default: all) releases."""
        if self.noise_multiplier is None:
            raise ConfigError(
                "This SelectionPlan has no noise multiplier yet; PrivacyPlan.create decides it."
            )
        return PoissonSampledGaussian(
            self.noise_multiplier,
            self.sample_rate,
            self.iterations if iterations is None else iterations,
        )

    def release(self, sensitivity: float) -> PlannedRelease:
        """Return one release of a noisy sum. Args: sensitivity: how far one example can move it."""
        return PlannedRelease(self.event(1), SELECTION, {SUM: sensitivity})

    def in_words(self, one: str = "row") -> str:
        """Return how what trains is chosen, and what bounds one example's part in it (DP-FROST,
        lemma 3). Args: one: what is drawn, in a word."""
        of_each, drawn = "per-example gradients", "rows"
        if one != "row":
            of_each, drawn = f"the gradients of each {one}", f"each {one}"
        if self.quantity in MAGNITUDES:
            how = {
                "mg": "as they are",
                "mgn": "normalized by partition",
                "mgna": "absolute and normalized by partition",
            }
            what = (
                f"one magnitude for each partition of the model, of {of_each} "
                f"({how[self.quantity]}) clipped in the {self.norm_order}-norm to"
            )
        else:
            what = f"the sum of {of_each} clipped to an L2 norm of at most"
        return (
            'What trains was chosen from noisy releases (of purpose "selection" in the ledger), '
            f"each on its own Poisson draw of {drawn} with probability {self.sample_rate!r}: "
            f"{what} {self.clipping_norm!r}; Gaussian noise with standard deviation "
            f"{self.noise_multiplier!r} x sensitivity"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SelectionPlan:
        """Read back what :meth:`to_dict` wrote. Raises: ConfigError, InvalidArgumentError."""
        plan = cls(**checked_fields(cls, values, ConfigError))
        plan.event()
        return plan


def calibrated_together(
    plan: SelectionPlan,
    target_epsilon: float,
    delta: float,
    *,
    sample_rate: float,
    steps: int,
    accountant: str,
    prior_events: Sequence[Event],
    event: MakeEvent,
) -> tuple[float, SelectionPlan]:
    """Return the noise multiplier of training, and the plan with that of the selection.

    Args: as :func:`hf_dp.accounting.budget.compute_sigma`.

    Raises: InvalidArgumentError for a selection that has noise beside a target; CalibrationError.
    """
    if plan.noise_multiplier is not None or plan.budget_ratio is None:
        raise _validate.invalid(
            "selection_noise_multiplier",
            plan.noise_multiplier,
            "to be None with a target_epsilon, which decides it",
            "Leave it out and set `selection_budget_ratio`, or give `noise_multiplier` instead of "
            "the target.",
        )
    training, selection = compute_sigma(
        target_epsilon,
        delta,
        sample_rate=sample_rate,
        steps=steps,
        selection_sample_rate=plan.sample_rate,
        selection_iterations=plan.iterations,
        selection_budget_ratio=plan.budget_ratio,
        accountant=accountant,
        prior_events=prior_events,
        event=event,
    )
    return training, replace(plan, noise_multiplier=selection)
