"""``FrostConfig``: DP-FROST as a PEFT configuration.

What trains is chosen from the private rows. ``DPTrainer`` makes the choice, and its ledger counts
what the choice costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import nn

from hf_dp._validate import in_unit_interval, integer, invalid, non_negative, one_of
from hf_dp.errors import ConfigError
from hf_dp.plans.selection import MAGNITUDES, SelectionPlan
from hf_dp.tuners.frost.partition import GRANULARITIES, Partition, partitions
from hf_dp.tuners.frost.select import refuse_too_small
from hf_dp.tuners.selection import SelectionConfig, candidates, plan_for, register


@register
@dataclass
class FrostConfig(SelectionConfig):
    """DP-FROST: the weight matrices with the largest noisy gradient magnitudes train.

    All other matrices are frozen. A new classification head and ``modules_to_save`` always train
    and are not counted. The defaults are the paper's (section 5, with the largest of its four
    ratios).

    Args:
        unfreeze_ratio: gamma in (0, 1], which share of the candidates' numbers may train.
        selection_budget_ratio: 1 - r_eps in (0, 1), which share of target_epsilon training leaves
            to the selection.
        selection_iterations: T; 1 is the single-shot variant.
        selection_sample_rate: q_ps.
        gap_coefficient: nu.
        magnitude: ``mg``, ``mgn`` or ``mgna``.
        norm_order: alpha, 1 or 2.
        selection_clipping_norm: c, for the gradient's norm of order ``norm_order``; by default the
            run's ``per_example_max_grad_norm``.
        selection_noise_multiplier: sigma_ps. Set it if and only if the run sets
            ``noise_multiplier``.
        num_selections: K. Above 1, what trains is chosen again every 1/K of the steps, and a whole
            checkpoint is saved.
        granularity: as in :func:`hf_dp.tuners.frost.partition.partitions`.
        partitions: as ``own`` there.
        made: the selections so far, filled in by the trainer.

    Raises: InvalidArgumentError naming the argument.
    """

    unfreeze_ratio: float = field(default=0.25)
    selection_budget_ratio: float = field(default=0.1)
    selection_iterations: int = field(default=5)
    selection_sample_rate: float = field(default=0.02)
    gap_coefficient: float = field(default=5.0)
    magnitude: str = field(default="mgna")
    norm_order: int = field(default=1)
    selection_clipping_norm: float | None = field(default=None)
    selection_noise_multiplier: float | None = field(default=None)
    num_selections: int = field(default=1)
    granularity: str = field(default="weight")
    partitions: dict[str, list[str]] | None = field(default=None)
    made: list[dict[str, Any]] = field(default_factory=list)

    method: ClassVar[str] = "frost"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("unfreeze_ratio", self.unfreeze_ratio, one=True)
        in_unit_interval("selection_budget_ratio", self.selection_budget_ratio)
        integer("selection_iterations", self.selection_iterations, 1)
        integer("num_selections", self.num_selections, 1)
        non_negative("gap_coefficient", self.gap_coefficient)
        one_of("magnitude", self.magnitude, MAGNITUDES)
        one_of("granularity", self.granularity, GRANULARITIES)
        if self.partitions is not None:
            if not isinstance(self.partitions, Mapping):
                raise invalid(
                    "partitions",
                    self.partitions,
                    "to be {name: [parameter names]}",
                    "See `hf-dp partitions MODEL`.",
                )
            self.partitions = {name: list(patterns) for name, patterns in self.partitions.items()}

    def choose(self, model: nn.Module) -> list[str]:
        raise ConfigError(
            "FrostConfig holds no selection yet. The selection is made from the private rows and "
            "costs privacy: pass the configuration to DPTrainer(model, args, train_dataset=..., "
            "peft_config=FrostConfig(...)) and call train(). To load what such a run trained, call "
            "PeftModel.from_pretrained(model, folder)."
        )

    def selection_plan(self, clipping_norm: float) -> SelectionPlan:
        """Return what the selection will release.

        Args:
            clipping_norm: the run's; ``selection_clipping_norm`` takes its place where it is set.
        """
        iterations = self.selection_iterations * self.num_selections
        return plan_for(self, clipping_norm, self.magnitude, iterations, self.norm_order)

    def candidate_partitions(self, model: nn.Module) -> list[Partition]:
        """Return the partitions that may be selected.

        Raises: InvalidArgumentError when a name in ``partitions`` matches no parameter, when
            nothing may be selected, or when even the smallest partition exceeds
            ``unfreeze_ratio``.
        """
        found = partitions(model, self.granularity, self.partitions, set(candidates(model, self)))
        if not found:
            raise invalid(
                "peft_config",
                "FrostConfig",
                "to find parameters that it may select",
                "Everything outside the head is frozen. Unfreeze some parameters first.",
            )
        refuse_too_small(found, self.unfreeze_ratio)
        return found


def chosen_from(selection: Any, parts: Sequence[Partition]) -> dict[str, Any]:
    """Return which partitions and parameters were chosen, and of how many."""
    by_name: Mapping[str, Partition] = {part.name: part for part in parts}
    chosen = [by_name[name] for name in selection.names]
    return {
        "partitions": [part.name for part in chosen],
        "parameters": [name for part in chosen for name in part.parameters],
        "candidates": len(parts),
    }


def made_from(selection: Any, plan: SelectionPlan, parts: Sequence[Partition]) -> dict[str, Any]:
    """Return a selection as ``selection.json`` keeps it.

    It holds names, noisy magnitudes and sensitivities, and nothing that was not noised.
    """
    return {
        **chosen_from(selection, parts),
        "noisy_magnitudes": [dict(row) for row in selection.observed],
        "sensitivities": list(selection.sensitivities),
        "plan": asdict(plan),
        "events": [plan.event(len(selection.observed)).to_dict()],
    }
