"""Texts out of files of public rows, nested columns included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dp.errors import DataError
from hf_dp.tasks.files import load_file


def read_texts(files: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    """Yield every text of these columns, in the order of the files.

    Args:
        columns: names; ``annotations.text`` for a nested one. A file needs only one of them.

    Raises: DataError for a file that has none of the columns, or a value that is not text.
    """
    for file in files:
        rows = load_file(file)
        found = [
            column.split(".") for column in columns if column.split(".")[0] in rows.column_names
        ]
        if not found:
            raise DataError(
                f"The file {Path(file).name!r} has the columns {rows.column_names}, none of "
                f"{list(columns)}. Name one of them in `text_columns`."
            )
        for first, *rest in found:
            for value in rows[first]:
                yield from _texts(value, rest, ".".join([first, *rest]))


def _texts(value: Any, path: Sequence[str], column: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _texts(item, path, column)
    elif path and isinstance(value, dict) and path[0] in value:
        yield from _texts(value[path[0]], path[1:], column)
    elif not path and isinstance(value, str):
        if value:
            yield value
    elif value is not None:
        raise DataError(
            f"The column {column!r} of `text_columns` holds {type(value).__name__}, where text was "
            "expected."
        )
