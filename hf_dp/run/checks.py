"""Check what must hold for model, data and collator before a private run may start."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import Dataset
from transformers.utils import logging

from hf_dp.batches.structure import Rows
from hf_dp.batches.units import UnitTable
from hf_dp.distributed.processes import Processes
from hf_dp.errors import (
    DataError,
    UnaccountedGradientError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import base_model
from hf_dp.overlap import UNSTEADY, TrainingRows, columns_of, digests, parts_of
from hf_dp.plans.units import Users
from hf_dp.run.options import Run
from hf_dp.run.precision import PACKAGES

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
    """Return the number of rows of a training set, or raise DataError for less than two."""
    if dataset is None:
        raise DataError(
            "Private training needs a `train_dataset`, got None. Pass one to DPTrainer."
        )
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        split = "train" if "train" in dataset else next(iter(dataset), "train")
        raise DataError(
            f"Expected `train_dataset` to be one data set, got a {type(dataset).__name__} with the "
            f"splits {list(dataset)}. Pass one of them, such as data[{split!r}]."
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
                "The column %r looks as if it says who each row belongs to. Rows are protected "
                "one by one, so whoever has k rows is protected k-fold weaker. To protect each "
                "user with all of their rows, set privacy_unit='user' and privacy_unit_column=%r. "
                "If rows belong to nobody, ignore this.",
                column,
                column,
            )
            return


def warn_of_users(table: UnitTable, users: Users) -> None:
    """Say on the local console where the users are few, or one of them owns most rows."""
    count, largest = len(table), int(table.sizes().max())
    if count < FEW_USERS or 2 * largest > table.num_rows:
        logger.warning(
            "The column %r names %s users, and one of them has %s of %s rows. Noise that hides "
            "one of a few users hides much of what they have in common, and the default delta, 1 "
            "/ (2 x users), is %.2g: roughly the chance that the guarantee fails. Collect more "
            "users, or do not rely on the model. If one value stands for many users, or for none, "
            "give each their own.",
            users.column,
            count,
            largest,
            table.num_rows,
            1 / (2 * count),
        )


def check_collator(collator: object) -> None:
    """Raise DataError for the collator that joins many examples into one, and warn of one that
    takes the end of a text for padding."""
    inner = getattr(collator, "data_collator", collator)  # transformers wraps one to remove columns
    tokenizer = getattr(inner, "tokenizer", None)
    end: object = getattr(tokenizer, "eos_token_id", None)
    masks_by_id = type(inner).__name__ == "DataCollatorForLanguageModeling"
    if masks_by_id and not getattr(inner, "mlm", True) and end is not None:
        if end == getattr(tokenizer, "pad_token_id", None):
            logger.warning(
                "DataCollatorForLanguageModeling treats every token with the id of padding (%s) "
                "as padding, and the end token has that id, too: the model would not learn where "
                "a text ends. Put `labels` into the rows and use DataCollatorForSeq2Seq(tokenizer)"
                ", or set tokenizer.pad_token to a token that no text holds.",
                end,
            )
    if type(inner).__name__ == "DataCollatorWithFlattening":
        raise DataError(
            "DataCollatorWithFlattening joins many examples into one, so no single example could "
            "be clipped. Use DataCollatorWithPadding."
        )


def refuse_rows_in_code(reached: Collection[object], training: TrainingRows) -> None:
    """Raise DataError when a collator or transform reaches rows that could enter other examples."""
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
    "gaussian", "olora", "loftq", "orthogonal", "mica", "kaiming_uniform", "xavier_uniform",
    "bat", "lycoris", "mini", "uniform", "zero",
)  # fmt: skip


def refuse_data_in_adapters(model: nn.Module, own: Collection[object] | None = ()) -> None:
    """Raise UnsupportedModelError for an adapter whose initial weights may come from data (EVA,
    CorDA, LoRA-GA), or that trains a selection not among this run's ``own`` (None: any will do)."""
    for name, config in _adapters(model):
        for option in ("init_lora_weights", "init_weights"):
            init = getattr(config, option, None)
            if isinstance(init, str) and init not in _DATA_FREE and not init.startswith("pissa"):
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
            "not make. If that was made from the training rows, it would not be counted. Pass the "
            f"base model and a new {type(config).__name__} as peft_config, or resume the run that "
            "made it. To train that run's weights further, load them with PeftModel."
            "from_pretrained(base, folder, is_trainable=True) and name the run in earlier_runs if "
            "the rows are the same. If they were public, set adapter_init_data_is_public=True."
        )


def refuse_named_adapters(model: nn.Module) -> None:
    """Raise UnsupportedModelError for an adapter that PEFT would save in a folder of its name, of
    which neither ``privacy.json`` nor ``hf-dp publish`` knows."""
    names = sorted({name for name, _ in _adapters(model)})
    if names and "default" not in names:
        raise UnsupportedModelError(
            f"Expected an adapter with PEFT's own name, 'default', got {names}: others are saved "
            "in folders of their own, which could not be published. Leave adapter_name out."
        )


def _adapters(model: nn.Module) -> Iterator[tuple[str, PeftConfig]]:
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping):
            yield from configs.items()


def check_optimizer(optimizer: Optimizer | None, model: nn.Module) -> None:
    """Raise UnaccountedGradientError unless an optimizer is there and trains the model alone."""
    if optimizer is None:
        raise UnaccountedGradientError(
            "There is no optimizer before the first step, so hf_dp cannot check what it will "
            "train. Create it in create_optimizer, or pass it in `optimizers`."
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
    """Raise UnsupportedModelError when nothing trains, or a classifier's random head does not."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no trainable parameter. Call requires_grad_(True) on what "
            "is to train (in a recipe, remove something from `freeze`)."
        )
    base = base_model(model)
    if base is not model:
        refuse_frozen_heads(base, {p for p in base.parameters() if p.requires_grad})


def head_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts with parameters of a transformers model beside its backbone."""
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
    if not type(model).__name__.endswith(("Classification", "QuestionAnswering", "MultipleChoice")):
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
    """Raise UnsupportedArgumentError where processes do not know of each other: each would release
    a model of its own from one budget."""
    launched = os.environ.get("WORLD_SIZE") or "1"
    prepared = processes.count if accelerator is None else accelerator.num_processes
    known = Processes.here().count  # now, and not when the run was made
    if launched == str(processes.count) and prepared == known == processes.count:
        return
    raise UnsupportedArgumentError(
        f"The launcher started {launched} processes ($WORLD_SIZE), torch.distributed knows "
        f"{processes.count} and accelerate {prepared}. Processes that do not know of each other "
        "would each release a model, all from one budget. On a machine without accelerators, pass "
        "use_cpu=True (or set ACCELERATE_USE_CPU=true); in a loop of your own, call "
        "torch.distributed.init_process_group() before PrivateRun."
    )


# -- what processes compare before the first draw, and what they share --


def meet(run: Run) -> None:
    """Take over the main process's weights, or raise DistributedError naming what differs between
    processes, or when two random sources are the same."""
    processes = run.processes
    if processes.alone:
        return
    processes.refuse_differences(_in_common(run))
    processes.refuse_equal(
        "source of random numbers",
        run.randomness.fingerprint(),
        "Noise that is drawn twice can be subtracted. Create the trainer in each process, not "
        "before processes are forked.",
    )
    for tensor in (*run.model.parameters(), *run.model.buffers()):
        if not isinstance(tensor, DTensor):  # shards stay
            processes.from_main(tensor.data)


def _in_common(run: Run) -> dict[str, str]:
    """Return, by name, what all processes of a run must have in common."""
    options, reading = run.options, run.reading
    rows = digest_of_rows(run.train_dataset) if reading is None else reading.stream.plan.id
    loud = replace(options, batches=replace(options.batches, quiet=False))  # bars are one's own
    groups: dict[str, Mapping[str, object]] = {
        "the privacy plan's": run.plan.to_dict(),
        "the run's option": vars(loud),
        "the argument": run.arguments,
        "what weakens the claim,": vars(run.book.weaknesses),
    }
    layout = [
        (name, list(p.shape), str(p.dtype), p.requires_grad)
        for name, p in run.model.named_parameters()
    ]
    found = {"the code of hf_dp": _digest_of_code()}
    found |= {f"the version of {package}": metadata.version(package) for package in PACKAGES}
    for of, values in groups.items():
        found |= {f"{of} `{name}`": _shown(repr(value)) for name, value in values.items()}
    return found | {
        "the number of rows": str(len(run.train_dataset)),
        "the rows of train_dataset": rows,
        "whose each row is": "their own" if run.units is None else run.units.digest(),
        "the data collator": type(run.data_collator).__qualname__,
        "the parameters of the model": _digest(json.dumps(layout)),
    }


def digest_of_rows(dataset: Rows) -> str:
    """Return a digest of all rows in their order, before any transform of the user's, or raise
    DataError for rows that differ on each reading."""
    found = blake2b(digest_size=16)
    for part in parts_of(dataset):
        columns = columns_of(part)
        if UNSTEADY in columns.values():
            raise DataError(
                "Rows of train_dataset differ each time they are read, so hf_dp cannot see "
                "whether all processes have the same rows in the same order. Move what is random "
                "(augmentation) into the data collator or, for a datasets.Dataset, into "
                "set_transform; or launch one process."
            )
        for name, each in sorted(digests(part, columns, b"").items()):
            found.update(f"{name} {len(each)}".encode() + each.tobytes())
    return found.hexdigest()


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}... ({_digest(text)})"


@cache
def _digest_of_code() -> str:
    """Return a digest of the package's source, which a version alone does not tell."""
    root = Path(__file__).parent.parent
    found = blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
