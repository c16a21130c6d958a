"""What the processes of a run compare before the first draw, and what they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_dp.batches.units import UnitTable
from hf_dp.distributed.processes import Processes
from hf_dp.errors import DataError
from hf_dp.overlap import UNSTEADY, columns_of, digests, parts_of
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.facts import PACKAGES
from hf_dp.run.options import RunOptions


def share_weights(model: nn.Module, processes: Processes) -> None:
    """Give every process the main one's parameters and buffers; those that are sharded stay."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            processes.from_main(tensor.data)


def facts_in_common(
    *,
    plan: PrivacyPlan,
    options: RunOptions,
    arguments: Mapping[str, Any],
    weaknesses: Mapping[str, Any],
    train_dataset: Any,
    units: UnitTable | None,
    data_collator: Any,
    model: nn.Module,
) -> dict[str, str]:
    """Return, by name, what all processes of a run must have in common."""
    found = {"the code of hf_dp": _digest_of_code()}
    found |= {f"the version of {package}": metadata.version(package) for package in PACKAGES}
    found |= _each("the privacy plan's", plan.to_dict())
    loud = replace(options, batches=replace(options.batches, quiet=False))  # bars are one's own
    found |= _each("the run's option", vars(loud))
    found |= _each("the argument", arguments)
    found |= _each("what weakens the claim,", weaknesses)
    return found | {
        "the number of rows": str(len(train_dataset)),
        "the rows of train_dataset": digest_of_rows(train_dataset),
        "whose each row is": "their own" if units is None else units.digest(),
        "the data collator": type(data_collator).__qualname__,
        "the parameters of the model": _digest(_layout(model)),
    }


def digest_of_rows(dataset: Any) -> str:
    """Return a digest of all rows in their order, before any transform of the user's.

    Raises: DataError for rows that differ on each reading, which cannot be compared.
    """
    found = blake2b(digest_size=16)
    for part in parts_of(dataset):
        columns = columns_of(part)
        if UNSTEADY in columns.values():
            raise DataError(
                "Rows of train_dataset differ each time they are read, so it cannot be seen "
                "whether all processes have the same rows in the same order. Move what is random "
                "(augmentation) into the data collator or, for a datasets.Dataset, into "
                "set_transform; or launch one process."
            )
        for name, each in sorted(digests(part, columns, b"").items()):
            found.update(f"{name} {len(each)}".encode() + each.tobytes())
    return found.hexdigest()


def _each(of: str, values: Mapping[str, Any]) -> dict[str, str]:
    return {f"{of} `{name}`": _shown(repr(value)) for name, value in values.items()}


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}... ({_digest(text)})"


def _layout(model: nn.Module) -> str:
    return json.dumps(
        [
            (name, list(p.shape), str(p.dtype), p.requires_grad)
            for name, p in model.named_parameters()
        ]
    )


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
