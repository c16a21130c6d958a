"""Check what must hold for model, data and collator before a private run may start."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import datasets
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from transformers.utils import logging

from hf_dp.batches.units import UnitTable
from hf_dp.distributed.processes import Processes
from hf_dp.errors import (
    DataError,
    UnaccountedGradientError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import base_model
from hf_dp.overlap import TrainingRows
from hf_dp.plans.units import Users

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig

logger = logging.get_logger(__name__)

FEW_USERS = 1000

# Names of columns that usually say whose a row is.
_WHO = (
    "account|author|client|customer|employee|member|participant|patient|person|reviewer|speaker|"
    "student|user|worker|(conv|conversation|dialog|dialogue|session|thread)(?=.?id)"
)
_USER_IDS = re.compile(rf"({_WHO})(_?(hash|id|key|name|no|number|uuid))?", re.IGNORECASE)


def check_train_dataset(dataset: object) -> int:
    """Return the number of examples N of a training set.

    Raises: DataError for a data set without a length, or with fewer than two rows.
    """
    if dataset is None:
        raise DataError(
            "Private training needs a `train_dataset`, got None. Pass one to DPTrainer."
        )
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"The train_dataset ({type(dataset).__name__}) has no length, but Poisson sampling "
            "needs the number of rows. Load the data without streaming=True."
        ) from None
    if length < 2:
        raise DataError(
            f"Expected a train_dataset with at least two rows, got {length}. Check the file and "
            "the name of the split."
        )
    return length


def hint_at_users(dataset: object) -> None:
    """Say on the local console where rows look as if several were one user's."""
    if not isinstance(dataset, datasets.Dataset):
        return
    for column in dataset.column_names:
        if not _USER_IDS.fullmatch(column):
            continue
        values = dataset.with_format(None)[column]
        if all(isinstance(each, (str, int)) for each in values) and len(set(values)) < len(values):
            logger.warning(
                "The column %r looks as if it says whose each row is. Rows are protected one by "
                "one, and whoever has k rows is protected k-fold weaker. To protect each with all "
                "of their rows, set privacy_unit='user' and privacy_unit_column=%r. If rows are "
                "nobody's, ignore this.",
                column,
                column,
            )
            return


def warn_of_users(table: UnitTable, users: Users) -> None:
    """Say on the local console where the users are few, or one of them owns most rows."""
    count, largest = len(table), int(table.sizes().max())
    if count < FEW_USERS or 2 * largest > table.num_rows:
        logger.warning(
            "The column %r names %s users, and one of them has %s of %s rows. Noise that hides one "
            "of few hides much of what they have in common, and the default delta, 1 / (2 x "
            "users), is %.2g: roughly the chance that the guarantee fails. Collect more users, or "
            "do not count on the model. If one value stands for many users, or for none, give each "
            "their own.",
            users.column,
            count,
            largest,
            table.num_rows,
            1 / (2 * count),
        )


def check_collator(collator: object) -> None:
    """Raise DataError for the collator that joins many examples into one."""
    inner = getattr(collator, "data_collator", collator)  # transformers wraps one to remove columns
    if type(inner).__name__ == "DataCollatorWithFlattening":
        raise DataError(
            "DataCollatorWithFlattening joins many examples into one, so no single example could "
            "be clipped. Use DataCollatorWithPadding."
        )


def refuse_rows_in_code(reached: Collection[object], training: TrainingRows) -> None:
    """Raise DataError when a collator or transform reaches training rows, which could enter other
    examples."""
    parts = [each.values() if isinstance(each, Mapping) else [each] for each in reached]
    sets = [each for each in chain(*parts) if isinstance(each, (datasets.Dataset, Dataset))]
    if any(training.compare(each).equal.size for each in sets):
        raise DataError(
            "The data collator, or a transform of the training set, holds rows of the training "
            "set, so it could put them into other examples. Build what it needs beforehand from "
            "public data, or put it into each row."
        )


# Initializations of adapters that use only weights and random numbers. Others may use data.
_DATA_FREE = (
    "gaussian", "olora", "pissa", "loftq", "orthogonal", "mica", "kaiming_uniform",
    "xavier_uniform",
)  # fmt: skip


def refuse_data_in_adapters(model: nn.Module, own: Collection[object] | None = ()) -> None:
    """Raise UnsupportedModelError for an adapter whose initial weights may come from data, as those
    of EVA, CorDA and LoRA-GA do, or that trains what another run than ``own`` selected from rows.

    Args: own: selections of this run; None: any will do.
    """
    for name, config in _adapters(model):
        for option in ("init_lora_weights", "init_weights"):
            init = getattr(config, option, None)
            if isinstance(init, str) and not init.startswith(_DATA_FREE):
                raise UnsupportedModelError(
                    f"The adapter {name!r} was made with {option}={init!r}, which computes initial "
                    "weights from data. If that was the training data, the weights hold un-noised "
                    "facts about it. Use another initialization, or, if the data was public, set "
                    "adapter_init_data_is_public=True."
                )
        made = getattr(config, "made", None)  # only what selects from rows has this attribute
        if own is None or made is None or (made and all(each in own for each in made)):
            continue
        raise UnsupportedModelError(
            f"The adapter {name!r} is a {type(config).__name__} with a selection that this run did "
            "not make. Made from the training rows, it would not be counted. Pass the base model "
            f"and a new {type(config).__name__} as peft_config, or resume the run that made it. To "
            "train that run's weights further, load them by PeftModel.from_pretrained(base, "
            "folder, is_trainable=True) and name the run in earlier_runs if the rows are the same. "
            "If it was made from public rows, set adapter_init_data_is_public=True."
        )


def _adapters(model: nn.Module) -> Iterator[tuple[str, PeftConfig]]:
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping):
            yield from configs.items()


def check_optimizer(optimizer: Optimizer | None, model: nn.Module) -> None:
    """Raise UnaccountedGradientError when the optimizer trains a parameter outside the model, or
    is not there yet and could train any."""
    if optimizer is None:
        raise UnaccountedGradientError(
            "There is no optimizer before the first step, so what it will train cannot be checked. "
            "Make it in create_optimizer, or pass it in `optimizers`."
        )
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UnaccountedGradientError(
                    f"The optimizer trains a parameter of shape {tuple(parameter.shape)} that is "
                    "not in the model, so its gradient would be neither clipped nor noised. Make "
                    "it part of the model."
                )


def check_head_is_trainable(model: nn.Module) -> None:
    """Raise UnsupportedModelError when nothing trains, or when the head of a classifier, which is
    random, is frozen under an adapter."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no trainable parameter. Call requires_grad_(True) on what "
            "is to train (in a recipe, remove something from `freeze`)."
        )
    base = base_model(model)
    if base is not model:
        refuse_frozen_heads(base, {p for p in base.parameters() if p.requires_grad})


def head_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a transformers model beside its backbone that have parameters.

    Raises: UnsupportedModelError where nothing says which part is the backbone.
    """
    backbone = getattr(model, "base_model_prefix", "")
    parts = {
        name: child
        for name, child in model.named_children()
        if name != backbone and any(True for _ in child.parameters())
    }
    if backbone in dict(model.named_children()):
        return parts
    # CLIP and SigLIP classify by one part of themselves, so none is called by their prefix.
    if "classifier" in parts:
        return {"classifier": parts["classifier"]}
    raise UnsupportedModelError(
        f"It is not known which part of {type(model).__name__} is the head: of {sorted(parts)}, "
        f"none is called {backbone!r} (its base_model_prefix) or 'classifier'. Choose another "
        "model."
    )


def refuse_frozen_heads(model: nn.Module, trained: Collection[nn.Parameter]) -> None:
    """Raise UnsupportedModelError when nothing in the head of a classifier is ``trained``."""
    if not type(model).__name__.endswith(("Classification", "QuestionAnswering")):
        return
    frozen = sorted(
        name
        for name, part in head_of(model).items()
        if not any(parameter in trained for parameter in part.parameters())
    )
    if frozen:
        raise UnsupportedModelError(
            f"With this peft_config the head {frozen} of {type(model).__name__} would stay frozen, "
            f"and a new head is random. Set modules_to_save={frozen} in the peft_config."
        )


def check_launch(processes: Processes, accelerator: Accelerator | None) -> None:
    """Raise UnsupportedArgumentError where processes do not know of each other.

    Each would take itself for the only one, and release a model of its own from one budget.
    """
    launched = os.environ.get("WORLD_SIZE") or "1"
    prepared = processes.count if accelerator is None else accelerator.num_processes
    known = Processes.here().count  # now, and not when the run was made
    if launched == str(processes.count) and prepared == known == processes.count:
        return
    raise UnsupportedArgumentError(
        f"The launcher started {launched} processes ($WORLD_SIZE), torch.distributed knows "
        f"{processes.count} and accelerate {prepared}. Processes that do not know of each other "
        "would each release a model of their own from one budget. On a machine without "
        "accelerators, pass use_cpu=True (or set ACCELERATE_USE_CPU=true); in a loop of your own, "
        "call torch.distributed.init_process_group() before PrivateRun."
    )
