"""Read and replace the metadata of a safetensors file without touching a tensor.

A file is 8 bytes (the length of the header, little-endian), a JSON header, and the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hf_dp.errors import LedgerError
from hf_dp.statement.durable import replace_file
from hf_dp.statement.strict_json import loads

_LENGTH = 8  # bytes; tensors start at a multiple of it
_MOST = 100_000_000  # the most bytes of a header, by the format
_CHUNK = 1 << 24
_METADATA = "__metadata__"
# Files that stand beside weights: masks of what trains (hf_dp.tuners.single_entries.tuner).
NOT_WEIGHTS = ("selection_masks.safetensors",)


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


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file.

    Raises: LedgerError when its header cannot be read.
    """
    with _opened(path) as stream:
        return _Header.of(stream, path).metadata


def add_metadata(path: Path, added: Mapping[str, str]) -> None:
    """Put ``added`` into the metadata of a safetensors file, durably and in one step.

    Other metadata and the bytes of the tensors stay as they are. Tensors stay at multiples of 8
    bytes.

    Raises:
        LedgerError: the header cannot be read. The file stays as it was.
        OSError: the disk refused. The file stays as it was.
    """
    with _opened(path) as stream:
        header = _Header.of(stream, path)
        text = {_METADATA: {**header.metadata, **added}, **header.tensors}
        written = json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()
        written += b" " * (-len(written) % _LENGTH)
        replace_file(path, _chunks(written, stream))


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, str]
    tensors: dict[str, Any]

    @classmethod
    def of(cls, stream: BinaryIO, path: Path) -> _Header:
        """Read the header; the stream then stands at the tensors."""
        length = int.from_bytes(stream.read(_LENGTH), "little")
        text = stream.read(length) if length <= _MOST else b""
        try:
            tensors = loads(text.decode()) if text and len(text) == length else None
        except (ValueError, RecursionError):
            tensors = None
        metadata = tensors.pop(_METADATA, {}) if isinstance(tensors, dict) else None
        if not isinstance(tensors, dict) or not isinstance(metadata, dict):
            raise _unreadable(path, "its header is not complete")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise _unreadable(path, "its metadata is not text")
        return cls(metadata, tensors)


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
