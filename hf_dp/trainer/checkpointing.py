"""The Trainer's checkpoints in a private run: written aside, complete, and resumed knowingly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_dp.clipping.sharding import is_sharded
from hf_dp.errors import HfDpError, StepError
from hf_dp.run.checkpoint import SAVING, checkpoint_of, publish, rotate, stage, tidy
from hf_dp.run.ledger_file import read_copy
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.shortage import named_disk_errors
from hf_dp.trainer.logs import ReleasedLogs
from hf_dp.trainer.resumed import (
    load_prompts,
    refuse_other_adapter,
    refuse_other_state,
    save_prompts,
)

logger = logging.get_logger(__name__)

_GO_ON = "Correct what failed, and go on with resume_from_checkpoint=True."


class Checkpointing(ReleasedLogs):
    """A Trainer whose checkpoints appear complete or not at all, in private modes."""

    _saving: Path | None = None  # the folder below which a checkpoint is being written

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, which is not in its place yet."""
        return self._saving is not None

    @property
    def _checkpoint_name(self) -> str:
        return f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _get_output_dir(self, trial: Any) -> str:
        """Return where checkpoints are written: aside, until they are complete."""
        return super()._get_output_dir(trial) if self._saving is None else str(self._saving)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside and put it in its place, in one step and durably.

        Raises: OutputError when the disk refuses. The checkpoints that were there are there still.
        """
        name = self._checkpoint_name
        if self._run is None:
            super()._save_checkpoint(model, trial)
            return self._save_prompts(os.path.join(self._get_output_dir(trial), name))
        folder, processes = self._run.folder, self._run.processes
        with named_disk_errors(name, folder, f"{_GO_ON} Every step is in the ledger."):
            processes.on_main(lambda: stage(folder))
            self._write_aside(folder, name, model, trial)
            processes.agree(f"{name} is written")
            processes.on_main(lambda: self._publish(folder, name))
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(self.folder, name))

    def _publish(self, folder: Path, name: str) -> None:
        publish(folder, name)
        rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _write_aside(self, folder: Path, name: str, model: Any, trial: Any) -> None:
        self.keep_released()
        self._saving = folder / SAVING
        aside = self._saving / name
        try:
            super()._save_checkpoint(model, trial)
            self._save_prompts(aside)
        finally:
            self._saving = None
            is_best = self.state.best_model_checkpoint == str(aside)
            if is_best:
                self.state.best_model_checkpoint = os.path.join(self.folder, name)
        if is_best and self.args.should_save:
            self.state.save_to_json(str(aside / "trainer_state.json"))

    def _save_prompts(self, checkpoint: str | Path) -> None:
        if self.args.should_save and not self._in_shards:
            save_prompts(self.model, checkpoint)

    @property
    def _in_shards(self) -> bool:
        return bool(self.is_fsdp_enabled) or is_sharded(self.model)

    # -- steps that fail --

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch what a step takes, as Trainer does; raises as :meth:`saves_what_ran`."""
        if self._run is None:
            return super().get_batch_samples(*args, **kwargs)
        told = nullcontext() if self._in_shards else self._run.processes.telling()
        with self.saves_what_ran(), told, self.silent():
            return super().get_batch_samples(*args, **kwargs)

    @contextmanager
    def saves_what_ran(self) -> Iterator[None]:
        """Save a checkpoint of the steps so far if a step fails inside, before its release.

        All processes must hear of it inside.

        Raises: StepError, or the error itself if it is one of ours; both say what is spent.
        """
        run, done = self._run, self.state.global_step
        assert run is not None
        try:
            yield
        except Exception as problem:
            said = "No step ran before it: nothing is spent."
            if len(run.ledger):
                said = f"{done} steps ran before it, and count."
                if run.established:
                    said += f" Of them, epsilon {run.epsilon().rounded_up()} is spent."
            said += f" {self._saved_where(run)} {_GO_ON}"
            if isinstance(problem, HfDpError):
                raise type(problem)(f"{problem} {said}") from problem
            raise StepError(
                f"Step {done + 1} failed before anything of it was released "
                f"({type(problem).__name__}: {problem}). {said}"
            ) from problem

    def _saved_where(self, run: PrivateRun) -> str:
        checkpoint = run.folder / self._checkpoint_name
        if not self.state.global_step or (self._in_shards and not run.processes.alone):
            return "Nothing new was saved."  # in shards, the others may wait in a forward
        try:
            if not run.processes.on_main(checkpoint.exists):
                self._save_checkpoint(self.model, None)
        except (HfDpError, OSError) as also:
            return f"Their weights could not be saved ({also})."
        return f"Their weights are in {checkpoint}."

    # -- the weights that are saved --

    def put_average(self) -> None:
        """Let a schedule-free optimizer put the average, which is what it evaluates, in the place
        of the point at which it takes gradients. Its next step puts that back."""
        if callable(put := getattr(self.optimizer, "eval", None)):
            put()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, as Trainer does, and whole also where checkpoints hold shards."""
        self.put_average()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        in_shards = plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)
        of_checkpoint = _internal_call and self.is_saving  # and not what is pushed
        if self._run is None or plugin is None or not in_shards or of_checkpoint:
            super().save_model(output_dir, _internal_call)
            if self._run is not None and in_shards and self.args.should_save:
                folder = output_dir or self.folder
                os.makedirs(folder, exist_ok=True)
                self._write_beside_weights(folder)
            return
        before = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(before)

    def _write_beside_weights(self, folder: str) -> None:
        """Write what belongs beside a run's weights: selection, ledger, statement and card."""
        raise NotImplementedError

    # -- going on --

    def _checkpoint_of(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checkpoint to go on from, and take over the run's ledger; None for a new run.

        Raises: LedgerError as :func:`hf_dp.run.checkpoint.checkpoint_of` and ``RunLedger.resume``.
        """
        run = self._run
        assert run is not None
        # No process reads the folder any more as it was when its trainer was made.
        run.processes.agree(f"resume {resume_from_checkpoint}")
        if not resume_from_checkpoint:
            return None
        checkpoint = run.processes.on_main(lambda: self._chosen(run, resume_from_checkpoint))
        copy = read_copy(checkpoint)
        known = "not there" if copy is None else copy.head.digest
        run.processes.refuse_differences({f"the ledger in {checkpoint}": known})
        run.book.resume(checkpoint)
        if run.book.lost and run.processes.is_main:
            logger.warning(
                "Going on from %s. The ledger records %s releases after it: they are lost to the "
                "model, but spent all the same, and count towards epsilon.",
                checkpoint.name,
                f"{run.book.lost:,}",
            )
        return str(checkpoint)

    def _chosen(self, run: PrivateRun, resume_from_checkpoint: str | bool) -> Path:
        """Clean up after a kill, and choose the checkpoint to go on from, with the run's lock."""
        run.book.take()
        try:
            tidy(run.folder)
            return checkpoint_of(resume_from_checkpoint, Path(self.folder))
        finally:
            run.book.stop()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights, as Trainer does, into the parameters that the checkpoint trained.

        Raises: ConfigError, before anything is loaded, when other parameters train now.
        """
        refuse_other_adapter(self.model, resume_from_checkpoint, self._in_shards)
        if self._in_shards or not load_prompts(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, as Trainer does."""
        self.put_average()  # first: it would take what is loaded for the point of the last step
        best = str(self.state.best_model_checkpoint)
        if self._in_shards or not load_prompts(self.model, best):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and schedule, as Trainer does.

        Raises: ConfigError, before a step, for a state of parameters of other shapes.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            refuse_other_state(self.optimizer, checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, unless all steps were made: Trainer would make one more in a run that is
        resumed from its last checkpoint."""
        if self._run is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
