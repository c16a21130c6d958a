"""Measure what sharding rows of synthetic tokens takes, and reading their steps, beside in memory.

    python recipes/streams/growth.py --rows 1000000 --folder growth

It prints seconds of processor time, and the largest memory of this process so far (its imports
included, and pages of files that the system could drop).
"""

import argparse
import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hf_dp import shard
from hf_dp.plans.samplers import AllocationSampler
from hf_dp.streams import load
from hf_dp.streams.reading import Reading, StreamSampler

TOKENS, AT_ONCE, READ = 16, 100_000, 20_000  # a row; rows written at once; rows read at the most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--expected-batch-size", type=float, default=1000)
    parser.add_argument("--in-memory", action="store_true", help="the path without shards")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    path, size = args.folder / "rows.parquet", args.expected_batch_size
    write(path, args.rows)
    begun, found = spent(), {"rows": args.rows, "in_memory": args.in_memory, "imports": memory()}
    if args.in_memory:
        cache = str(args.folder / "cache")
        rows: Any = datasets.load_dataset("parquet", data_files=str(path), cache_dir=cache)["train"]
        sampler = AllocationSampler(args.rows, round(args.rows / size))
    else:
        made = shard([path], args.folder / "shards", expected_batch_size=size)
        found |= {"sharding": spent() - begun, "sharding_memory": memory()}
        rows = load(made)
        ledger = SimpleNamespace(steps=lambda purpose: rows.plan.steps)
        book = SimpleNamespace(folder=args.folder, run_id="growth", ledger=ledger)
        sampler = StreamSampler(
            args.rows, AllocationSampler(args.rows, rows.plan.steps), reading=Reading(rows, book)
        )
    found |= {"preparing": spent() - begun, "preparing_memory": memory()}
    found |= reading(iter(sampler), rows)
    print(json.dumps(found))
    shutil.rmtree(args.folder)


def write(path: Path, rows: int) -> None:
    """Write rows of random tokens."""
    draw, writer = np.random.default_rng(0), None
    for first in range(0, rows, AT_ONCE):
        count = min(AT_ONCE, rows - first)
        tokens = pa.array(draw.integers(0, 30_000, count * TOKENS, np.int32))
        ends = pa.array(np.arange(0, count * TOKENS + 1, TOKENS, np.int32))
        columns = {
            "input_ids": pa.ListArray.from_arrays(ends, tokens),
            "labels": pa.array(draw.integers(0, 2, count)),
        }
        table = pa.table(columns)
        writer = writer or pa.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def reading(draws: Iterator[list[int]], rows: Any) -> dict[str, float]:
    """Draw steps, and read their rows, until there are enough."""
    begun = spent()
    drawn = next(draws)
    first, read = spent() - begun, 0
    begun = spent()
    while drawn and read < READ:
        read += sum(1 for index in drawn if rows[index])
        drawn = next(draws, [])
    row = 1e6 * (spent() - begun) / read
    return {"first_draw": first, "microseconds_a_row": row, "reading_memory": memory()}


def spent() -> float:
    """Return the processor time of this process, in seconds."""
    return time.process_time()


def memory() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
