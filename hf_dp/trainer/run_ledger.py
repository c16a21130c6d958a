"""The ledger of one run on disk: made durable before the release it records becomes visible to
anyone.

It cannot go back: a mark of how far it has come (:mod:`hf_dp.cards.mark`) is made durable after
each of its entries, and travels with checkpoints and weights. A ledger that lacks what a mark knows
is refused.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from filelock import FileLock

from hf_dp.accounting import (
    BOUNDS,
    EARLIER,
    SELECTION,
    TRAINING,
    Event,
    Ledger,
    LedgerEntry,
    calibrate_steps,
    epsilon,
)
from hf_dp.cards.document import FILE_NAME, PrivacyRecord, document, read, write
from hf_dp.cards.lock import lock_run
from hf_dp.cards.mark import COPIED_MARK, RUN_MARK, Mark, in_words, stamp, write_mark
from hf_dp.cards.marks import (
    marks_in,
    marks_of_run,
    read_copy,
    rebuild_advice,
    refuse_unknown_to,
    refuse_without_own_mark,
)
from hf_dp.cards.statement import PrivacyStatement
from hf_dp.cards.weaknesses import NAMES, EarlierRun, Weaknesses
from hf_dp.cards.weights_file import weights_files
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.plan import PrivacyPlan
from hf_dp.trainer.run_folder import checkpoint_of as checkpoint_of
from hf_dp.trainer.run_folder import refuse_foreign_ledger, refuse_leftovers


class RunLedger:
    """One append-only ledger per run, kept in ``output_dir``; checkpoints hold copies.

    Args:
        folder: the run's output folder.
        plan: what the run does; a resumed run must have the same.
        insecure_seed, released, earlier: what weakens the claim, as are the attributes
            ``model_selection``, ``rows_are_chunks`` and ``evaluation_compared``. Once true of a
            run, true for good (of the last: once False).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrivacyPlan,
        *,
        insecure_seed: bool = False,
        released: Iterable[str] = (),
        earlier: Iterable[EarlierRun] = (),
    ):
        self.folder, self.plan = Path(folder), plan
        self.insecure_seed, self.released, self.earlier = (
            insecure_seed,
            tuple(released),
            tuple(earlier),
        )
        self.model_selection = self.rows_are_chunks = False
        self.evaluation_compared = True
        self.ledger = Ledger()
        self.run_id = uuid.uuid4().hex
        self._allowed = math.inf
        self._reserved = 0  # releases of selections to come, which training must leave room for
        self._goal: int | None = (
            None  # training steps that the ledger will hold when this process has made its own
        )
        self._lock: FileLock | None = None

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Begin (or go on with) ``planned_steps`` training steps, and so many releases for
        selections between them.

        Raises: as :meth:`open`; BudgetExceededError when not one further step fits under the
            target.
        """
        self.open()
        self._reserved = planned_releases
        self._goal = self.ledger.steps(TRAINING) + planned_steps
        self._allowed = self.allowed_steps(planned_steps)
        if self._allowed <= self.ledger.steps(TRAINING) and planned_steps > 0:
            raise BudgetExceededError(
                "This run has spent epsilon "
                f"{self.ledger.epsilon(self.plan.delta, self.plan.accountant).rounded_up()} of "
                f"target_epsilon={self.plan.target_epsilon} in {self.ledger.steps()} steps; one "
                "more would pass it. Publish what there is, or start a new run with a new "
                "output_dir (both then count together)."
            )

    def open(self) -> None:
        """Take the folder for this run; until then nothing may be recorded.

        Raises: LedgerError when the folder holds another run's ledger, which would be lost; when
            another process is at work on this run; when a mark knows steps that the ledger lacks.
        """
        refuse_foreign_ledger(self.folder, self.run_id)
        if not len(self.ledger):
            refuse_leftovers(self.folder)
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
        self._weaken(known)
        if (
            record is not None
        ):  # a run of an earlier version has no mark yet; a kill may have left one a step behind
            write_mark(
                self.folder / RUN_MARK,
                replace(Mark.of(record), weaknesses=record.weaknesses.merged(known)),
            )

    @property
    def weaknesses(self) -> Weaknesses:
        """What weakens the claim of this run, as far as it is known now."""
        return Weaknesses(**{name: getattr(self, name) for name in NAMES})

    @property
    def mark(self) -> Mark:
        """How far this run has come."""
        return Mark(self.run_id, self.ledger, self.weaknesses)

    def _weaken(self, known: Weaknesses) -> None:
        for name, value in vars(self.weaknesses.merged(known)).items():
            setattr(self, name, value)

    def allowed_steps(self, planned_steps: int) -> float:
        """The largest number of training steps in the ledger that stays within the target, infinity
        when none was set."""
        done = self.ledger.steps(TRAINING)
        if self.plan.target_epsilon is None or not self.plan.releases_each_step:
            return math.inf
        if self.plan.accountant not in BOUNDS:
            return (
                self.plan.steps
            )  # DP-FP as published: steps beyond those of its figure would not have that figure
        if done + planned_steps <= self.plan.steps and self._selections_as_planned():
            return self.plan.steps  # the plan was calibrated to meet the target at exactly these
        prior = self.ledger.events
        if self._reserved and self.plan.selection is not None:
            prior = (*prior, self.plan.selection.event(self._reserved))
        if epsilon(prior, self.plan.delta, self.plan.accountant).value > self.plan.target_epsilon:
            return done
        return done + calibrate_steps(
            self.plan.target_epsilon,
            self.plan.delta,
            self.plan.noise_multiplier,
            self.plan.sample_rate,
            self.plan.accountant,
            prior_events=prior,
            event=self.plan.step_event,
        )

    @property
    def exhausted(self) -> bool:
        """True when the next training step would pass the target."""
        return self.ledger.steps(TRAINING) + 1 > self._allowed

    def _selections_as_planned(self) -> bool:
        planned = 0 if self.plan.selection is None else self.plan.selection.iterations
        return self.ledger.steps(SELECTION) + self._reserved <= planned

    def record_earlier(self, entries: Sequence[LedgerEntry]) -> None:
        """Begin the ledger with what earlier runs released of the same rows; a ledger already begun
        must hold just that.

        Raises: LedgerError when it holds something else: other ``earlier_runs`` were named, or a
            first attempt was killed while they were recorded; BudgetExceededError.
        """
        if not len(self.ledger):
            for entry in entries:
                self.append(entry.event, entry.purpose)
            return
        expected = Ledger()
        for entry in entries:
            expected.append(entry.event, entry.purpose)
        if [entry for entry in self.ledger.entries if entry.purpose == EARLIER] != list(
            expected.entries
        ):
            raise _other_earlier_runs()

    def append(self, event: Event, purpose: str) -> None:
        """Record one release and make it durable, in the ledger and then in its mark; only then may
        its result be used.

        Raises: BudgetExceededError before anything is recorded when the target would be passed.
        """
        if self.exhausted if purpose == TRAINING else self._would_pass(event):
            raise BudgetExceededError(
                f"The next step of {purpose} would pass target_epsilon={self.plan.target_epsilon} "
                f"after {self.ledger.steps()} steps."
            )
        self.ledger.append(event, purpose)
        self.save(self.folder)
        if purpose != TRAINING:
            self._reserved = max(0, self._reserved - event.steps)
        if purpose != TRAINING and self._goal is not None:
            # Less may be left to train with than there was at the start.
            self._allowed = self.allowed_steps(self._goal - self.ledger.steps(TRAINING))

    def _would_pass(self, event: Event) -> bool:
        if self.plan.target_epsilon is None:
            return False
        after = epsilon((*self.ledger.events, event), self.plan.delta, self.plan.accountant)
        return after.value > self.plan.target_epsilon

    def save(
        self, folder: str | os.PathLike[str], statement: PrivacyStatement | None = None
    ) -> None:
        """Write ``privacy.json``, and then the mark, into ``folder``.

        Raises: LedgerError, and leaves both as they are, where this ledger does not continue the
            one there.
        """
        record = document(
            self.plan,
            self.ledger,
            run_id=self.run_id,
            weaknesses=self.weaknesses,
            statement=statement,
        )
        write(folder, record)
        self._write_mark(Path(folder))

    def mark_weights(self, folder: str | os.PathLike[str]) -> None:
        """Put the mark into ``folder`` and into the metadata of the weights there; tensors stay as
        they are.

        Raises: LedgerError when a file there carries the mark of another run, or knows more than
            this ledger.
        """
        folder = Path(folder)
        for path in weights_files(folder):
            stamp(path, self.mark)
        self._write_mark(folder)

    def _write_mark(self, folder: Path) -> None:
        own = folder.resolve() == self.folder.resolve()
        write_mark(folder / (RUN_MARK if own else COPIED_MARK), self.mark)

    def resume(self, checkpoint: str | os.PathLike[str]) -> None:
        """Take over the *run's* ledger, so that repeated steps and branches all count.

        Raises: LedgerError when the checkpoint or the run has no ledger, when they are of different
            runs, when the run's is shorter than the checkpoint's, or when the plan changed.
        """
        at_checkpoint = read_copy(Path(checkpoint))
        try:
            run = read(self.folder)
        except LedgerError as problem:
            raise LedgerError(
                f"Cannot resume: the run's own {FILE_NAME} in output_dir is missing or damaged "
                f"({problem}). The checkpoint's copy does not know the steps made after it. Resume "
                "with the output_dir of the original run. If this is it: "
                f"{rebuild_advice(self.folder)}"
            ) from problem
        if run.run_id != at_checkpoint.run_id:
            raise LedgerError(
                f"Cannot resume: the checkpoint belongs to run {at_checkpoint.run_id}, output_dir "
                f"to run {run.run_id}. Use the output_dir that the checkpoint was written under."
            )
        if not run.ledger.extends(at_checkpoint.ledger):
            raise LedgerError(
                f"Cannot resume: the run's ledger ({in_words(run.ledger)}) does not contain the "
                f"checkpoint's ({in_words(at_checkpoint.ledger)}). One of the two {FILE_NAME} "
                f"files was replaced. {rebuild_advice(self.folder)}"
            )
        found = [*marks_of_run(self.folder), *marks_in(Path(checkpoint))]
        refuse_unknown_to(Mark.of(run), self.folder, found)
        for name, now in self.plan.to_dict().items():
            then = run.plan.to_dict()[name]
            if name != "steps" and now != then:
                raise LedgerError(
                    f"Cannot resume: `{name}` is {now!r} but the run was started with {then!r}. "
                    "Resume with the same arguments and data, or start a new run in a new "
                    "output_dir."
                )
        if {claim.run_id for claim in self.earlier} != {
            claim.run_id for claim in run.weaknesses.earlier
        }:
            raise _other_earlier_runs()
        self.ledger, self.run_id = run.ledger, run.run_id
        self._weaken(run.weaknesses)
        self._weaken(at_checkpoint.weaknesses)

    def stop(self) -> None:
        """Let another process go on with this run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _refuse_stale(self) -> PrivacyRecord | None:
        """The file may have grown between our reading it and the lock: another process went on, and
        died."""
        if not Path(self.folder, FILE_NAME).exists():
            return None
        on_disk = read(self.folder)
        if on_disk.ledger.to_list() != self.ledger.to_list():
            raise LedgerError(
                f"The run's {FILE_NAME} records {on_disk.ledger.steps()} steps, and "
                f"{self.ledger.steps()} when it was read: another process has gone on with this "
                "run. Resume again, so that its steps count."
            )
        return on_disk


def _other_earlier_runs() -> LedgerError:
    return LedgerError(
        "Expected `earlier_runs` to name what the ledger of this run began with, got others: its "
        "statement would not cover what is named. Name the same runs as at the start, or start "
        "anew in another output_dir."
    )
