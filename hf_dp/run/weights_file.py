"""The head of a run's ledger in the metadata of saved weights, whose tensors stay as they are.

A safetensors file is 8 bytes (the length of the header, little-endian), a JSON header, and the
tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from hf_dp.errors import LedgerError
from hf_dp.statement.digests import Head
from hf_dp.statement.durable import replace_file
from hf_dp.statement.strict_json import loads

_LENGTH = 8  # bytes; tensors start at a multiple of it
_MOST = 100_000_000  # the most bytes of a header, by the format
_CHUNK = 1 << 24
_METADATA = "__metadata__"
# Files that stand beside weights: masks of what trains (hf_dp.tuners.single_entries.tuner).
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
    """Return the head that a weights file carries, or None.

    Raises: LedgerError for a damaged file or head.
    """
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
    """Return the metadata of a safetensors file.

    Raises: LedgerError when its header cannot be read.
    """
    with _opened(path) as stream:
        return _header(stream, path).get(_METADATA, {})


def add_metadata(path: Path, added: Mapping[str, str]) -> None:
    """Put ``added`` into the metadata of a safetensors file, durably and in one step.

    Other metadata and the bytes of the tensors stay as they are. Tensors stay at multiples of 8
    bytes.

    Raises:
        LedgerError: the header cannot be read. The file stays as it was.
        OSError: the disk refused. The file stays as it was.
    """
    with _opened(path) as stream:
        header = _header(stream, path)
        header[_METADATA] = {**header.get(_METADATA, {}), **added}
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        written += b" " * (-len(written) % _LENGTH)
        replace_file(path, _chunks(written, stream))


def _header(stream: BinaryIO, path: Path) -> dict[str, dict[str, str]]:
    """Read the header; the stream then stands at the tensors."""
    length = int.from_bytes(stream.read(_LENGTH), "little")
    text = stream.read(length) if length <= _MOST else b""
    try:
        header = loads(text.decode()) if text and len(text) == length else None
    except (ValueError, RecursionError):
        header = None
    metadata = header.get(_METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        raise _unreadable(path, "its header is not complete")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _unreadable(path, "its metadata is not text")
    return header


def _chunks(header: bytes, tensors: BinaryIO) -> Iterator[bytes]:
    yield len(header).to_bytes(_LENGTH, "little")
    yield header
    while chunk := tensors.read(_CHUNK):
        yield chunk


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> LedgerError:
    return LedgerError(
        f"Expected {path} to be a safetensors file, whose metadata may say what was spent for it, "
        f"but it cannot be read ({why}). Restore it. If a kill interrupted its saving, delete it: "
        "no model could load it."
    )
