"""What the processes of a run compare before the first draw, and what they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from torch.distributed.tensor import DTensor

from hf_dp.batches.structure import Rows
from hf_dp.errors import DataError
from hf_dp.overlap import UNSTEADY, columns_of, digests, parts_of
from hf_dp.run.options import Run
from hf_dp.run.precision import PACKAGES


def meet(run: Run) -> None:
    """Compare this process with the others, and take over the main one's weights.

    Raises: DistributedError naming what differs, or when two random sources are the same.
    """
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
    options = run.options
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
        "the rows of train_dataset": digest_of_rows(run.train_dataset),
        "whose each row is": "their own" if run.units is None else run.units.digest(),
        "the data collator": type(run.data_collator).__qualname__,
        "the parameters of the model": _digest(json.dumps(layout)),
    }


def digest_of_rows(dataset: Rows) -> str:
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
