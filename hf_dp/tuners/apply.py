"""Turn what a user passes as ``model`` and ``peft_config`` into the module that trains."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig

from hf_dp.errors import InvalidArgumentError
from hf_dp.losses import known_task
from hf_dp.run.checks import head_of
from hf_dp.tuners.selection import SelectionModel

logger = logging.getLogger(__name__)

_PEFT_TASKS = {
    "sequence_classification": "SEQ_CLS",
    "causal_lm": "CAUSAL_LM",
    "question_answering": "QUESTION_ANS",
}


def load_model(name_or_path: str) -> nn.Module:
    """Load a model by name or path, with the class that its config names.

    Raises: InvalidArgumentError when the config names no class of transformers.
    """
    config = AutoConfig.from_pretrained(name_or_path)
    architecture = (config.architectures or [None])[0]
    cls = getattr(transformers, architecture or "", None)
    if cls is None:
        raise InvalidArgumentError(
            f"Expected `model`={name_or_path!r} to name its class in config.architectures, got "
            f"{config.architectures!r}. Load it yourself, and pass the model."
        )
    return cls.from_pretrained(name_or_path)


def apply_peft(
    model: nn.Module, peft_config: PeftConfig, device: torch.device, seed: int | None = None
) -> PeftModel:
    """Move the model to its device, then wrap it for the adapter.

    If the model moved after wrapping, the optimizer would update copies: the run would look right
    and learn nothing. What PEFT must know of the head is set by :func:`complete`.

    What is set and chosen is noted in a copy, ``peft_config`` of the result: the caller's own
    configuration may serve another run.

    Args:
        seed: that of the run, for a public draw of what trains that has no seed of its own.
    """
    if isinstance(model, PeftModel):
        raise InvalidArgumentError(
            "Expected `peft_config` to be None for a model that is a PeftModel already. Pass the "
            "base model, or leave `peft_config` unset."
        )
    config = copy.deepcopy(peft_config)
    complete(model, config)
    if getattr(config, "selection_seed", 0) is None:
        vars(config)["selection_seed"] = seed
    base: Any = model.to(device)  # PEFT takes more than its annotations say
    try:
        return get_peft_model(base, config)
    except (ValueError, TypeError, KeyError) as problem:
        raise InvalidArgumentError(
            f"peft cannot apply `peft_config` to {type(model).__name__}: {problem}"
        ) from problem


def complete(model: nn.Module, peft_config: PeftConfig) -> None:
    """Set a missing ``task_type`` from the model's class, and log it.

    Without it PEFT would neither train nor save the head. It knows none for images: the head of an
    image classifier is named in ``modules_to_save`` instead, beside what is named there.
    """
    if peft_config.task_type is not None:
        return
    task = known_task(model)
    if task == "image_classification" and hasattr(peft_config, "modules_to_save"):
        given = peft_config.modules_to_save or []
        given = [given] if isinstance(given, str) else list(given)
        peft_config.modules_to_save = [*given, *(n for n in head_of(model) if n not in given)]
        logger.info("peft_config.modules_to_save: %s.", peft_config.modules_to_save)
        return
    peft_config.task_type = _PEFT_TASKS.get(task)
    logger.info("peft_config.task_type was not set; using %s.", peft_config.task_type)


def describe_training(model: nn.Module) -> str:
    """Return what trains, in words and counts, for the card."""
    named = list(model.named_parameters())
    trainable = sum(p.numel() for _, p in named if p.requires_grad)
    # Of selected modules and of ``modules_to_save``, PEFT also keeps the frozen originals.
    marks = (f".{SelectionModel.prefix}", ".modules_to_save.")
    copies = {p for n, p in named if p.requires_grad and any(mark in n for mark in marks)}
    total = sum(p.numel() for _, p in named) - sum(p.numel() for p in copies)
    if trainable == total:
        return f"all {total:,} parameters"
    configs: Mapping[str, PeftConfig] = getattr(model, "peft_config", None) or {}
    kinds = {str(getattr(each.peft_type, "value", each.peft_type)) for each in configs.values()}
    of_kind = f" ({', '.join(sorted(kinds))})" if kinds else ""
    return f"{trainable:,} of {total:,} parameters{of_kind}"
