"""PVAL and PARAM in a run: a mask for each weight, and training in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.masked import MaskedEngine
from hf_dp.plans.rounding import clipping_share, rounding_margin
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.clock import SELECTION
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import describe_training
from hf_dp.tuners.base import (
    Tuner,
    freeze_others,
    only_trains,
    refuse_made_before,
    refuse_options,
    refuse_other_options,
    refuse_several_processes,
    serves,
)
from hf_dp.tuners.single_entries.config import (
    MaskConfig,
    ParamConfig,
    PvalConfig,
    largest,
    packed,
    unpacked,
)
from hf_dp.tuners.without_privacy import PlainRun

# Optimizers that move each entry by its own gradients alone, and leave it where it gets none.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_MASKS = "selection_masks.safetensors"


Run = TypeVar("Run", PrivateRun, PlainRun)


@serves(PvalConfig, ParamConfig)
class Masks(Tuner):
    """Gives neither gradient nor noise to entries that the mask does not keep."""

    clips_in_its_own_way = True
    needs_whole_weights = "PARAM and PVAL apply masks to whole weight matrices at every step."

    def __init__(self, config: MaskConfig, is_private: bool = True):
        self.config = config
        self.masks: Mapping[str, Tensor] | None = None

    @property
    def undecided(self) -> bool:
        return self.masks is None

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        return (
            self.config.selection_plan(clipping_norm)
            if isinstance(self.config, ParamConfig)
            else None
        )

    def prepare(self, run: PrivateRun) -> None:
        refuse_options(run, self.config)
        self._refuse(run)

    def _refuse(self, run: PrivateRun | PlainRun) -> None:
        refuse_made_before(run, self.config)
        if not self.config.candidate_names(run.model):
            raise invalid(
                "peft_config",
                type(self.config).__name__,
                "to find parameters that it may select",
                "Everything outside the head is frozen. Unfreeze some parameters first.",
            )

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

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        if self.masks is None:
            self.prepare(run)
            self._choose(run, checkpoint, select_entries)

    def start_plain(self, run: PlainRun, checkpoint: str | None = None) -> None:
        if self.masks is not None:
            return
        self._refuse(run)
        self._choose(run, checkpoint, entries_without_noise)
        masks: Mapping[str, Tensor] = self.masks or {}
        for name, parameter in run.model.named_parameters():
            if name in masks:
                parameter.register_hook(partial(_masked, masks[name]))

    def _choose(
        self,
        run: Run,
        checkpoint: str | None,
        select_by: Callable[[Run, ParamConfig], dict[str, Tensor]],
    ) -> None:
        """Make the masks, or read those of the run of a checkpoint."""
        freeze_others(run.model, self.config)
        if checkpoint is not None:
            self.masks = self._read(checkpoint, run.model)
        elif isinstance(self.config, PvalConfig):
            self.masks = self.config.masks(run.model)
        elif isinstance(self.config, ParamConfig):
            with run.clock.part(SELECTION):
                self.masks = select_by(run, self.config)

    def _read(self, checkpoint: str, model: nn.Module) -> dict[str, Tensor]:
        """Return the masks of the run of a checkpoint."""
        refuse_other_options(type(self.config).from_pretrained(checkpoint), self.config)
        return unpacked(safetensors.torch.load_file(Path(checkpoint, _MASKS)), model)

    def engine(self, run: PrivateRun) -> MaskedEngine:
        plan = run.plan
        return MaskedEngine(run.model, self.masks or {}, plan.clips_to, plan.clipping)

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remove the noise on entries that do not train."""
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


def select_entries(run: PrivateRun, config: ParamConfig) -> dict[str, Tensor]:
    """Return masks of the single parameters with the largest noisy gradient, from one sample."""
    plan, rows = run.plan.selection, run.plan.num_examples
    assert plan is not None
    with only_trains(run.model, set(config.candidate_names(run.model))):
        run.check_engine()
        run.model.train()  # as in the steps to come
        (batches,) = run.draws(plan.sampler(rows))
        share = clipping_share(plan.sample_rate * rows, rows)
        with ClippingEngine(run.model, plan.clipping_norm * share) as engine:
            run.feed(engine, batches)
            sums = engine.collect()
    margin = rounding_margin(plan.sample_rate * rows, rows)
    with run.release(plan.release(plan.clipping_norm * (1 + margin))) as release:
        return largest(release.sum(sums), config.unfreeze_ratio)


def entries_without_noise(run: PlainRun, config: ParamConfig) -> dict[str, Tensor]:
    """Return the masks by the gradients of one sample's summed losses, not clipped or noised.

    Raises: UnsupportedArgumentError with several processes, which would sample different rows.
    """
    refuse_several_processes(run, config)
    names = set(config.candidate_names(run.model))
    with only_trains(run.model, names):
        chosen = {name: p for name, p in run.model.named_parameters() if name in names}
        sums = {name: torch.zeros_like(p) for name, p in chosen.items()}
        run.model.train()  # as in the steps to come
        for batch in run.sample(config.selection_sample_rate):
            loss = run.losses(run.model, batch).sum()
            found = torch.autograd.grad(loss, list(chosen.values()), materialize_grads=True)
            for total, gradient in zip(sums.values(), found, strict=True):
                total += gradient
    return largest(sums, config.unfreeze_ratio)


def _masked(mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(~mask, 0)
