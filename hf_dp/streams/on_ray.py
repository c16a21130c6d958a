"""Sort rows by their steps on the machines of a Ray cluster, by Ray Data (the extra ``ray``).

A task reads one file and gives its rows their steps; Ray's own sort puts them in order, and what
starts it writes them down. A task that dies is run again, and repeats itself: a step is a function
of a row's place and of the key (:mod:`hf_dp.streams.shards`). On all machines the files must have
the same paths, and hf_dp must be installed. **The key and the rows go to all of them, and through
Ray's store, which may write them to disks: all of these, and Ray's logs, which count rows, are as
secret as the rows.**
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_dp.errors import ConfigError, DataError


def check(files: Sequence[tuple[Path, int]]) -> None:
    """Raise ConfigError without Ray, and DataError without files to read."""
    if not files:
        raise DataError("The engine 'ray' reads files. Write the data set to Parquet files.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    try:
        import ray.data  # noqa: F401
    except ImportError:
        raise ConfigError(
            "The engine 'ray' is not installed. Install it with: pip install 'hf-dp[ray]'"
        ) from None


def sort(
    files: Sequence[tuple[Path, int]],
    read: Callable[[str, int, int], Iterator[pa.Table]],
    by: str,
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Yield the rows of all files in the order of a column.

    Args:
        files: with their numbers of rows.
        read: ``(path, place of its first row, after its last) -> tables``, which have the column.
        by: the column. schema: of the tables.

    Raises: what a task raises, as Ray does.
    """
    import ray.data

    def each(batch: pa.Table) -> Iterator[pa.Table]:
        for file in batch.to_pylist():
            yield from read(file["path"], file["first"], file["end"])

    told, first = list[dict[str, Any]](), 0
    for path, count in files:
        told.append({"path": str(path.absolute()), "first": first, "end": first + count})
        first += count
    rows = ray.data.from_items(told, override_num_blocks=len(told))
    rows = rows.map_batches(each, batch_format="pyarrow", batch_size=1).sort(by)
    for table in rows.iter_batches(batch_format="pyarrow", batch_size=None):
        yield table.select(schema.names).cast(schema)
