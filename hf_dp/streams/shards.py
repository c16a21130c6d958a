"""Sort rows by the steps that they take part in, out of core: an epoch of random allocation, or all
Poisson draws of a run.

**Whose step is whose.** A row's step is a keyed pseudo-random function of its *place* alone, the
number of the row in its files, below the number of steps. The function is BLAKE2b, keyed with 256
bits of the operating system for each epoch; of its 64-bit words, those above the largest multiple
of the number of steps are drawn again. So, for a random function, each row's step is exactly
uniform and independent of all others': the allocation of
:class:`hf_dp.plans.samplers.AllocationSampler`. Contents are not looked at, since equal rows would
share a step. And a task that is killed and run again repeats it: with a fresh draw, a row could
stand in two steps, or in none.

With Poisson sampling a row joins each step of the run with the probability that
:class:`hf_dp.plans.samplers.PoissonSampler` has, exactly, and stands in the shard of each. The
trials of a block of places in all steps are drawn together (:mod:`hf_dp.plans.trials`), from the
function's words for that block. So a row costs what it takes part in, not a word a step (from the
probability 1/16 on, it does), and a task that is run again repeats it, too. "An epoch", below, is
then the whole run.

**What is written.** A folder with what :func:`hf_dp.streams.reading.load` reads:

* ``plan.json``: the numbers, a random id, and the keys;
* ``first.arrow``: the first rows by place, to look at before the first draw;
* ``epoch-0``, ...: ``rows.arrow``, the rows in the order of their steps, ``ends.npy``, where each
  step ends, and ``manifest.json``, sealed with the epoch's key.

**The folder is as secret as the rows.** Where steps end, and sizes and times of files, tell how
large each step's draw is, which epsilon assumes to be secret.

The sort holds a bounded part of the rows at a time: rows are put into files by ranges of steps,
again and again, until those of a range fit, or are of one step. It is all done in a folder beside
the final one, which gets its name at the end: nothing half written is ever read.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
from filelock import FileLock, Timeout

from hf_dp._validate import in_unit_interval, integer, invalid, one_of
from hf_dp.errors import DataError
from hf_dp.plans.draws import POISSON, RandomAllocation
from hf_dp.plans.privacy import steps_of as steps_of_run
from hf_dp.plans.trials import RandomBytes, successes
from hf_dp.run.checkpoint import named_disk_errors
from hf_dp.statement.durable import loads, replace_file, sync_folder, sync_tree
from hf_dp.statement.facts import FIRST
from hf_dp.streams import on_ray

PLAN, MANIFEST, FIRST_ROWS, ROWS, ENDS = (
    "plan.json", "manifest.json", "first.arrow", "rows.arrow", "ends.npy",
)  # fmt: skip
RAY, ENGINES = "ray", ("arrow", "ray")
FILES = (".parquet", ".jsonl", ".json")  # that are read; the latter two hold an object a line
_SECRET = (
    "This folder is as secret as the rows: its keys, and where steps end, reveal who takes part "
    "in which step. Do not publish it, and delete it after the run."
)
_STEP = "__step_of_hf_dp"
_WORDS, _PLACES = 8, 1024  # of 64 bits, in a digest; whose Poisson draws are made together
_LIMIT, _TABLE, _FILES, _AT_ONCE = 2**27, 2**23, 64, 1000  # bytes, bytes, open files, rows

Data: TypeAlias = datasets.Dataset | Sequence[str | os.PathLike[str]]


def shard(
    data: Data,
    folder: str | os.PathLike[str],
    *,
    expected_batch_size: float,
    num_train_epochs: int = 1,
    sampling: str = RandomAllocation.sampling,
    engine: str = "arrow",
) -> Path:
    """Sort rows by the steps of ``num_train_epochs`` random allocations, or of as many epochs of
    Poisson draws, into a new folder.

    If it is killed, the same call continues it; finished epochs are not sorted again.

    Args:
        data: Parquet files, JSON lines, or a data set without a transform. Its order counts.
        expected_batch_size, num_train_epochs, sampling ("random_allocation", "poisson"): as in the
            run's :class:`DPTrainingArguments`.
        engine: what sorts: "arrow" here; "ray" files, on a cluster (:mod:`hf_dp.streams.on_ray`).

    Raises: InvalidArgumentError; DataError for rows that cannot be read; OutputError for a folder
        that cannot be written to.
    """
    folder, source = Path(folder), Source(data)
    integer("num_train_epochs", num_train_epochs, 1)
    one_of("sampling", sampling, (RandomAllocation.sampling, POISSON))
    one_of("engine", engine, ENGINES)
    if folder.exists():
        next_move = "Choose another, or delete it if no run has read it."
        raise invalid("folder", str(folder), "to be new", next_move)
    if engine == RAY:
        on_ray.check(source.files)
    given = sampling, expected_batch_size, num_train_epochs
    plan = Plan.new(len(source), *given, source.fingerprint)
    with named_disk_errors("The shards", folder, "Then run the same command again: it continues."):
        _shard(source, plan, folder, engine)
    return folder


def _shard(source: Source, plan: Plan, folder: Path, engine: str) -> None:
    made = folder.with_name(f".{folder.name}.sharding")
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(made.with_name(f"{made.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DataError(f"Another process is sharding into {str(folder)!r}. Let it end.") from None
    with lock:
        plan = _planned(made, plan)
        if not (made / FIRST_ROWS).exists():
            _write(made / FIRST_ROWS, source.schema, source.first(FIRST))
        for epoch in range(len(plan.keys)):
            if not (made / name_of(epoch)).exists():
                _one_epoch(made, plan, epoch, source, engine)
        os.rename(made, folder)
        sync_folder(folder.parent)
    Path(lock.lock_file).unlink(missing_ok=True)


# -- what is planned --


@dataclass(frozen=True)
class Plan:
    """The numbers of a folder of shards, and the secret keys, one an epoch, in hexadecimal.

    Args:
        steps: of an epoch; of Poisson draws, which have one key, of the run.
        source: what the data was, as far as files and data sets tell without being read.
    """

    id: str
    rows: int
    sampling: str
    expected_batch_size: float
    steps: int
    keys: tuple[str, ...]
    source: str
    secret: str = _SECRET

    @classmethod
    def new(cls, rows: int, sampling: str, batch: float, epochs: int, source: str) -> Plan:
        """Return one with fresh keys."""
        if sampling == POISSON:
            in_unit_interval("expected_batch_size / rows", batch / rows, one=True)
            steps, epochs = steps_of_run(-1, epochs, rows, batch), 1
        else:
            steps = RandomAllocation().steps_per_epoch(rows, batch)
            batch = rows / steps
        keys = tuple(os.urandom(32).hex() for _ in range(epochs))
        return cls(secrets.token_hex(16), rows, sampling, batch, steps, keys, source)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Return that of a folder. Raises: DataError."""
        try:
            values = loads((folder / PLAN).read_text(encoding="utf-8"))
            return cls(**{**values, "keys": tuple(values["keys"])})
        except FileNotFoundError:
            raise DataError(
                f"{str(folder)!r} has no {PLAN}. Give the folder that `hf-dp shard` has made."
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise damaged(folder / PLAN, str(error)) from error

    def key(self, epoch: int) -> bytes:
        """Return the key of an epoch."""
        return bytes.fromhex(self.keys[epoch])

    def numbers(self, epoch: int) -> dict[str, object]:
        """Return what may leave the folder: no counts, no digest without a key."""
        names = ("id", "rows", "sampling", "expected_batch_size", "steps")
        return {name: getattr(self, name) for name in names} | {"epoch": epoch}

    def taking_part(self, epoch: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of ``count`` rows from the place ``first`` on take part in which steps:
        their numbers, from 0, and the steps, both (participations,)."""
        key = self.key(epoch)
        if self.sampling == POISSON:
            rate = self.expected_batch_size / self.rows
            return participations(key, first, count, self.steps, rate)
        return np.arange(count), steps_of(key, first, count, self.steps)


def _planned(folder: Path, plan: Plan) -> Plan:
    """Return the plan of a task that was begun here, or begin this one."""
    if not (folder / PLAN).exists():
        replace_file(folder / PLAN, [json.dumps(vars(plan)).encode()])
        return plan
    begun = Plan.read(folder)
    for name in ("rows", "sampling", "steps", "expected_batch_size", "source"):
        if getattr(begun, name) != getattr(plan, name):
            raise DataError(
                f"{str(folder)!r} is from a command that was killed, whose {name} was "
                f"{getattr(begun, name)!r} instead of {getattr(plan, name)!r}. Run it with the "
                "same data and arguments, or delete that folder to start over."
            )
    if len(begun.keys) != len(plan.keys):
        raise DataError(
            f"{str(folder)!r} is from a command that was killed, for {len(begun.keys)} epochs "
            f"instead of {len(plan.keys)}. Run it with as many, or delete that folder."
        )
    return begun


def name_of(epoch: int) -> str:
    """Return the name of an epoch's folder."""
    return f"epoch-{epoch}"


def damaged(path: Path, why: str) -> DataError:
    """Return the error for a file of a folder of shards that is not as it was written."""
    return DataError(
        f"{str(path)!r} is not as `hf-dp shard` has written it ({why}). Shard the rows again, into "
        "a new folder."
    )


# -- which step a row takes part in --


def steps_of(key: bytes, first: int, count: int, steps: int) -> np.ndarray:
    """Return the steps, below ``steps``, of ``count`` rows from the place ``first`` on."""
    begin, end = first // _WORDS, -(-(first + count) // _WORDS)
    digests = b"".join(_digest(key, block) for block in range(begin, end))
    words = np.frombuffer(digests, "<u8")[first - begin * _WORDS :][:count].copy()
    most = 2**64 - 2**64 % steps
    for at in np.flatnonzero(words > np.uint64(most - 1)).tolist():
        (block, place), attempt = divmod(first + at, _WORDS), 0
        while words[at] > np.uint64(most - 1):
            attempt += 1
            words[at] = np.frombuffer(_digest(key, block, attempt), "<u8")[place]
    return (words % np.uint64(steps)).astype(np.int64)


def participations(
    key: bytes, first: int, count: int, steps: int, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return as :meth:`Plan.taking_part`, where each row joins each of ``steps`` steps
    independently, with the probability ``round(rate 2^64) / 2^64``; row by row."""
    found = [np.zeros(0, np.int64)]
    for block in range(first // _PLACES, -(-(first + count) // _PLACES)):
        drawn = successes(_PLACES * steps, rate, _words_of(key, block))
        found.append(drawn + block * _PLACES * steps)
    places, at = np.divmod(np.concatenate(found), steps)
    there = (places >= first) & (places < first + count)
    return places[there] - first, at[there]


def _words_of(key: bytes, block: int) -> RandomBytes:
    """Return a source of bytes that are a function of key and block, the same each time."""
    numbers = itertools.count()

    def random_bytes(count: int) -> bytes:
        digests = (_digest(key, block, next(numbers)) for _ in range(-(-count // (8 * _WORDS))))
        return b"".join(digests)[:count]

    return random_bytes


def _digest(key: bytes, block: int, attempt: int = 0) -> bytes:
    said = block.to_bytes(8, "little") + attempt.to_bytes(8, "little")
    return blake2b(said, key=key, person=b"hf_dp: row, step").digest()


def seal(key: bytes, manifest: Mapping[str, object]) -> str:
    """Return the keyed digest of a manifest."""
    said = json.dumps({k: v for k, v in manifest.items() if k != "seal"}, sort_keys=True)
    return hmac.digest(key, f"manifest {said}".encode(), "sha256").hex()


# -- where rows come from --


class Source:
    """Rows that are read in order, as often as wanted, by tables of a few MiB."""

    _rows: datasets.Dataset | None = None
    files: Sequence[tuple[Path, int]] = ()  # with their numbers of rows

    def __init__(self, data: Data, schema: pa.Schema | None = None):
        if isinstance(data, datasets.Dataset):
            if data.format["type"] == "custom":
                raise DataError(
                    "The data set has a transform, which a folder of shards does not have. Remove "
                    "it (dataset.with_format(None)), and give it to the data collator."
                )
            self._rows, self.schema = data, data.features.arrow_schema
            self._count, self.fingerprint = len(data), f"data set {data._fingerprint}"
            return
        self._paths = [Path(each) for each in ([data] if isinstance(data, str) else data)]
        if not self._paths:
            raise invalid("data", [], "to name at least one file")
        for path in self._paths:
            if path.suffix not in FILES or not path.is_file():
                next_move = "Load other formats with datasets.load_dataset, and pass the data set."
                raise invalid(
                    "data", str(path), "to be a .parquet or .jsonl file that exists", next_move
                )
        said = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._paths]
        self.fingerprint = f"files {json.dumps(said)}"
        if schema is not None:  # of one of several files
            self.schema = schema
            return
        if (first := next(self._batches(), None)) is None:
            raise DataError("Expected rows to shard, and the files have none.")
        self.schema = first.schema
        if _STEP in self.schema.names:
            raise invalid("data", _STEP, "to have no column of this name", "Rename it.")
        for column in self.schema:
            try:
                datasets.Features.from_arrow_schema(pa.schema([column]))
            except Exception as problem:  # of more than one kind
                raise DataError(
                    f"The column {column.name!r} has a type that data sets do not have "
                    f"({problem}). Leave it out, or write it as another type."
                ) from problem
        self.files = [(path, self._length(path)) for path in self._paths]
        self._count = sum(count for _, count in self.files)

    def __len__(self) -> int:
        return self._count

    def _length(self, path: Path) -> int:
        if path.suffix == ".parquet":
            with _reading(path):
                return int(pa.parquet.ParquetFile(path).metadata.num_rows)
        return sum(map(len, _batches_of(path)))

    def _batches(self) -> Iterator[pa.Table | pa.RecordBatch]:
        if self._rows is not None:
            yield from self._rows.with_format("arrow").iter(_AT_ONCE)
            return
        for path in self._paths:
            yield from _batches_of(path)

    def tables(self) -> Iterator[pa.Table]:
        """Yield all rows, in order. Raises: DataError where files have other columns."""
        held: list[pa.Table] = []
        for batch in self._batches():
            table = pa.table(_columns(batch))
            try:
                held.append(table.select(self.schema.names).cast(self.schema))
            except (KeyError, ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
                raise DataError(
                    f"Rows of the data have other columns than the first ({problem}). Give all "
                    "files the same columns and types."
                ) from problem
            if sum(each.nbytes for each in held) >= _TABLE:
                yield pa.concat_tables(held).combine_chunks()
                held = []
        if held:
            yield pa.concat_tables(held).combine_chunks()

    def first(self, count: int) -> Iterator[pa.Table]:
        """Yield the first rows."""
        for table in self.tables():
            yield table.slice(0, count)
            count -= len(table)
            if count <= 0:
                return


def _columns(batch: pa.Table | pa.RecordBatch) -> dict[str, object]:
    return {name: batch.column(name) for name in batch.schema.names}


def _batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    with _reading(path):
        if path.suffix == ".parquet":
            yield from pa.parquet.ParquetFile(path).iter_batches(_AT_ONCE)
        else:
            yield from pa.json.open_json(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DataError, which names the file, where it cannot be read."""
    kind, next_move = "Parquet", "Write it again."
    if path.suffix != ".parquet":
        kind = "JSON lines"
        next_move = (
            "Write one object per line. The first rows decide the types: if a later one has "
            "another (text after nulls, 0.5 after 1), write Parquet, or pass datasets.load_dataset("
            "'json', data_files=..., split='train', features=...), with features that say them."
        )
    try:
        yield
    except (OSError, pa.ArrowException) as problem:
        raise DataError(
            f"{str(path)!r} cannot be read as {kind} ({problem}). {next_move}"
        ) from problem


# -- the sort --


def _one_epoch(folder: Path, plan: Plan, epoch: int, source: Source, engine: str) -> None:
    """Write the folder of one epoch, which gets its name at the end."""
    part = folder / "writing"
    shutil.rmtree(part, ignore_errors=True)
    (part / "sort").mkdir(parents=True)
    counts = np.zeros(plan.steps, np.int64)

    def noted(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            steps = table[_STEP].to_numpy()
            counts[:] += np.bincount(steps, minlength=plan.steps)
            yield table.drop_columns([_STEP])

    if engine == RAY:
        whole = source.schema.append(pa.field(_STEP, pa.int64()))
        read = _reader(source.schema, replace(plan, keys=(plan.keys[epoch],)))
        by_step = on_ray.sort(source.files, read, _STEP, whole)
    else:
        tables = _with_steps(source.tables(), plan, epoch, 0, plan.rows)
        by_step = by_steps(tables, 0, plan.steps, part / "sort")
    _write(part / ROWS, source.schema, noted(by_step))
    shutil.rmtree(part / "sort")
    np.save(part / ENDS, counts.cumsum())
    sizes = {name: (part / name).stat().st_size for name in (ROWS, ENDS)}
    manifest = {**plan.numbers(epoch), "sizes": sizes, "secret": _SECRET}
    manifest["seal"] = seal(plan.key(epoch), manifest)
    (part / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    sync_tree(part)
    os.rename(part, folder / name_of(epoch))
    sync_folder(folder)


def _reader(schema: pa.Schema, plan: Plan) -> Callable[[str, int, int], Iterator[pa.Table]]:
    """Return what reads one of several files, with the steps of its rows in the plan's epoch."""

    def read(path: str, first: int, end: int) -> Iterator[pa.Table]:
        return _with_steps(Source([path], schema).tables(), plan, 0, first, end)

    return read


def _with_steps(
    tables: Iterable[pa.Table], plan: Plan, epoch: int, first: int, end: int
) -> Iterator[pa.Table]:
    """Yield rows as often as they take part, with their steps, in tables that grow no larger.

    Args: first, end: the places of the first of these rows, and after the last.
    """
    place = first
    for table in tables:
        which, steps = plan.taking_part(epoch, place, len(table))
        for begin in range(0, len(which), len(table)):
            some = slice(begin, begin + len(table))
            yield table.take(which[some]).append_column(_STEP, pa.array(steps[some]))
        place += len(table)
    if place != end:
        raise DataError(
            f"The data had {end - first:,} rows, and has {place - first:,} now. Let nothing else "
            "write to it meanwhile."
        )


def by_steps(tables: Iterable[pa.Table], low: int, high: int, folder: Path) -> Iterator[pa.Table]:
    """Yield rows of the steps from ``low`` to below ``high`` in the order of these, and those of
    one step in their own. About :data:`_LIMIT` bytes of rows are held.

    Args: folder: for files of parts that are too large; empty again at the end.
    """
    if high - low == 1:
        yield from tables
        return
    held, size, rest = list[pa.Table](), 0, iter(tables)
    for table in rest:
        held.append(table)
        size += table.nbytes
        if size > _LIMIT:
            break
    else:
        if held:
            table = pa.concat_tables(held)
            yield table.take(np.argsort(table[_STEP].to_numpy(), kind="stable"))
        return
    bounds = np.linspace(low, high, min(_FILES, high - low) + 1).astype(np.int64)
    paths = _put_into_files(itertools.chain(held, rest), bounds, folder)
    del held
    for number, path in enumerate(paths):
        inside = folder / f"in-{number}"
        inside.mkdir()
        yield from by_steps(_read(path), int(bounds[number]), int(bounds[number + 1]), inside)
        inside.rmdir()
        path.unlink()


def _put_into_files(tables: Iterator[pa.Table], bounds: np.ndarray, folder: Path) -> list[Path]:
    """Put rows into files by the range of their step, in order."""
    paths = [folder / f"{number}.arrow" for number in range(len(bounds) - 1)]
    with ExitStack() as stack:
        writers: list[pa.RecordBatchWriter] = []
        for table in tables:
            if not writers:
                opened = [pa.ipc.new_stream(str(path), table.schema) for path in paths]
                writers = [stack.enter_context(each) for each in opened]
            which = np.searchsorted(bounds, table[_STEP].to_numpy(), side="right") - 1
            table = table.take(np.argsort(which, kind="stable"))
            ends = np.bincount(which, minlength=len(paths)).cumsum()
            for writer, begin, end in zip(writers, [0, *ends[:-1]], ends, strict=True):
                writer.write_table(table.slice(begin, end - begin))
    return paths


def _read(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(each.nbytes for each in held) >= _TABLE:
                yield pa.Table.from_batches(held)
                held = []
        if held:
            yield pa.Table.from_batches(held)


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write a file that appears whole or not at all."""
    making = path.with_name(f"{path.name}.making")
    with pa.OSFile(str(making), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write_table(table)
    with open(making, "rb") as stream:
        os.fsync(stream.fileno())
    os.rename(making, path)
