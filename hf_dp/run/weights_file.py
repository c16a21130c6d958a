"""The head of a run's ledger in the metadata of saved weights, whose tensors stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_dp.errors import LedgerError
from hf_dp.statement.durable import Head, loads, replace_file

_CHUNK = 1 << 24
# Files that stand beside weights: masks of what trains (hf_dp.tuners.single_entries).
NOT_WEIGHTS = ("selection_masks.safetensors",)
HEAD_KEY = "hf_dp_ledger_head"  # in the metadata


def weights_files(folder: Path) -> list[Path]:
    """List the safetensors files with weights in a folder: a model, its shards or an adapter.

    PEFT puts an adapter with a name of its own into a folder of that name; these are included.
    """
    found = [*folder.glob("*.safetensors"), *folder.glob("*/adapter_model*.safetensors")]
    return sorted(
        path
        for path in found
        if not path.name.startswith("_")
        and path.name not in NOT_WEIGHTS
        and not (path.parent != folder and path.parent.name.startswith(("_", "checkpoint-")))
    )


def head_in(path: Path) -> Head | None:
    """Return the head that a weights file carries, or None. Raises: LedgerError."""
    text = read_metadata(path).get(HEAD_KEY)
    try:
        return None if text is None else Head.from_dict(loads(text))
    except (ValueError, RecursionError, LedgerError) as error:
        raise _unreadable(path, f"its {HEAD_KEY} is not one: {error}") from error


def put_head(path: Path, head: Head) -> None:
    """Let a weights file carry a head, durably.

    Raises: LedgerError when it carries that of another run, or a later one.
    """
    there = head_in(path)
    if there is not None and (there.run_id != head.run_id or there.lines > head.lines):
        raise LedgerError(
            f"{path} was saved by run {there.run_id} after line {there.lines} of its ledger, and "
            f"this is run {head.run_id} at line {head.lines}. Save into another folder."
        )
    add_metadata(path, {HEAD_KEY: json.dumps(head.to_dict())})


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: LedgerError when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error)) from error


def add_metadata(path: Path, added: Mapping[str, str]) -> None:
    """Put ``added`` into the metadata of a safetensors file, durably and in one step.

    Other metadata and the bytes of the tensors stay as they are.

    Raises: LedgerError when it cannot be read; OSError when the disk refuses. It stays as it was.
    """
    metadata = {**read_metadata(path), **added}

    def changed() -> Iterator[bytes]:
        # 8 bytes with the length of the header, the header, and tensors at a multiple of 8 bytes.
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header["__metadata__"] = metadata
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text += b" " * (-len(text) % 8)
            yield len(text).to_bytes(8, "little") + text
            while chunk := stream.read(_CHUNK):
                yield chunk

    replace_file(path, changed())


def _unreadable(path: Path, why: str) -> LedgerError:
    return LedgerError(
        f"Expected {path} to be a safetensors file, whose metadata may say what was spent for it, "
        f"but it cannot be read ({why}). Restore it. If a kill interrupted its saving, delete it: "
        "no model could load it."
    )
