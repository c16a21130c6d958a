"""What a private selection will release before training: part of the
:class:`hf_dp.plan.PrivacyPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_dp import _validate
from hf_dp.accounting.events import PoissonSampledGaussian
from hf_dp.errors import ConfigError
from hf_dp.sampling import PoissonSampler

# What a release holds, and so what bounds one example's part in it: magnitudes of partitions
# (DP-FROST, definition 9) or the whole summed gradient (PARAM).
MAGNITUDES = ("mg", "mgn", "mgna")
RELEASES = (*MAGNITUDES, "gradient")


@dataclass(frozen=True)
class SelectionPlan:
    """Noisy sums over Poisson draws, from which is chosen what trains (DP-FROST, sections 4.4 to
    4.6).

    Args:
        release: ``mg``, ``mgn``, ``mgna`` (magnitudes of partitions) or ``gradient``.
        sample_rate: q_ps, with which each example joins a draw.
        iterations: the most releases: T for each selection.
        clipping_norm: c, of one example's gradient in the norm of order ``norm_order``.
        norm_order: a, 1 or 2.
        noise_multiplier: sigma_ps, standard deviation of the noise / sensitivity; None until a
            target decides it.
        budget_ratio: 1 - r_eps, how much of the target the training leaves to the selection; None
            with given noise.
    """

    release: str
    sample_rate: float
    iterations: int
    clipping_norm: float
    norm_order: int
    noise_multiplier: float | None
    budget_ratio: float | None

    def __post_init__(self) -> None:
        _validate.one_of("release", self.release, RELEASES)
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
        """A sampler of ``iterations`` (default: all) of its draws."""
        return PoissonSampler(
            num_examples, self.sample_rate, self.iterations if iterations is None else iterations
        )

    def event(self, iterations: int | None = None) -> PoissonSampledGaussian:
        """What the accountant is told about ``iterations`` (default: all) releases."""
        if self.noise_multiplier is None:
            raise ConfigError(
                "This SelectionPlan has no noise multiplier yet; PrivacyPlan.create decides it."
            )
        return PoissonSampledGaussian(
            self.noise_multiplier,
            self.sample_rate,
            self.iterations if iterations is None else iterations,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SelectionPlan:
        """Read back what :meth:`to_dict` wrote. Raises: ConfigError, InvalidArgumentError."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise ConfigError(
                f"The selection in the plan lacks or adds fields (expected {sorted(names)}): it "
                "was edited."
            )
        plan = cls(**values)
        plan.event()
        return plan
