"""What trains, where that is decided inside the run: by the private rows (DP-FROST, PARAM), or entry by entry (PVAL).

A :class:`Choice` is asked at four points: when the plan is made, before the first step, before each step, and when weights are
saved. What it reads of the private rows goes through noise and into the ledger, in :func:`hf_dp.trainer.private_selection`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.selection_plan import SelectionPlan
from hf_dp.trainer.loading import apply_peft, describe_training, set_task_type
from hf_dp.trainer.private_selection import select_entries, select_partitions
from hf_dp.tuners.frost.config import FrostConfig
from hf_dp.tuners.masks import MaskConfig, ParamConfig, PvalConfig, packed, unpacked
from hf_dp.tuners.selection import candidates

logger = logging.get_logger(__name__)

_MASKS = "selection_masks.safetensors"


class Choice:
    """Nothing to choose: the model trains as it was given."""

    masks: Mapping[str, Tensor] | None = None

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        """What will be released to choose, or None."""
        return None

    def prepare(self, trainer: Any) -> None:
        """Raise, before anything is written, for what cannot work."""

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        """Choose, or read what a checkpoint's run has chosen. Before the optimizer exists."""

    def before_step(self, trainer: Any) -> None:
        """Before each private step."""

    def save(self, folder: str) -> None:
        """Write what was chosen beside weights that do not tell it themselves."""

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        """Inside, everything that may train at some time is trainable: for the optimizer."""
        yield

    def describe(self, model: nn.Module) -> str:
        """What trains, in words, for the card."""
        return describe_training(model)


def choice_of(peft_config: Any, is_private: bool) -> Choice | None:
    """The choice that a configuration asks for; None for a configuration that PEFT applies as it is.

    Raises: UnsupportedArgumentError in ``non_private`` mode; ConfigError for a selection that another run made.
    """
    if not isinstance(peft_config, (FrostConfig, MaskConfig)):
        return None
    config = copy.deepcopy(peft_config)  # what is chosen is written into it, and the caller's may serve another run
    if isinstance(config, FrostConfig) and config.parameters is not None:
        if not is_private:
            return None  # an adapter like any other
        raise ConfigError(
            "This FrostConfig holds a selection that another run made from private rows, and this run's ledger would not know "
            "it. Pass a FrostConfig without `parameters`, or resume that run."
        )
    if not is_private:
        raise invalid(
            "peft_config",
            type(config).__name__,
            "to be used in private modes",
            "Without privacy use RandomConfig, TopBlocksConfig or a selection that a private run made.",
            UnsupportedArgumentError,
        )
    if isinstance(config, MaskConfig):
        return _Masks(config)
    return _Repeated(config) if config.num_selections > 1 else _Once(config)


class _Frost(Choice):
    def __init__(self, config: FrostConfig):
        self.config = config

    def plan(self, clipping_norm: float) -> SelectionPlan:
        return self.config.selection_plan(clipping_norm)

    def prepare(self, trainer: Any) -> None:
        _refuse_made_before(trainer)
        set_task_type(trainer.model, self.config)
        self.config.candidate_partitions(trainer.model)

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        if self.config.made:
            return
        if checkpoint is not None:
            self._read(checkpoint)
        else:
            self._select(trainer)
        self._apply(trainer)

    def _select(self, trainer: Any) -> None:
        made = select_partitions(trainer, self.config)
        self.config.made.append(made)
        logger.info("DP-FROST selected %d of %d partitions.", len(made["partitions"]), made["candidates"])

    def _read(self, checkpoint: str) -> None:
        """Take over what the run chose before; it never chooses the same again."""
        earlier = FrostConfig.from_pretrained(checkpoint)
        _refuse_other_options(earlier, self.config)
        self.config.made = earlier.made

    def _apply(self, trainer: Any) -> None:
        raise NotImplementedError

    def describe(self, model: nn.Module) -> str:
        if not self.config.made:
            return describe_training(model)
        return f"{describe_training(model)}: " + "; then ".join(
            f"{len(made['partitions'])} of {made['candidates']} partitions, chosen privately (DP-FROST; sensitivities "
            f"{', '.join(f'{value:.3g}' for value in made['sensitivities'])}): {', '.join(made['partitions'])}"
            for made in self.config.made
        )


class _Once(_Frost):
    """K = 1: the model is replaced by an adapter of the selected weights."""

    def _apply(self, trainer: Any) -> None:
        self.config.parameters = list(self.config.made[0]["parameters"])
        trainer.replace_model(apply_peft(trainer.model, self.config, trainer.args.device))


class _Repeated(_Frost):
    """K > 1 (section 5.3): chosen again at step ``(k - 1) floor(U / K)`` of U; trains in place, saves a whole checkpoint."""

    def _apply(self, trainer: Any) -> None:
        self._may_train = [*candidates(trainer.model, self.config)]
        self._switch(trainer.model)

    def _switch(self, model: nn.Module) -> None:
        selected = set(self.config.made[-1]["parameters"])
        may_train = set(self._may_train)
        for name, parameter in model.named_parameters():
            if parameter in may_train:
                parameter.requires_grad_(name in selected)

    def before_step(self, trainer: Any) -> None:
        every = max(1, trainer.privacy_plan.steps // self.config.num_selections)
        made = len(self.config.made)
        if made < self.config.num_selections and trainer.state.global_step >= made * every:
            with self.all_that_may_train(trainer.model):
                self._select(trainer)
            self._switch(trainer.model)

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        before = [(parameter, parameter.requires_grad) for parameter in self._may_train]
        for parameter, _ in before:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, trained in before:
                parameter.requires_grad_(trained)

    def save(self, folder: str) -> None:
        self.config.write_details(folder)


class _Masks(Choice):
    """PVAL and PARAM: a mask for each weight; trains in place, saves a whole checkpoint."""

    def __init__(self, config: MaskConfig):
        self.config = config
        self.masks = None

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        return self.config.selection_plan(clipping_norm) if isinstance(self.config, ParamConfig) else None

    def prepare(self, trainer: Any) -> None:
        _refuse_made_before(trainer)
        args = trainer.args
        for name, value, allowed, why in (
            ("weight_decay", args.weight_decay, (0, 0.0), "It would shrink the parameters that are not to train."),
            ("clipping", args.clipping, ("flat", "automatic"), "Norms are over single entries."),
            ("clipping_strategy", args.clipping_strategy, (None,), "Masked norms are formed from explicit gradients."),
        ):
            if value not in allowed:
                expected = (
                    f"to be {' or '.join(repr(item) for item in dict.fromkeys(allowed))} with a mask of parameters"
                )
                raise invalid(name, value, expected, why)
        set_task_type(trainer.model, self.config)
        if not self.config.candidate_names(trainer.model):
            raise invalid("peft_config", type(self.config).__name__, "to have something to choose from")

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        if self.masks is not None:
            return
        if checkpoint is not None:
            _refuse_other_options(type(self.config).from_pretrained(checkpoint), self.config)
            self.masks = unpacked(safetensors.torch.load_file(Path(checkpoint, _MASKS)), trainer.model)
        elif isinstance(self.config, PvalConfig):
            self.masks = self.config.masks(trainer.model)
        elif isinstance(self.config, ParamConfig):
            self.masks = select_entries(trainer, self.config)

    def save(self, folder: str) -> None:
        if self.masks is not None:
            self.config.write_details(folder)
            safetensors.torch.save_file(packed(self.masks), Path(folder, _MASKS))

    def describe(self, model: nn.Module) -> str:
        if self.masks is None:
            return describe_training(model)
        whole = [p for name, p in model.named_parameters() if p.requires_grad and name not in self.masks]
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        total = sum(mask.numel() for mask in self.masks.values())
        how = "by absolute value" if isinstance(self.config, PvalConfig) else "privately, by noisy gradient"
        return (
            f"{kept:,} of {total:,} single parameters, chosen {how} ({self.config.method.upper()}), and "
            f"{sum(p.numel() for p in whole):,} of the head and modules_to_save"
        )


def _refuse_made_before(trainer: Any) -> None:
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise invalid(
            "optimizers",
            type(trainer.optimizer).__name__,
            "to be (None, None) with this peft_config",
            "What trains is chosen when train() starts; set `optim` in the arguments instead.",
        )
    if hasattr(trainer.model, "peft_config"):
        raise InvalidArgumentError("Expected `peft_config` to be None for a model that is a PeftModel already.")


def _refuse_other_options(earlier: Any, now: Any) -> None:
    then, wanted = earlier.options(), now.options()
    changed = [name for name in wanted if then.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"Cannot resume: `{name}` of peft_config is {wanted[name]!r}, but the run was started with {then.get(name)!r}."
        )
