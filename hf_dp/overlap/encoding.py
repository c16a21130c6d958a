"""One encoding of a row's values, independent of what holds them.

They may be Python objects, arrays, tensors or Arrow buffers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

STORED_FILE = {"bytes", "path"}  # how datasets stores an image
NONE, EMPTY_LIST = b"N", b"l" + bytes(8)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a single number, tensors and arrays without dimensions included."""
    return isinstance(value, (bool, int, float, np.generic)) or getattr(value, "ndim", None) == 0


def is_picture(value: Any) -> bool:
    """Return whether a value is a PIL image."""
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(value, library.Image)


def encode(value: Any) -> bytes:
    """Return a value as bytes: equal for equal values in any container, never a prefix of others.

    Booleans count as integers; floats are rounded to float32, as set_format("torch") does.
    """
    if value is None:
        return NONE
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _sized(b"b", bytes(value))
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        whole = int(value)
        return (
            b"i" + whole.to_bytes(8, "little", signed=True)
            if -(2**63) <= whole < 2**63
            else encode(str(whole))
        )
    if isinstance(value, (float, np.floating)):
        return b"f" + _as_bytes(np.asarray(value))
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if isinstance(value, (list, tuple)):
        return _encode_list(value)
    if is_picture(value):
        return b"p" + encode([value.mode, *value.size]) + encode(value.tobytes())
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return _encode_array(to_numpy(value))
    return b"?" + encode(f"{type(value).__name__} {value}")  # dates, decimals


def _sized(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor or any array-like value as an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)


def _as_bytes(numbers: np.ndarray) -> bytes:
    """Return whole numbers as int64 and others as float32, without a negative zero."""
    if numbers.dtype.kind in "biu":
        return numbers.astype("<i8").tobytes()
    with np.errstate(over="ignore"):
        return (numbers.astype("<f4") + np.float32(0)).tobytes()


def _encode_mapping(value: Mapping[str, Any]) -> bytes:
    if value.keys() == STORED_FILE:  # the content, wherever it is kept
        content, path = value["bytes"], value["path"]
        if content is None and path is not None and os.path.isfile(path):
            with open(path, "rb") as file:
                content = file.read()
        return encode(path if content is None else content)
    items = sorted((str(name), item) for name, item in value.items() if item is not None)
    return _sized(b"d", b"".join(encode(name) + encode(item) for name, item in items))


def _encode_list(values: list[Any] | tuple[Any, ...]) -> bytes:
    kinds = set(map(type, values))
    if not kinds <= {int, bool, float}:
        values = [
            value.item() if hasattr(value, "item") and is_scalar(value) else value
            for value in values
        ]
        kinds = set(map(type, values))
    if kinds <= {int, bool, float}:
        array = np.array(values)
        if array.dtype.kind in "bif":
            return _encode_array(array)
    return b"l" + len(values).to_bytes(8, "little") + b"".join(map(encode, values))


def _encode_array(array: np.ndarray) -> bytes:
    if array.ndim == 0 or array.dtype.kind not in "biuf" or array.dtype == np.uint64:
        return encode(array.tolist())
    if not len(array):
        return EMPTY_LIST
    head = len(array).to_bytes(8, "little")
    if array.ndim > 1:
        return b"l" + head + b"".join(map(_encode_array, array))
    return (b"F" if array.dtype.kind == "f" else b"I") + head + _as_bytes(array)


# The same encoding, read from Arrow's buffers.


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type holds numbers or booleans."""
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def is_list(array: Any) -> bool:
    """Return whether an Arrow array holds lists."""
    from pyarrow import types

    kind = array.type
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def without_views(array: Any) -> Any:
    """Return string and binary views, for which Arrow lacks functions, in the common layout."""
    import pyarrow as pa

    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(
        array.type
    )
    return array if plain is None else array.cast(plain)


def lengths_of(lists: Any) -> np.ndarray:
    """Return the lengths of an Arrow array of lists without nulls."""
    return lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def cells(values: Any) -> Iterable[bytes]:
    """Return what ``encode`` gives for each element of an Arrow array or of Python objects."""
    import pyarrow as pa

    if not isinstance(values, pa.Array):
        return map(encode, values)
    kind, types = values.type, pa.types
    if not len(values):
        return ()
    if isinstance(kind, pa.BaseExtensionType):
        return cells(values.storage)
    text = types.is_string(kind) or types.is_large_string(kind)
    raw = text or types.is_binary(kind) or types.is_large_binary(kind)
    number = is_number(kind) and kind != pa.uint64()
    if not (raw or number or is_list(values)):
        return (encode(element.as_py()) for element in values)
    if values.null_count:
        kept, rest = (
            values.is_valid().to_numpy(zero_copy_only=False),
            iter(cells(values.drop_null())),
        )
        return (next(rest) if valid else NONE for valid in kept)
    if raw:
        return _text_cells(values.cast(pa.large_binary()), b"s" if text else b"b")
    if number:
        whole = not types.is_floating(kind)
        return _slices(
            b"i" if whole else b"f", _as_bytes(values.to_numpy(zero_copy_only=False)), 4 + 4 * whole
        )
    return _list_cells(values)


def _slices(head: bytes, content: bytes, width: int) -> Iterator[bytes]:
    return (head + content[start : start + width] for start in range(0, len(content), width))


def _text_cells(values: Any, tag: bytes) -> Iterator[bytes]:
    """Yield the cells of a large_binary array."""
    _, offsets, content = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    heads = _slices(tag, np.diff(ends).astype("<i8").tobytes(), 8)
    view = memoryview(content or b"")
    bounds = ends.tolist()
    return (head + view[start:end] for head, start, end in zip(heads, bounds, bounds[1:]))


def _list_cells(values: Any) -> Iterator[bytes]:
    """Yield the cells of an Arrow array of lists without nulls."""
    import pyarrow as pa

    inner, lengths = values.flatten(), lengths_of(values)
    if not is_number(inner.type):
        inside = iter(cells(inner))
        return (
            b"l" + count.to_bytes(8, "little") + b"".join(islice(inside, count))
            for count in lengths.tolist()
        )
    if inner.null_count or inner.type == pa.uint64():
        return (encode(element.as_py()) for element in values)
    content = _as_bytes(inner.to_numpy(zero_copy_only=False))
    heads = _slices(
        b"F" if pa.types.is_floating(inner.type) else b"I", lengths.astype("<i8").tobytes(), 8
    )
    ends = (
        np.concatenate([[0], np.cumsum(lengths)]) * (len(content) // max(len(inner), 1))
    ).tolist()
    return (
        head + content[start:end] if start < end else EMPTY_LIST
        for head, start, end in zip(heads, ends, ends[1:])
    )
