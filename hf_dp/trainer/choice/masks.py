"""PVAL and PARAM in a run: a mask for each weight; trains in place, saves a whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.clipping.masked import MaskedEngine
from hf_dp.plan import PrivacyPlan
from hf_dp.selection_plan import SelectionPlan
from hf_dp.trainer.choice.base import (
    Choice,
    freeze_others,
    refuse_made_before,
    refuse_options,
    refuse_other_options,
)
from hf_dp.trainer.loading import describe_training
from hf_dp.trainer.private_selection import select_entries
from hf_dp.tuners.masks import MaskConfig, ParamConfig, PvalConfig, packed, unpacked

# Optimizers that move each entry by its own gradients alone, and not at all without one.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_MASKS = "selection_masks.safetensors"


class Masks(Choice):
    """Entries that the mask does not keep get neither gradient nor noise."""

    def __init__(self, config: MaskConfig):
        self.config = config
        self.masks: Mapping[str, Tensor] | None = None

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        return (
            self.config.selection_plan(clipping_norm)
            if isinstance(self.config, ParamConfig)
            else None
        )

    def prepare(self, trainer: Any) -> None:
        refuse_made_before(trainer, self.config)
        refuse_options(trainer.args, self.config)
        if trainer.args.weight_decay:
            raise invalid(
                "weight_decay",
                trainer.args.weight_decay,
                "to be 0 with a mask of parameters",
                "It would shrink those that are not to train.",
            )
        if trainer.args.optim not in _ELEMENTWISE or not trainer.args.adam_epsilon > 0:
            raise invalid(
                "optim",
                getattr(trainer.args.optim, "value", trainer.args.optim),
                f"to be one of {sorted(_ELEMENTWISE)} (with adam_epsilon above 0) with a mask of "
                "parameters",
                "Of the others it is not known that an entry without a gradient stays where it is.",
            )
        if not self.config.candidate_names(trainer.model):
            raise invalid(
                "peft_config", type(self.config).__name__, "to have something to choose from"
            )

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        if self.masks is not None:
            return
        self.prepare(trainer)
        freeze_others(trainer.model, self.config)
        if checkpoint is not None:
            refuse_other_options(type(self.config).from_pretrained(checkpoint), self.config)
            self.masks = unpacked(
                safetensors.torch.load_file(Path(checkpoint, _MASKS)), trainer.model
            )
        elif isinstance(self.config, PvalConfig):
            self.masks = self.config.masks(trainer.model)
        elif isinstance(self.config, ParamConfig):
            self.masks = select_entries(trainer, self.config)

    def engine(self, model: nn.Module, plan: PrivacyPlan) -> MaskedEngine:
        return MaskedEngine(model, self.masks or {}, plan.clipping_norm, plan.clipping)

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the noise on entries that do not train."""
        for name, mask in (self.masks or {}).items():
            noised[name].mul_(mask)
        return noised

    def save(self, folder: str) -> None:
        if self.masks is not None:
            self.config.write_details(folder)
            safetensors.torch.save_file(packed(self.masks), Path(folder, _MASKS))

    def describe(self, model: nn.Module) -> str:
        if self.masks is None:
            return describe_training(model)
        whole = [
            p for name, p in model.named_parameters() if p.requires_grad and name not in self.masks
        ]
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        total = sum(mask.numel() for mask in self.masks.values())
        how = (
            "by absolute value"
            if isinstance(self.config, PvalConfig)
            else "privately, by noisy gradient"
        )
        return (
            f"{kept:,} of {total:,} single parameters, chosen {how} "
            f"({self.config.method.upper()}), and {sum(p.numel() for p in whole):,} of the head "
            "and modules_to_save"
        )
