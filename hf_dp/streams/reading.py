"""Read sharded rows, step by step, each step for one release of one run.

A step that is read again would show the *same* draw under fresh noise, which costs far more than
two fresh draws (at noise multiplier 0.6, 8.5 times by chi-square divergence). Two runs over one
folder would share a draw as well. So:

* the first run that reads a folder is written into it, and another is refused;
* a step is recorded before it is read, durably: in the run's folder and beside the rows. The event
  of its whole allocation is in the run's ledger before that;
* a resumed run goes on after the last recorded step, whichever checkpoint it loads. Steps that
  were recorded and lost stay lost.

So every step of an epoch is released at most once, and the epochs have keys of their own: what is
released is what :class:`hf_dp.accounting.RandomAllocationGaussian` describes, for an allocation of
:mod:`hf_dp.streams.shards`. For its Poisson draws, which are independent of each other, it is
:class:`hf_dp.accounting.PoissonSampledGaussian`, of as many steps as were released. (Where a step
is cut to a largest size, this is drawn when it is read, which it is once.) Copies of a folder are
not known to each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import datasets
import numpy as np
from torch.utils.data import IterableDataset

from hf_dp._validate import invalid
from hf_dp.accounting import TRAINING, Event, Ledger
from hf_dp.batches.structure import Row
from hf_dp.errors import DataError, LedgerError, UnsupportedArgumentError
from hf_dp.plans.draws import POISSON
from hf_dp.plans.samplers import AllocationSampler, PoissonSampler, Sampler
from hf_dp.plans.units import EXAMPLE
from hf_dp.statement.durable import loads, replace_file, sync_folder
from hf_dp.statement.facts import WHEN_DRAWN
from hf_dp.streams.shards import ENDS, FIRST_ROWS, MANIFEST, ROWS, Plan, damaged, name_of, seal

# Beside the rows: which run reads them, and a byte for each step that was recorded. In the run's
# folder: how many of each folder. Names that begin with "_" are never published.
READER, READ, OF_RUN = "reader.json", "read", "_streams.json"


class Stream(IterableDataset[Row]):
    """The rows of a folder of shards: N, of which the first by place may be looked at, and others
    are read with their step alone.

    ``stream[i]`` is the i-th of the first rows, :attr:`first`; row N + e N + j is the j-th of epoch
    e, in the order of the steps.

    Raises: DataError for a folder that is not as :func:`hf_dp.streams.shards.shard` wrote it.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.plan = plan = Plan.read(self.folder)
        self.epochs = len(plan.keys)
        self.first = self._table(self.folder / FIRST_ROWS)
        self._rows, self._ends = list[datasets.Dataset](), list[np.ndarray]()
        for epoch in range(self.epochs):
            part = self.folder / name_of(epoch)
            self._check(part, epoch)
            ends, rows = np.load(part / ENDS), self._table(part / ROWS)
            if ends.shape != (plan.steps,) or (np.diff(ends, prepend=0) < 0).any():
                raise damaged(part / ENDS, f"it is not of {plan.steps} steps")
            # How many rows Poisson draws have follows from the key alone, whose seal holds.
            expected = ends[-1] if plan.sampling == POISSON else plan.rows
            if not len(rows) == ends[-1] == expected:
                raise damaged(part / ROWS, f"it has {len(rows)} rows instead of {expected}")
            self._rows.append(rows)
            self._ends.append(np.concatenate([[0], ends]))

    @staticmethod
    def _table(path: Path) -> datasets.Dataset:
        try:
            return datasets.Dataset.from_file(str(path))
        except Exception as problem:  # of Arrow's many kinds
            raise damaged(path, str(problem)) from problem

    def _check(self, part: Path, epoch: int) -> None:
        try:
            manifest = loads((part / MANIFEST).read_text(encoding="utf-8"))
            sizes = manifest["sizes"]
            numbers = {name: manifest[name] for name in self.plan.numbers(epoch)}
            sealed = manifest["seal"] == seal(self.plan.key(epoch), manifest)
        except FileNotFoundError:
            raise damaged(part / MANIFEST, "it is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise damaged(part / MANIFEST, repr(problem)) from problem
        if not sealed or numbers != self.plan.numbers(epoch):
            raise damaged(part / MANIFEST, "it is of another epoch or folder, or was changed")
        for name in (ROWS, ENDS):
            path = part / name
            if not path.is_file() or path.stat().st_size != sizes.get(name):
                raise damaged(path, "its size is not what its manifest says, or it is missing")

    def __len__(self) -> int:
        return self.plan.rows

    def __getitem__(self, index: int) -> Row:
        if 0 <= index < len(self.first):
            return self.first[index]
        epoch, place = divmod(index - len(self), len(self))
        if self.epochs == 1:  # of Poisson draws it may be longer than N
            epoch, place = min(0, epoch), index - len(self)
        if not 0 <= epoch < self.epochs or place >= len(self._rows[epoch]):
            raise DataError(
                f"Row {index} is not among the first {len(self.first):,}: others are read with "
                "the step that they take part in."
            )
        if place >= self._ends[epoch][self.recorded(epoch)]:
            raise LedgerError("Expected a step to be recorded before it is read.")
        return self._rows[epoch][place]

    def __iter__(self) -> NoReturn:
        raise DataError(
            "The rows of a folder of shards are read step by step, by a private run. Give what "
            "load() returns to DPTrainer as train_dataset, with look_over='when_drawn'."
        )

    def rows_of(self, epoch: int, step: int) -> list[int]:
        """Return the indices of the rows of a step. Not private."""
        first, last = self._ends[epoch][step : step + 2].tolist()
        begin = len(self) * (1 + epoch)
        return list(range(begin + first, begin + last))

    def recorded(self, epoch: int) -> int:
        """Return how many steps of an epoch were recorded, from the first on."""
        try:
            # Opened, since a network's file system may remember an older size until then.
            with open(self.folder / name_of(epoch) / READ, "rb") as stream:
                return os.fstat(stream.fileno()).st_size
        except FileNotFoundError:
            return 0

    @property
    def reader(self) -> str | None:
        """Return which run has begun to read the folder. Raises: DataError where that cannot be
        read."""
        try:
            return str(loads((self.folder / READER).read_text(encoding="utf-8"))["run_id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise damaged(self.folder / READER, repr(problem)) from problem


def load(folder: str | os.PathLike[str]) -> Stream:
    """Return the rows of a folder that ``hf-dp shard`` has made, for ``DPTrainer(train_dataset=)``
    with the same ``sampling`` and ``look_over="when_drawn"``.

    Raises: DataError for a folder without a manifest, or with one that does not fit its files.
    """
    return Stream(folder)


class Book(Protocol):
    """The ledger of a run: its folder, and which run it is once it was opened."""

    folder: Path

    @property
    def run_id(self) -> str: ...

    @property
    def ledger(self) -> Ledger: ...


class Reading:
    """Tells what a run has read of a stream, and records it: in its main process, if there are
    several, which see the same folders."""

    def __init__(self, stream: Stream, book: Book):
        self.stream, self._book = stream, book

    def check(self) -> None:
        """Raise LedgerError where another run has begun to read the stream."""
        reader, where = self.stream.reader, str(self.stream.folder)
        if reader is None and any(map(self.stream.recorded, range(self.stream.epochs))):
            raise damaged(self.stream.folder / READER, "it is missing, but steps were read")
        if reader is not None and reader != self._book.run_id:
            raise LedgerError(
                f"The shards in {where!r} were begun by the run {reader[:8]}, but this is the run "
                f"{self._book.run_id[:8]}. Both would see the same draws, which no epsilon covers. "
                "Resume that run, or shard the rows again into a new folder."
            )

    @property
    def unfinished(self) -> int | None:
        """Return the first epoch of which steps are to come, None after the last. Raises:
        LedgerError, as :meth:`check`."""
        self.check()
        steps = self.stream.plan.steps
        return next((e for e in range(self.stream.epochs) if self.made(e) < steps), None)

    @property
    def begins(self) -> bool:
        """Return whether the next step is the first of an epoch that the ledger does not hold."""
        return self.unfinished is not None and self.paid == 0

    def made(self, epoch: int) -> int:
        """Return how many steps of an epoch this run has recorded."""
        own = self._own().get(self._name(epoch), 0)
        return max(own, self.stream.recorded(epoch))

    @property
    def paid(self) -> int:
        """Return how many steps are to come of epochs that were begun, and so are in the ledger.
        One that a kill left paid and not begun is paid again: what the ledger holds may be of other
        rows.

        Poisson draws are paid for when they are released, one by one.

        Raises: LedgerError where the ledger holds fewer.
        """
        if self.stream.plan.sampling == POISSON:
            return 0
        paid = self._begun * self.stream.plan.steps
        if self._in_ledger < paid:
            raise LedgerError(
                f"This run has begun {self._begun} epochs of {str(self.stream.folder)!r}, {paid} "
                f"steps, but its ledger holds {self._in_ledger}. Restore it from a backup."
            )
        return paid - sum(map(self.made, range(self.stream.epochs)))

    @property
    def _begun(self) -> int:
        return sum(self.made(epoch) > 0 for epoch in range(self.stream.epochs))

    @property
    def _in_ledger(self) -> int:
        return self._book.ledger.steps(TRAINING)

    def to_pay(self, steps: int) -> int:
        """Return how many of the next ``steps`` are not paid, of those that there are.

        Raises: InvalidArgumentError for a new run of more steps than the stream has.
        """
        plan = self.stream.plan
        if self._in_ledger == 0:
            check_steps(steps, plan)
        begun = self.made(0) if plan.sampling == POISSON else self._begun * plan.steps
        return max(0, min(steps - self.paid, self.stream.epochs * plan.steps - begun))

    def record(self, epoch: int, step: int) -> None:
        """Record a step, durably: in the run's folder, and then beside the rows.

        Raises: LedgerError, as :meth:`check`, and for another step than the next one.
        """
        self.check()
        if step != self.made(epoch):
            raise LedgerError(f"Expected step {self.made(epoch)} of epoch {epoch}, got {step}.")
        allocated = self.stream.plan.sampling != POISSON
        if allocated and self._in_ledger < (self._begun + (step == 0)) * self.stream.plan.steps:
            raise LedgerError("Expected an epoch in the ledger before its first step is recorded.")
        own = {**self._own(), self._name(epoch): step + 1}
        said = {"run_id": self._book.run_id, "read": own}
        replace_file(self._book.folder / OF_RUN, [json.dumps(said).encode()])
        if self.stream.reader is None:
            self._claim()
        path = self.stream.folder / name_of(epoch) / READ
        new = not path.exists()
        with open(path, "ab") as stream:
            stream.truncate(step)  # what a folder brought back from a backup lacks is filled up
            stream.write(b".")
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            sync_folder(path.parent)

    def _claim(self) -> None:
        """Write the run into the stream's folder. Of two that try at once, one is refused."""
        path = self.stream.folder / READER
        mine = path.with_name(f"{path.name}.{self._book.run_id}")
        replace_file(mine, [json.dumps({"run_id": self._book.run_id}).encode()])
        try:
            os.link(mine, path)
        except FileExistsError:
            pass
        finally:
            mine.unlink()
        sync_folder(path.parent)
        self.check()

    def _name(self, epoch: int) -> str:
        return f"{self.stream.plan.id}/{epoch}"

    def _own(self) -> dict[str, int]:
        path = self._book.folder / OF_RUN
        try:
            said = loads(path.read_text(encoding="utf-8"))
            return dict(said["read"]) if said["run_id"] == self._book.run_id else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise LedgerError(
                f"{str(path)!r} says which steps this run has read, but is damaged ({problem}). "
                "Restore it from a backup, or shard the rows again and start a new run."
            ) from problem


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """Yields the steps of one epoch of a stream (of Poisson draws, as many as an epoch has), from
    the first that was not recorded on, each recorded before it is yielded, and cut as the plan's
    sampler cuts. Nothing once all epochs were read."""

    sampler: AllocationSampler | PoissonSampler
    reading: Reading = field(kw_only=True, repr=False, compare=False)

    def __iter__(self) -> Iterator[list[int]]:
        reading, epoch = self.reading, self.reading.unfinished
        if epoch is None:
            return
        first = reading.made(epoch)
        # Not beyond what is taken before the next iterator begins: workers fetch ahead, and what
        # they fetched of a step that is recorded is not drawn again.
        for step in range(first, min(first + len(self), reading.stream.plan.steps)):
            reading.record(epoch, step)
            drawn = reading.stream.rows_of(epoch, step)
            if isinstance(self.sampler, PoissonSampler):
                drawn = self.sampler.cut(np.array(drawn)).tolist()
            yield drawn

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        return self.sampler.event(noise_multiplier, steps)

    def __len__(self) -> int:
        return len(self.sampler)


# What a run that reads a stream must be given, by argument.
NEEDED: Mapping[str, object] = {
    "look_over": WHEN_DRAWN,
    "sampling": None,  # as the rows were sharded
    "privacy_unit": EXAMPLE,
    "views_per_example": 1,
    "audit_canaries": None,
    "rows_per_group": None,
}
# What a statement says of where the steps of rows came from.
OF_SHARDS = "BLAKE2b, keyed with 256 bits by the operating system's cryptographic generator"


def check_for_stream(stream: Stream, selection: object = None, **given: object) -> None:
    """Raise UnsupportedArgumentError for an argument, or a plan's selection, that does not go with
    a stream."""
    if selection is not None:
        expected = "to draw no rows of a stream of shards, which has only the draws of steps"
        why = "Pass one that selects nothing by rows, or train on rows in memory."
        got = "one that selects what trains"
        raise invalid("peft_config", got, expected, why, UnsupportedArgumentError)
    needed = {**NEEDED, "sampling": stream.plan.sampling}
    for name, value in given.items():
        if value != needed[name]:
            expected = f"to be {needed[name]!r} for a stream of shards"
            why = "Sharded rows come step by step, each by itself. Set it, or remove this."
            raise invalid(name, value, expected, why, UnsupportedArgumentError)


def sampler_of(sampler: Sampler, reading: Reading) -> StreamSampler:
    """Return the sampler that reads a stream for a plan's. Raises: InvalidArgumentError,
    UnsupportedArgumentError for a plan whose draws are not those of the stream."""
    check_sampler(sampler, reading.stream.plan)
    assert isinstance(sampler, (AllocationSampler, PoissonSampler))
    return StreamSampler(sampler.num_examples, sampler, reading=reading)


def check_steps(steps: int, plan: Plan) -> None:
    """Raise InvalidArgumentError for more steps than shards have."""
    there = len(plan.keys) * plan.steps
    if steps > there:
        expected = f"to be at most {there}, the steps of {len(plan.keys)} sharded epochs"
        if plan.sampling == POISSON:
            expected = f"to be at most {there}, the steps that were sharded"
        raise invalid("max_steps", steps, expected, "Shard as many epochs as the run has.")


def check_sampler(sampler: Sampler, plan: Plan) -> None:
    """Raise InvalidArgumentError, UnsupportedArgumentError for other draws than those of shards."""
    kind = PoissonSampler if plan.sampling == POISSON else AllocationSampler
    if type(sampler) is not kind or getattr(sampler, "rows_of_a_user", 1) > 1:
        raise invalid(
            "sampling",
            type(sampler).__name__,
            f"to be {plan.sampling!r} for a stream of shards",
            "Its rows were drawn when they were sharded. Set it, without users, bands, a private "
            "selection and, but for Poisson draws, max_logical_batch_size.",
            UnsupportedArgumentError,
        )
    if isinstance(sampler, PoissonSampler):
        fits = sampler.sample_rate == plan.expected_batch_size / plan.rows
        size = sampler.sample_rate * sampler.num_examples
    else:
        fits, size = len(sampler) == plan.steps, sampler.num_examples / len(sampler)
    if not fits:
        raise invalid(
            "expected_batch_size",
            size,
            f"to be {plan.expected_batch_size:g} for these shards, of {plan.steps} steps",
            "Set it, or shard the rows again with another one.",
        )
