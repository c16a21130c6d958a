"""PVAL and PARAM: single entries of a weight train while the others stay as they are.

Both are baselines of DP-FROST (section 5). They are not adapters: entries train in place, by a mask
for each weight, and a whole checkpoint is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.partial_gradients import MaskedEngine
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.clock import SELECTION
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.base import (
    ConfiguredTuner,
    Run,
    describe_training,
    only_trains,
    samples_of,
    serves,
)
from hf_dp.tuners.selection import InPlace, PrivateConfig, RatioConfig, register

# Optimizers that leave each entry where it gets no gradients.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_MASKS = "selection_masks.safetensors"


@dataclass
class PvalConfig(RatioConfig):
    """PVAL (Luo et al. 2021): the single parameters with the largest absolute value, at most
    ``unfreeze_ratio`` of them; a new head and ``modules_to_save`` train in full.

    It looks at no data, so it costs no privacy.
    """

    method: ClassVar[str] = "pval"


@dataclass
class ParamConfig(PrivateConfig):
    """PARAM: the single parameters with the largest noisy gradient, from one Poisson sample.

    ``selection_clipping_norm`` is that of the gradient's L2 norm.
    """

    method: ClassVar[str] = "param"


register(PvalConfig, InPlace)
register(ParamConfig, InPlace)


@serves(PvalConfig, ParamConfig)
class Masks(ConfiguredTuner[PvalConfig | ParamConfig]):
    """Gives neither gradient nor noise to entries that the mask does not keep."""

    clips_in_its_own_way = True
    keeps_all_noise = False
    needs_whole_weights = "PARAM and PVAL apply masks to whole weight matrices at every step."
    masks: Mapping[str, Tensor] = {}

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        if not isinstance(self.config, ParamConfig):
            return None
        return self.config.selection_plan(clipping_norm, "gradient", iterations=1, norm_order=2)

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        self.config.candidates(run.model)  # of which there are some

    def check_arguments(self, args: TrainingArguments) -> None:
        if args.weight_decay:
            raise invalid(
                "weight_decay",
                args.weight_decay,
                "to be 0 with a mask of parameters",
                "It would shrink the parameters that must not train.",
            )
        if args.optim not in _ELEMENTWISE or not args.adam_epsilon > 0:
            raise invalid(
                "optim",
                getattr(args.optim, "value", args.optim),
                f"to be one of {sorted(_ELEMENTWISE)} (with adam_epsilon above 0) with a mask of "
                "parameters",
                "Other optimizers may move entries that received no gradient.",
            )

    def decide(
        self, run: Run, checkpoint: str | None, earlier: PvalConfig | ParamConfig | None
    ) -> None:
        candidates = self.config.candidates(run.model)
        self.only_chosen(run.model, candidates.values())
        if checkpoint is not None:
            self.masks = unpacked(safetensors.torch.load_file(Path(checkpoint, _MASKS)), run.model)
        elif isinstance(self.config, ParamConfig):
            with run.clock.part(SELECTION):
                self.masks = select_entries(run, self.config)
        else:
            self.masks = largest(candidates, self.config.unfreeze_ratio)
        if not self.is_private:
            for name, mask in self.masks.items():
                parameter = run.model.get_parameter(name)
                parameter.register_hook(partial(Tensor.masked_fill, mask=~mask, value=0))

    def engine(self, run: PrivateRun) -> MaskedEngine:
        plan = run.plan
        return MaskedEngine(run.model, self.masks, plan.clips_to, plan.clipping)

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remove the noise on entries that do not train."""
        for name, mask in self.masks.items():
            noised[name].mul_(mask)
        return noised

    def save(self, folder: str) -> None:
        if not self.undecided:
            super().save(folder)
            safetensors.torch.save_file(packed(self.masks), Path(folder, _MASKS))

    def describe(self, model: nn.Module) -> str:
        if self.undecided:
            return describe_training(model)
        named = model.named_parameters()
        whole = [p for name, p in named if p.requires_grad and name not in self.masks]
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        total = sum(mask.numel() for mask in self.masks.values())
        by_value = isinstance(self.config, PvalConfig)
        how = "by absolute value" if by_value else "privately, by noisy gradient"
        return (
            f"{kept:,} of {total:,} single parameters, chosen {how} "
            f"({self.config.method.upper()}), and {sum(p.numel() for p in whole):,} of the head "
            "and modules_to_save"
        )


def select_entries(run: Run, config: ParamConfig) -> dict[str, Tensor]:
    """Return masks of the single parameters with the largest noisy gradient, from one sample; in a
    run without privacy of the gradient itself."""
    with only_trains(run.model, set(config.candidates(run.model))):
        samples = samples_of(run, config, iterations=1)
        with ClippingEngine(run.model, samples.clips_to) as engine:
            samples.feed(engine)
            sums = engine.collect()
    noised = samples.release(sums, samples.clipping_norm * (1 + samples.margin))
    return largest(noised, config.unfreeze_ratio)


def largest(values: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return masks of the ``floor(ratio n)`` entries, of all n, with the largest absolute value."""
    flat = torch.cat([value.detach().abs().flatten().float() for value in values.values()])
    count = math.floor(ratio * len(flat))
    if count == 0:
        expected = f"to leave room for one of {len(flat):,} parameters"
        raise invalid("unfreeze_ratio", ratio, expected, "Raise it.")
    kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    kept[flat.topk(count, sorted=False).indices] = True
    parts = kept.split([value.numel() for value in values.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }


def packed(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks as bits, for a file; :func:`unpacked` reads them back."""
    return {
        name: torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))
        for name, mask in masks.items()
    }


def unpacked(bits: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Read back what :func:`packed` wrote for this model."""
    names = dict(model.named_parameters())
    masks = {}
    for name, of_mask in bits.items():
        if name not in names or len(of_mask) != -(-names[name].numel() // 8):
            expected = "to belong to a parameter of this model"
            advice = "Resume with the model that the run was started with."
            raise invalid("masks", name, expected, advice)
        values = np.unpackbits(of_mask.numpy(), count=names[name].numel()).astype(bool)
        masks[name] = torch.from_numpy(values).view(names[name].shape).to(names[name].device)
    return masks
