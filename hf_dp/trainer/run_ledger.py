"""The ledger of one run on disk: made durable before the release it records becomes visible to anyone."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer_utils import get_last_checkpoint

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
from hf_dp.cards.document import FILE_NAME, document, read, write
from hf_dp.cards.statement import PrivacyStatement
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.plan import PrivacyPlan


class RunLedger:
    """One append-only ledger per run, kept in ``output_dir``; checkpoints hold copies.

    Args:
        folder: the run's output folder.
        plan: what the run does; a resumed run must have the same.
        insecure_seed, released, model_selection: what weakens the claim; once true of a run, true for good.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrivacyPlan,
        *,
        insecure_seed: bool = False,
        released: Iterable[str] = (),
    ):
        self.folder, self.plan = Path(folder), plan
        self.insecure_seed, self.released, self.model_selection = insecure_seed, tuple(released), False
        self.ledger = Ledger()
        self.run_id = uuid.uuid4().hex
        self._allowed = math.inf
        self._reserved = 0  # releases of selections to come, which training must leave room for
        self._goal: int | None = None  # training steps that the ledger will hold when this process has made its own
        self._lock: FileLock | None = None

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Begin (or go on with) ``planned_steps`` training steps, and so many releases for selections between them.

        Raises: as :meth:`open`; BudgetExceededError when not one further step fits under the target.
        """
        self.open()
        self._reserved = planned_releases
        self._goal = self.ledger.steps(TRAINING) + planned_steps
        self._allowed = self.allowed_steps(planned_steps)
        if self._allowed <= self.ledger.steps(TRAINING) and planned_steps > 0:
            raise BudgetExceededError(
                f"This run has spent epsilon {self.ledger.epsilon(self.plan.delta, self.plan.accountant).rounded_up()} of "
                f"target_epsilon={self.plan.target_epsilon} in {self.ledger.steps()} steps; one more would pass it. Publish "
                "what there is, or start a new run with a new output_dir (both then count together)."
            )

    def open(self) -> None:
        """Take the folder for this run; until then nothing may be recorded.

        Raises: LedgerError when the folder holds another run's ledger, which would be lost, or another process is at work
            on this run.
        """
        refuse_foreign_ledger(self.folder, self.run_id)
        if not len(self.ledger):
            _refuse_leftovers(self.folder)
        self._acquire()
        self._refuse_stale()

    def allowed_steps(self, planned_steps: int) -> float:
        """The largest number of training steps in the ledger that stays within the target, infinity when none was set."""
        done = self.ledger.steps(TRAINING)
        if self.plan.target_epsilon is None or not self.plan.releases_each_step:
            return math.inf
        if self.plan.accountant not in BOUNDS:
            return self.plan.steps  # DP-FP as published: steps beyond those of its figure would not have that figure
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
        """Begin the ledger with what earlier runs released of the same rows; a ledger already begun must hold just that.

        Raises: LedgerError when it holds something else: other ``earlier_runs`` were named, or a first attempt was killed
            while they were recorded; BudgetExceededError.
        """
        if not len(self.ledger):
            for entry in entries:
                self.append(entry.event, entry.purpose)
            return
        expected = Ledger()
        for entry in entries:
            expected.append(entry.event, entry.purpose)
        if [entry for entry in self.ledger.entries if entry.purpose == EARLIER] != list(expected.entries):
            raise LedgerError(
                "Expected `earlier_runs` to name what the ledger of this run began with, got others: its statement would "
                "not cover what is named. Name the same runs as at the start, or start anew in another output_dir."
            )

    def append(self, event: Event, purpose: str) -> None:
        """Record one release and make it durable; only then may its result be used.

        Raises: BudgetExceededError before anything is recorded when the target would be passed.
        """
        if self.exhausted if purpose == TRAINING else self._would_pass(event):
            raise BudgetExceededError(
                f"The next step of {purpose} would pass target_epsilon={self.plan.target_epsilon} after "
                f"{self.ledger.steps()} steps."
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

    def save(self, folder: str | os.PathLike[str], statement: PrivacyStatement | None = None) -> None:
        """Write ``privacy.json`` into ``folder``; refuses to overwrite a ledger that this one does not continue."""
        record = document(
            self.plan,
            self.ledger,
            run_id=self.run_id,
            insecure_seed=self.insecure_seed,
            released=self.released,
            model_selection=self.model_selection,
            statement=statement,
        )
        write(folder, record)

    def resume(self, checkpoint: str | os.PathLike[str]) -> None:
        """Take over the *run's* ledger, so that repeated steps and branches all count.

        Raises: LedgerError when the checkpoint or the run has no ledger, when they are of different runs, when the run's is
            shorter than the checkpoint's, or when the plan changed.
        """
        at_checkpoint = read(checkpoint)
        try:
            run = read(self.folder)
        except LedgerError as problem:
            raise LedgerError(
                f"Cannot resume: the run's own {FILE_NAME} in output_dir is missing or damaged ({problem}). The checkpoint's "
                "copy does not know the steps made after it. Resume with the output_dir of the original run."
            ) from problem
        if run.run_id != at_checkpoint.run_id:
            raise LedgerError(
                f"Cannot resume: the checkpoint belongs to run {at_checkpoint.run_id}, output_dir to run {run.run_id}. Use "
                "the output_dir that the checkpoint was written under."
            )
        if not run.ledger.extends(at_checkpoint.ledger):
            raise LedgerError(
                f"Cannot resume: the run's ledger ({run.ledger.steps()} steps) does not contain the checkpoint's "
                f"({at_checkpoint.ledger.steps()} steps). One of the two {FILE_NAME} files was replaced."
            )
        for name, now in self.plan.to_dict().items():
            then = run.plan.to_dict()[name]
            if name != "steps" and now != then:
                raise LedgerError(
                    f"Cannot resume: `{name}` is {now!r} but the run was started with {then!r}. Resume with the same "
                    "arguments and data, or start a new run in a new output_dir."
                )
        self.ledger, self.run_id = run.ledger, run.run_id
        self.insecure_seed = self.insecure_seed or run.insecure_seed
        self.model_selection = self.model_selection or run.model_selection
        self.released = tuple(dict.fromkeys((*run.released, *self.released)))

    def stop(self) -> None:
        """Let another process go on with this run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _refuse_stale(self) -> None:
        """The file may have grown between our reading it and the lock: another process went on, and died."""
        if not Path(self.folder, FILE_NAME).exists():
            return
        on_disk = read(self.folder).ledger
        if on_disk.to_list() != self.ledger.to_list():
            self.stop()
            raise LedgerError(
                f"The run's {FILE_NAME} records {on_disk.steps()} steps, and {self.ledger.steps()} when it was read: another "
                "process has gone on with this run. Resume again, so that its steps count."
            )

    def _acquire(self) -> None:
        # Two processes resuming one run would each record "step 51" once, and the ledger would hold one of them. The
        # operating system drops the lock when a process dies. (Names starting with "_" are never pushed to the Hub.)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            return
        lock = FileLock(self.folder / "_privacy.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise LedgerError(
                f"Another process is training in output_dir {self.folder.name!r}; its steps and ours would share one ledger. "
                "Wait for it to end, or use another output_dir."
            ) from None
        self._lock = lock


def _refuse_leftovers(folder: Path) -> None:
    """A new run starts in a folder without another run's weights or logs, which its statement would seem to cover."""
    patterns = ("*.safetensors", "*.bin", "checkpoint-*", "trainer_state.json")
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise LedgerError(
            f"output_dir {folder.name!r} already holds {found[0]!r} but no {FILE_NAME}: weights or logs of a run that is not "
            "this one. Choose a new output_dir, so that the privacy statement is not taken to cover them."
        )


def refuse_foreign_ledger(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Raise LedgerError when a folder holds the ledger of a run other than ``run_id`` (None: of any run)."""
    if not Path(folder, FILE_NAME).exists():
        return
    earlier = read(folder)
    if earlier.run_id != run_id:
        raise LedgerError(
            f"The folder {Path(folder).name!r} already holds the {FILE_NAME} of another run ({earlier.ledger.steps()} steps). "
            "Pass resume_from_checkpoint to go on with that run, or choose another folder (a new output_dir): overwriting it "
            "would lose the evidence of what was spent, or leave it beside weights that it does not describe."
        )


def checkpoint_of(resume_from_checkpoint: str | bool | None, folder: str) -> str | None:
    """The checkpoint that Trainer's argument means: a path, True for the last one, nothing.

    Raises: LedgerError for True where there is none.
    """
    if resume_from_checkpoint is not True:
        return resume_from_checkpoint or None
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if last is None:
        next_move = "Pass False to start a run."
        if Path(folder, FILE_NAME).exists():
            next_move = (
                "The run ended before its first one, so there is nothing to go on from. Start one in a new output_dir: what "
                f"{FILE_NAME} here records was spent on the same rows, and both count together."
            )
        raise LedgerError(
            f"resume_from_checkpoint=True, but output_dir {Path(folder).name!r} has no checkpoint. {next_move}"
        )
    return last
