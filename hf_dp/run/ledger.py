"""The ledger of one run, as the run goes on; :mod:`hf_dp.run.ledger_file` says how it is kept."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from hf_dp._dataclasses import plain
from hf_dp.accounting import EARLIER, TRAINING, Event, Ledger, LedgerEntry
from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run import ledger_file
from hf_dp.run.budget import Budget
from hf_dp.run.checkpoint import named_disk_errors
from hf_dp.run.ledger_file import COPY, LEDGER, Lines
from hf_dp.run.witnesses import (
    put_head,
    refuse_foreign,
    refuse_leftovers,
    weights_files,
    whole_ledger,
)
from hf_dp.statement.durable import Beside, Head, replace_file
from hf_dp.statement.evidence import Evidence, earlier_runs, write
from hf_dp.statement.facts import Flags, Weaknesses
from hf_dp.statement.statement import PrivacyStatement

# What the plan calls it -> what DPTrainer's user calls it; most telling first.
_ARGUMENTS = {
    "num_examples": "the rows of `train_dataset`",
    "expected_batch_size": "",
    "clipping_norm": "`per_example_max_grad_norm`",
    "target_epsilon": "",
    "loss": "`noised_loss_bound`, `noised_loss_budget_ratio`",
    "clipping_quantile": "",
    "router_balance": "",
    "delta": "`target_delta`",
    "draw": "`sampling`, `max_logical_batch_size`, `unit_sampling`",
}


class RunLedger:
    """The append-only ledger of one run, kept in ``output_dir``; checkpoints hold copies.

    Attributes:
        lines: those of the ledger; the main process has them on its disk, the others in memory.
        earlier_entries: what earlier runs released; nothing else may be recorded before it.
        weaknesses: what weakens the claim, which :meth:`weaken` adds to, and the next line notes.
        lost: releases since the checkpoint resumed from.
        paid: steps in the ledger, recorded with those before them, that are yet to come.
        abandoned: steps in the ledger that were paid and never come, as a resume skips some.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrivacyPlan,
        *,
        earlier: Sequence[Evidence] = (),
        processes: Processes | None = None,
    ):
        self.folder, self.plan = Path(folder), plan
        claims = [claim for each in earlier for claim in earlier_runs(each)]
        self.weaknesses = Weaknesses(earlier=tuple(claims))
        entries = [entry for each in earlier for entry in each.ledger.entries]
        self.earlier_entries = [LedgerEntry(entry.event, EARLIER) for entry in entries]
        self.lines = Lines(uuid.uuid4().hex, plan)
        self.lost = 0
        self.paid = self.abandoned = 0
        self.budget = Budget(plan, self.ledger)
        self.processes = processes or Processes()
        self._is_open = False
        self._lock: FileLock | None = None

    @property
    def ledger(self) -> Ledger:
        """What the run released."""
        return self.lines.ledger

    @property
    def run_id(self) -> str:
        """Which run it is."""
        return self.lines.run_id

    def go_to(self, folder: str | os.PathLike[str]) -> None:
        """Keep the ledger in another folder, as long as nothing is recorded and none is taken."""
        if not (self._is_open or len(self.ledger)):
            self.folder = Path(folder)

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Open the ledger, and begin or continue ``planned_steps`` training steps, between which
        selections will make ``planned_releases`` more.

        Raises: as :meth:`open` and :meth:`hf_dp.run.budget.Budget.start`.
        """
        self.open()
        self.paid = 0
        self.budget.start(planned_steps, planned_releases)

    def take(self) -> None:
        """Take the lock of the run in the folder, if there is one; :meth:`stop` releases it."""
        if self.folder.is_dir():
            self._lock = self._lock or ledger_file.lock_run(self.folder)

    def open(self) -> None:
        """Take the folder for this run. Nothing may be recorded before.

        Raises: LedgerError when the folder holds another run's ledger, which would be lost; when
            another process is at work on this run; or when anything knows what the ledger lacks.
        """
        self.lines.run_id = self.processes.on_main(self._open_folder)
        self._is_open = True

    def _open_folder(self) -> str:
        refuse_foreign(self.folder, self.run_id)
        if not len(self.ledger):
            refuse_leftovers(self.folder)
        with named_disk_errors("A new run", self.folder, "Or choose another output_dir."):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.take()
        try:
            own = whole_ledger(self.folder)
            there, known = Head(self.run_id) if own is None else own.head, self.lines.head
            if own is None and known.lines:
                raise ledger_file.damaged(self.folder / LEDGER, "it is missing")
            # Another process may have gone on since we read it, and died before we took the lock.
            if there != known:
                raise LedgerError(
                    f"{LEDGER} has {there.lines} lines now, but had {known.lines} when it was "
                    "read: another process has continued this run. Resume again, so that its "
                    "steps count."
                )
        except LedgerError:
            self.stop()
            raise
        if own is not None:  # a kill may have left the head a line behind
            ledger_file.write_head(self.folder, own.head)
        return self.run_id

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of a run that has begun, whose ledger is on the disk as it is known here:
        nothing that is written inside can take back what another process did.

        Raises: LedgerError when another process is at work on this run, or has continued it.
        """
        if self._is_open or not (self.lines.digests and self.processes.is_main):
            yield
            return
        try:
            self._open_folder()
            self._is_open = True
            yield
        finally:
            self.stop()

    def weaken(self, known: Flags) -> None:
        """Note what weakens the claim; what does so once does so for good."""
        self.weaknesses = self.weaknesses.merged(known)

    @property
    def exhausted(self) -> bool:
        """Whether the next training step would pass the target."""
        return self.paid == 0 and self.budget.exhausted

    @property
    def steps_made(self) -> int:
        """Training steps in the ledger, without those that are paid and not made."""
        return self.ledger.steps(TRAINING) - self.paid - self.abandoned

    def pay(self, steps: int) -> None:
        """Note that so many steps, which are recorded, are to come."""
        self.abandoned += self.paid
        self.paid = steps

    def use_paid(self) -> None:
        """Take one of the steps that are paid ahead. Raises: LedgerError if none is left."""
        if self.paid == 0:
            raise LedgerError(
                "Expected a step of a recorded allocation, but its steps were all released. Take "
                "logical batches with `for batches in mechanism.logical_batches():`, which records "
                "the next allocation."
            )
        self.paid -= 1

    def record_earlier(self) -> None:
        """Begin the ledger with what earlier runs released of the same rows, in one line: a part of
        it would look like all of it.

        Raises: BudgetExceededError: the earlier runs alone pass the target.
        """
        entries = self.earlier_entries
        if entries and not len(self.ledger):
            self.processes.agree(f"{len(entries)} entries of earlier runs begin the ledger")
            self.processes.together(lambda: self._append(*entries))

    def append(self, event: Event, purpose: str) -> None:
        """Record one release and make it durable: its line, and then the head.

        Only :class:`hf_dp.run.gate.Gate` calls it, before it lets a value out. Every process
        records it, and goes on only when it is on the main one's disk.

        Raises:
            BudgetExceededError: the target would be passed; nothing is recorded then.
            LedgerError: before :meth:`open`, or without what earlier runs released.
            DistributedError: the processes' ledgers differ, or another process failed.
        """
        entry = LedgerEntry(event, purpose)
        self.processes.agree(
            f"entry {len(self.ledger) + 1} of run {self.run_id} is to be {purpose}, {event}"
        )
        self.processes.together(lambda: self._append(entry))
        self.budget.released(entry)

    def _append(self, *entries: LedgerEntry) -> None:
        started = entries[0].purpose == EARLIER or self.ledger.steps(EARLIER)
        if not self._is_open or (self.earlier_entries and not started):
            raise _not_opened()
        self.budget.check(*entries)
        self._write(*entries)

    def note(self) -> None:
        """Give what weakens the claim a line, once a release has begun the ledger."""
        if self.lines.digests and not self.lines.weaknesses.includes(self.weaknesses):
            with self.held():
                self._write()

    def _write(self, *entries: LedgerEntry) -> None:
        """Add a line: to the file, durably, in the main process; in memory; and to the head."""
        lines = self.lines
        if not self.weaknesses.includes(lines.weaknesses):
            raise LedgerError(
                f"{LEDGER} records {lines.weaknesses} as what weakens the claim, but now it is "
                f"{self.weaknesses}. This cannot change during a run."
            )
        line = lines.next(entries, self.weaknesses)
        if not self.processes.is_main:
            return lines.take(line)
        if not self._is_open:
            raise _not_opened()
        with self._named_errors(self.folder):
            ledger_file.write_line(self.folder / LEDGER, lines.size, line)
            lines.take(line)
            ledger_file.write_head(self.folder, lines.head)

    @staticmethod
    def _named_errors(folder: Path) -> AbstractContextManager[None]:
        return named_disk_errors(
            f"The ledger ({LEDGER} and its head)",
            folder,
            "Nothing is released before it is recorded. Then set resume_from_checkpoint=True.",
        )

    def save(
        self,
        folder: str | os.PathLike[str],
        statement: PrivacyStatement,
        beside: Beside | None = None,
    ) -> None:
        """Write ``privacy.json`` into a folder, in the main process.

        Raises: as :meth:`held`; LedgerError when it does not continue what is stated there.
        """
        if not self.processes.is_main:
            return
        self.note()
        evidence = replace(self.lines.evidence(), plan=self.plan, weaknesses=self.weaknesses)
        with self._named_errors(Path(folder)):
            write(folder, evidence.stating(statement, beside or Beside()))

    def go_with(self, folder: str | os.PathLike[str]) -> None:
        """Put the head into the weights in a folder, and a copy of the ledger beside them.

        Raises: as :meth:`held`; LedgerError when a file there is of another run, or was saved later
            in this one.
        """
        folder = Path(folder)
        with self.held():
            self.note()
            for path in weights_files(folder):
                put_head(path, self.lines.head)
            if self.lines.digests and folder.resolve() != self.folder.resolve():
                with self._named_errors(folder):
                    whole = (self.folder / LEDGER).read_bytes()[: self.lines.size]
                    replace_file(folder / COPY, [whole])

    def resume(self, checkpoint: str | os.PathLike[str]) -> None:
        """Take over the ledger of the *run*, so that repeated steps and branches all count.

        Raises: LedgerError when checkpoint or run has no ledger, when they are of different runs,
            when the run's does not contain what anything else knows, or when the plan changed.
        """
        own, copy = self.processes.on_main(lambda: self._ledgers(Path(checkpoint)))
        self.lines = own
        self.budget = Budget(self.plan, own.ledger)
        self.lost = own.ledger.steps() - copy.ledger.steps()
        self.weaken(own.weaknesses)

    def _ledgers(self, checkpoint: Path) -> tuple[Lines, Lines]:
        """Return (the run's ledger, the checkpoint's copy)."""
        if (copy := ledger_file.read_copy(checkpoint)) is None:
            raise ledger_file.damaged(checkpoint / COPY, "it is missing")
        if (own := whole_ledger(self.folder, checkpoint)) is None:
            raise ledger_file.damaged(self.folder / LEDGER, "it is missing")
        _refuse_another_plan(own.plan, self.plan)
        named, begun = self.weaknesses.earlier, own.weaknesses.earlier
        if {each.run_id for each in named} != {each.run_id for each in begun}:
            raise LedgerError(
                "Expected `earlier_runs` to name what the ledger of this run began with, got "
                "others, which its statement would not cover. Name the same runs as at the start, "
                "or start again in another output_dir."
            )
        now = Ledger()
        for entry in self.earlier_entries:
            now.append(entry.event, entry.purpose)
        if [each for each in own.ledger.entries if each.purpose == EARLIER] != [*now.entries]:
            raise LedgerError(
                "Expected `earlier_runs` to have released what the ledger of this run began with, "
                f"{own.ledger.steps(EARLIER)} releases, got {now.steps()}: one of them has gone on "
                "since then, or an older copy of it is named. This run's target and statement do "
                "not count what it released since. Begin a new run, in another output_dir, whose "
                "`earlier_runs` name this one and those that have gone on: that counts all of it."
            )
        return own, copy

    def stop(self) -> None:
        """Release the lock, so that another process may continue this run."""
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _not_opened() -> LedgerError:
    return LedgerError(
        "This run has not been opened: another process may be working on it, and its "
        "ledger does not yet hold what `earlier_runs` released. Open it first: "
        "`mechanism.logical_batches()`, `run.open()` or `DPTrainer.train()` does."
    )


def _refuse_another_plan(then: PrivacyPlan, now: PrivacyPlan) -> None:
    old, new = ({**plan.to_dict(), **plain(plan.mechanism)} for plan in (then, now))
    # What the user sets comes before what is derived from it.
    # (With a target the noise is derived from all others, and from the steps.)
    others = (old | new).keys() - {*_ARGUMENTS, "mechanism", "steps"}
    for name in [*_ARGUMENTS, *sorted(others, key=lambda each: (each.startswith("noise"), each))]:
        if old.get(name) != new.get(name):
            argument, why = _ARGUMENTS.get(name, ""), ""
            derived = name == "noise_multiplier" and then.target_epsilon is not None
            if derived and then.steps != now.steps:
                name, argument = "steps", "`max_steps`, `num_train_epochs`"
                why = (
                    f" The noise was chosen so that {then.steps} steps spend target_epsilon. To "
                    "stop a run earlier and resume it, keep the number of steps, and stop by a "
                    "callback or Ctrl-C."
                )
            raise LedgerError(
                f"Cannot resume: `{name}`{argument and f' ({argument})'} is {new.get(name)!r} but "
                f"the run was started with {old.get(name)!r}.{why} Resume with the same arguments "
                "and data, or start a new run in a new output_dir."
            )
