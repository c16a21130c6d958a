"""The ledger of one run on disk.

An entry is durable before the release that it records becomes visible to anyone. The ledger cannot
go back unnoticed: a mark of how far it has come (:mod:`hf_dp.run.mark`) is made durable after each
entry, and travels with checkpoints and weights. A ledger that lacks what a mark knows is refused.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from filelock import FileLock

from hf_dp.accounting import EARLIER, TRAINING, Event, Ledger, LedgerEntry
from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.budget import Budget
from hf_dp.run.disk import named_disk_errors
from hf_dp.run.folder import refuse_foreign_ledger, refuse_leftovers, refuse_uncounted
from hf_dp.run.lock import lock_run
from hf_dp.run.lost import recorded_since
from hf_dp.run.mark import COPIED_MARK, RUN_MARK, Mark, stamp, write_mark
from hf_dp.run.marks import marks_of_run, refuse_unknown_to, refuse_without_own_mark
from hf_dp.run.resume import other_earlier_runs, records_to_resume
from hf_dp.run.weights_file import weights_files
from hf_dp.statement.digests import Beside
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, read, to_record, write
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.weaknesses import NAMES, EarlierRun, Flags, Weaknesses


class RunLedger:
    """The append-only ledger of one run, kept in ``output_dir``; checkpoints hold copies.

    The arguments ``insecure_seed``, ``released`` and ``earlier`` and the attributes
    ``model_selection``, ``rows_are_chunks``, ``evaluation_compared``, ``other_training`` and
    ``observers`` weaken the claim. What weakens it once weakens it for good.

    Args:
        folder: the run's output folder.
        plan: what the run does; a resumed run must have the same plan.
        insecure_seed: whether the randomness can be reproduced.
        released: names of what is released without noise.
        earlier: what the earlier runs on the same rows claim.
        earlier_entries: what they released; nothing else may be recorded before it.
        processes: those of the run. The main one keeps the files, the others a copy in memory.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrivacyPlan,
        *,
        insecure_seed: bool = False,
        released: Iterable[str] = (),
        earlier: Iterable[EarlierRun] = (),
        earlier_entries: Sequence[LedgerEntry] = (),
        processes: Processes | None = None,
    ):
        self.folder, self.plan = Path(folder), plan
        self.insecure_seed, self.released, self.earlier = (
            insecure_seed,
            tuple(released),
            tuple(earlier),
        )
        self._earlier_entries = tuple(earlier_entries)
        self.model_selection = self.rows_are_chunks = False
        self.evaluation_compared = True
        self.other_training: str | None = None
        self.observers: tuple[str, ...] = ()
        self.ledger = Ledger()
        self.lost: dict[str, int] = {}  # releases by purpose since the checkpoint resumed from
        self.paid = 0  # steps in the ledger, recorded with those before them, that are yet to come
        self.run_id = uuid.uuid4().hex
        self.budget = Budget(plan, self.ledger)
        self.processes = processes or Processes()
        self._is_open = False
        self._lock: FileLock | None = None

    def go_to(self, folder: str | os.PathLike[str]) -> None:
        """Keep the ledger in another folder, as long as nothing is recorded and none is taken."""
        if not (self._is_open or len(self.ledger)):
            self.folder = Path(folder)

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Begin, or continue, ``planned_steps`` training steps.

        Selections will make ``planned_releases`` more releases between them.

        Raises: as :meth:`open` and :meth:`hf_dp.run.budget.Budget.start`.
        """
        self.open()
        self.paid = 0
        self.budget.start(planned_steps, planned_releases)

    def take(self) -> None:
        """Take the lock of the run in the folder, if there is one; :meth:`stop` releases it.

        Raises: LedgerError when another process is at work on it.
        """
        if self.folder.is_dir():
            self._lock = self._lock or lock_run(self.folder)

    def open(self) -> None:
        """Take the folder for this run. Nothing may be recorded before.

        Raises: LedgerError when the folder holds another run's ledger, which would be lost, when
            another process is at work on this run, or when a mark knows steps that the ledger
            lacks.
        """
        self.run_id, known = self.processes.on_main(self._open_folder)
        self.weaken(known)
        self._is_open = True

    def _open_folder(self) -> tuple[str, Weaknesses]:
        """Take the folder; return the run's id and what weakens it."""
        refuse_foreign_ledger(self.folder, self.run_id)
        if not len(self.ledger):
            refuse_leftovers(self.folder)
        refuse_uncounted(self.folder, {claim.run_id for claim in self.earlier})
        with named_disk_errors("A new run", self.folder, "Or choose another output_dir."):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or lock_run(self.folder)
        try:
            record = self._refuse_stale()
            found = marks_of_run(self.folder)
            refuse_unknown_to(self.mark, self.folder, found)
            refuse_without_own_mark(self.mark, self.folder, found)
        except LedgerError:
            self.stop()
            raise
        known = reduce(Weaknesses.merged, (item.mark.weaknesses for item in found), Weaknesses())
        if record is not None:
            # A run of an earlier version has no mark yet; a kill may have left it a step behind.
            write_mark(
                self.folder / RUN_MARK,
                replace(Mark.of(record), weaknesses=record.weaknesses.merged(known)),
            )
        return self.run_id, known

    @property
    def weaknesses(self) -> Weaknesses:
        """What weakens the claim of this run, as far as is known now."""
        return Weaknesses(**{name: getattr(self, name) for name in NAMES})

    @property
    def mark(self) -> Mark:
        """How far this run has come."""
        return Mark(self.run_id, self.ledger, self.weaknesses)

    def weaken(self, known: Flags) -> None:
        """Note what weakens the claim, beside what is known to."""
        for name, value in vars(self.weaknesses.merged(known)).items():
            setattr(self, name, value)

    @property
    def exhausted(self) -> bool:
        """Whether the next training step would pass the target."""
        return self.paid == 0 and self.budget.exhausted

    @property
    def steps_made(self) -> int:
        """Training steps in the ledger, without those that are paid ahead."""
        return self.ledger.steps(TRAINING) - self.paid

    def use_paid(self) -> None:
        """Take one of the steps that are paid ahead. Raises: LedgerError if none is left."""
        if self.paid == 0:
            raise LedgerError(
                "Expected a step of a recorded allocation, but its steps were all released. Take "
                "logical batches with `for batches in mechanism.logical_batches():`, which records "
                "the next allocation."
            )
        self.paid -= 1

    def record_earlier(self, entries: Sequence[LedgerEntry]) -> None:
        """Begin the ledger with what earlier runs released of the same rows.

        A ledger that has already begun must hold exactly these entries of earlier runs.

        Raises:
            LedgerError: the ledger holds other entries, because other ``earlier_runs`` were named
                or a first attempt was killed while they were recorded.
            BudgetExceededError: the earlier runs alone pass the target.
        """
        if not len(self.ledger):
            if entries:
                self.processes.agree(f"{len(entries)} entries of earlier runs begin the ledger")
                self.processes.together(lambda: self._append(*entries))
            return
        expected = Ledger()
        for entry in entries:
            expected.append(entry.event, entry.purpose)
        if [entry for entry in self.ledger.entries if entry.purpose == EARLIER] != list(
            expected.entries
        ):
            raise other_earlier_runs()

    def append(self, event: Event, purpose: str) -> None:
        """Record one release and make it durable, in the ledger and then in its mark.

        Outside this class only :class:`hf_dp.run.gate.Gate` calls it, before it lets a value out.
        Every process records it, and goes on only when it is on the main one's disk.

        Raises: BudgetExceededError before anything is recorded when the target would be passed;
            LedgerError before :meth:`open`, or without what earlier runs released; DistributedError
            when the processes' ledgers differ, or when another one failed.
        """
        self.processes.agree(
            f"entry {len(self.ledger) + 1} of run {self.run_id} is to be {purpose}, {event}"
        )
        self.processes.together(lambda: self._append(LedgerEntry(event, purpose)))
        self.budget.released(event, purpose)

    def _append(self, *entries: LedgerEntry) -> None:
        """Record entries and make them durable together: a part of what earlier runs released would
        look like all of it."""
        if not self._is_open:
            raise LedgerError(
                "This run has not been opened, so another process may be at work on it. Open it "
                "first: `mechanism.logical_batches()`, `run.open()` or `DPTrainer.train()` does."
            )
        for entry in entries:
            started = entry.purpose == EARLIER or self.ledger.steps(EARLIER)
            if self._earlier_entries and not started:
                raise LedgerError(
                    "The ledger does not hold yet what `earlier_runs` released. Call `run.open()` "
                    "first."
                )
            self.budget.check(entry.event, entry.purpose)
            self.ledger.append(entry.event, entry.purpose)
        self.save(self.folder)

    def save(
        self,
        folder: str | os.PathLike[str],
        statement: PrivacyStatement | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Write ``privacy.json``, and then the mark, into ``folder``, in the main process.

        Args: beside: what lies beside it there: card and weights.

        Raises: LedgerError when this ledger does not continue the one there. Both files are then
            left as they are.
        """
        if not self.processes.is_main:
            return
        record = to_record(
            self.plan,
            self.ledger,
            run_id=self.run_id,
            weaknesses=self.weaknesses,
            statement=statement,
            beside=beside or Beside(),
        )
        with named_disk_errors(
            f"The ledger ({FILE_NAME} and its mark)",
            folder,
            "Nothing is released before it is recorded. Then resume_from_checkpoint=True goes on.",
        ):
            write(folder, record)
            self._write_mark(Path(folder))

    def mark_weights(self, folder: str | os.PathLike[str]) -> None:
        """Put the mark into ``folder`` and into the metadata of the weights there.

        Tensors stay as they are.

        Raises: LedgerError when a file there carries the mark of another run, or one that knows
            more than this ledger.
        """
        folder = Path(folder)
        for path in weights_files(folder):
            stamp(path, self.mark)
        self._write_mark(folder)

    def _write_mark(self, folder: Path) -> None:
        own = folder.resolve() == self.folder.resolve()
        write_mark(folder / (RUN_MARK if own else COPIED_MARK), self.mark)

    def resume(self, checkpoint: str | os.PathLike[str]) -> None:
        """Take over the ledger of the *run*, so that repeated steps and branches all count.

        Raises: LedgerError as :func:`hf_dp.run.resume.records_to_resume`.
        """
        claims = {claim.run_id for claim in self.earlier}
        run, at_checkpoint = self.processes.on_main(
            lambda: records_to_resume(self.folder, Path(checkpoint), self.plan, claims)
        )
        self.ledger, self.run_id = run.ledger, run.run_id
        self.budget = Budget(self.plan, self.ledger)
        self.lost = recorded_since(at_checkpoint.ledger, run.ledger)
        self.weaken(run.weaknesses)
        self.weaken(at_checkpoint.weaknesses)

    def stop(self) -> None:
        """Release the lock, so that another process may continue this run."""
        self._is_open = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _refuse_stale(self) -> PrivacyRecord | None:
        """Raise LedgerError when the file changed between our reading it and taking the lock.

        Another process may have gone on with the run in between, and died.
        """
        if not Path(self.folder, FILE_NAME).exists():
            return None
        on_disk = read(self.folder)
        if on_disk.ledger.to_list() != self.ledger.to_list():
            raise LedgerError(
                f"The run's {FILE_NAME} records {on_disk.ledger.steps()} steps now, and recorded "
                f"{self.ledger.steps()} when it was read: another process has gone on with this "
                "run. Resume again, so that its steps count."
            )
        return on_disk
