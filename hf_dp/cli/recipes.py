"""Public facts of a recipe, for planning; torch and transformers are imported only where a model,
an adapter or users are asked about."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hf_dp._arguments import ArgumentGroup, check_groups, numbers_from_text
from hf_dp._validate import one_of
from hf_dp.cli.config import DEFAULT_TASK, PLANNED, LengthArguments, Recipe, peft_config
from hf_dp.errors import ConfigError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.trainer.forward_arguments import ForwardArguments, resolve_forward
from hf_dp.trainer.privacy_arguments import (
    MODES,
    BudgetArguments,
    MemoryArguments,
    ReleaseArguments,
    StepArguments,
)
from hf_dp.trainer.row_arguments import AuditArguments, RowArguments, UnitArguments

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from hf_dp.batches.units import UnitTable
    from hf_dp.plans.units import Users
    from hf_dp.streams.shards import Plan
    from hf_dp.tuners.base import Tuner

GENERATION = ("causal_lm", "seq2seq")  # tasks in which a row may be several examples


@dataclass
class PlannedArguments(
    BudgetArguments,
    UnitArguments,
    StepArguments,
    RowArguments,
    ReleaseArguments,
    AuditArguments,
    MemoryArguments,
    ForwardArguments,
    LengthArguments,
):
    """The privacy arguments of a run that is only planned, checked without transformers."""

    learning_rate: float | None = None  # and what else weighs steps, of transformers
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0.0
    optim: str = "adamw_torch"
    optim_args: str | None = None
    adam_beta1: float = 0.9

    def __post_init__(self) -> None:
        found = numbers_from_text(self)
        found.attempt("privacy_mode", one_of, MODES)
        found.raise_all()
        self.max_grad_norm = self.max_grad_norm or 0.0
        if self.privacy_mode == DP_FP:
            resolve_forward(self)
        if self.accountant is None:
            self.accountant = "gdp_clt" if self.is_published_dp_fp else "pld"
        groups: tuple[type, ...] = (*PLANNED, RowArguments)
        check_groups([each for each in groups if issubclass(each, ArgumentGroup)], self, found)
        found.raise_all()

    @classmethod
    def of(cls, values: Recipe, **changes: object) -> Self:
        """Return those of a recipe, with some changed."""
        known = cls.__dataclass_fields__
        return cls(**{key: value for key, value in values.items() if key in known} | changes)


def tuner_of(recipe: Recipe) -> Tuner | None:
    """Return what a recipe trains with, None without a `peft` block, which takes torch to read."""
    config = peft_config(recipe.get("peft"))
    if config is None:
        return None
    from hf_dp.tuners.methods import tuner_for

    return tuner_for(config, is_private=True)


def refuse_other_modes(mode: str, command: str, planned: Sequence[str] = ("dp_sgd",)) -> None:
    """Raise ConfigError for a privacy mode that a command does not plan."""
    if mode not in planned:
        why = "it releases noised rows, not sums" if mode == "dp_fp" else "it spends no privacy"
        raise ConfigError(
            f"The recipe's privacy_mode is {mode!r}: {why}. {command} plans "
            f"{' and '.join(planned)} only."
        )


def rows_of(
    recipe: Recipe, num_examples: int | None, users: Users | None
) -> tuple[int, UnitTable | None]:
    """Return the number of rows or users (as given; None for that of the recipe's data), canaries
    included, and whose the rows are, where users are protected and the rows are here."""
    units = None
    if num_examples is None:
        if users is not None:
            if not recipe.get("train_file") or recipe.get("drop_long_rows"):
                raise ConfigError(
                    "The recipe's training rows are not available here, so the number of their "
                    "users is not known. Give --num-examples USERS."
                )
            split = recipe.get("train_split", "train")
            units = _whose(recipe["train_file"], split, recipe.get("max_train_rows"), users.column)
            num_examples = len(units)
        else:
            num_examples = _count(recipe)
    num_examples += int(recipe.get("audit_canaries") or 0)  # canaries count as rows
    if users is not None and users.by_row and units is None:
        raise ConfigError(
            "With unit_sampling=examples the rows to draw from must be counted user by user. Name "
            "the recipe's train_file, and leave --num-examples unset."
        )
    return num_examples, units


@functools.cache
def _whose(file: str, split: str, most: int | None, column: str) -> UnitTable:
    from hf_dp.batches.units import split_off_units

    return split_off_units(_loaded(file, split, most), column)[0]


def _loaded(file: str, split: str, most: int | None) -> Dataset:
    from hf_dp.tasks.sources import first_rows, load_file, refuse_joined

    refuse_joined(split)
    return first_rows(load_file(file, split), most)


def shards_of(recipe: Recipe) -> Plan | None:
    """Return the numbers of the folder of shards that a recipe trains on, if it does.

    Raises: DataError for another folder.
    """
    file, task = recipe.get("train_file"), recipe.get("task", DEFAULT_TASK)
    if task != DEFAULT_TASK or file is None or not Path(file).is_dir():
        return None
    from hf_dp.streams.shards import Plan

    return Plan.read(Path(file))


def _count(recipe: Recipe) -> int:
    if (shards := shards_of(recipe)) is not None:
        return shards.rows
    demo = recipe.get("dataset_name") == "demo"
    if (recipe.get("train_file") or demo) and recipe.get("task") in GENERATION:
        from hf_dp.tasks.generation.encoding import count_examples

        return count_examples(recipe)
    most = recipe.get("max_train_rows")
    if demo:
        from hf_dp.tasks.demo_sentences import demo_dataset
        from hf_dp.tasks.sources import first_rows

        return len(first_rows(demo_dataset()["train"], most))
    file = recipe.get("train_file")
    if file and not (most and not Path(file).exists()):  # a recipe may say how many are elsewhere
        return len(_loaded(file, recipe.get("train_split", "train"), most))
    if most:
        return int(most)
    raise ConfigError(
        "The number of training rows is not known: there is no recipe (--config) whose data is "
        "available here. Give --num-examples N."
    )


def trained_numbers(recipe: Recipe, peft: object) -> int:
    """Return how many numbers of the recipe's model train. No weights are made."""
    import torch
    import transformers

    from hf_dp.losses import is_decoder
    from hf_dp.tasks.classification import labels_of
    from hf_dp.tasks.models import architecture, freeze

    task = recipe.get("task", DEFAULT_TASK)
    classes = {
        "text_classification": "AutoModelForSequenceClassification",
        "image_classification": "AutoModelForImageClassification",
        "causal_lm": "AutoModelForCausalLM",
        "seq2seq": "AutoModelForSeq2SeqLM",
    }
    if task not in classes:
        raise ConfigError(f"The task {task!r} trains without privacy: nothing to plan.")
    advice = "Give --num-examples, --target-epsilon and --parameters instead of --config."

    def auto(config: object) -> object:
        kind = classes[task]
        if recipe.get("infilling"):
            kind = "AutoModelForCausalLM" if is_decoder(config) else "AutoModelForMaskedLM"
        return getattr(transformers, kind)

    name, file = recipe["model_name_or_path"], recipe.get("gguf_file")
    names = recipe.get("class_names")
    new_head = task.endswith("classification") and not recipe.get("infilling")
    labels = labels_of(names) if names and new_head else {}
    model: nn.Module = architecture(name, auto, advice, gguf_file=file, **labels)
    frozen = recipe.get("freeze") or []
    freeze(model, [frozen] if isinstance(frozen, str) else frozen)
    adapter = peft_config(peft)
    if adapter is not None:
        from hf_dp.tuners.base import apply_peft

        model = apply_peft(model, adapter, torch.device("meta"))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
