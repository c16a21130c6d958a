"""The Trainer's checkpoints in a private run: written aside, complete, and resumed knowingly.

Trainer loads weights by name, passing over what is missing, and an optimizer's state by place. A
step with the state of another parameter reads memory that is not its own, or moves weights by the
moments of others. So a checkpoint lists the parameters, and in which order an optimizer has them,
and a resume with others is refused.

Of an adapter of prompts PEFT saves the prompts alone. So checkpoints hold what makes them, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_dp.batches.structure import Batch
from hf_dp.clipping.sharding import is_sharded
from hf_dp.errors import ConfigError, HfDpError, StepError
from hf_dp.run.checkpoint import (
    SAVING,
    checkpoint_of,
    named_disk_errors,
    publish,
    rotate,
    stage,
    tidy,
)
from hf_dp.run.ledger_file import read_copy
from hf_dp.run.private_run import PrivateRun
from hf_dp.trainer.logs import ReleasedLogs
from hf_dp.tuners.base import refuse_other_options
from hf_dp.tuners.selection import FILE_NAME as SELECTION
from hf_dp.tuners.selection import SelectionConfig

logger = logging.get_logger(__name__)

_GO_ON = "Fix what failed, and continue with resume_from_checkpoint=True."
_PARAMETERS = "_parameters.json"
_PROMPTS = "_prompt_weights.safetensors"  # "_": nothing that is published, nor a model's weights
_ANEW = "or start a new run in a new output_dir."


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

    def _get_output_dir(self, trial: object) -> str:
        """Return where checkpoints are written: aside, until they are complete."""
        return super()._get_output_dir(trial) if self._saving is None else str(self._saving)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write a checkpoint aside and put it in its place, in one step and durably."""
        name = self._checkpoint_name
        if self._run is None:
            super()._save_checkpoint(model, trial)
            return self._save_beside(os.path.join(self._get_output_dir(trial), name))
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

    def _write_aside(self, folder: Path, name: str, model: nn.Module, trial: object) -> None:
        self.keep_released()
        self._saving = folder / SAVING
        aside = self._saving / name
        try:
            super()._save_checkpoint(model, trial)
            self._save_beside(aside)
        finally:
            self._saving = None
            is_best = self.state.best_model_checkpoint == str(aside)
            if is_best:
                self.state.best_model_checkpoint = os.path.join(self.folder, name)
        if is_best and self.args.should_save:
            self.state.save_to_json(str(aside / "trainer_state.json"))

    def _save_beside(self, checkpoint: str | Path) -> None:
        if not self.args.should_save:
            return
        listed = {"parameters": self._parameters(), "optimizer": self._order()}
        Path(checkpoint, _PARAMETERS).write_text(json.dumps(listed), encoding="utf-8")
        if not self.in_shards:
            save_prompts(self.model, checkpoint)

    def _parameters(self) -> dict[str, str]:
        """Return the shape of each parameter, and whether it may ever train, in words."""
        with self.tuner.all_that_may_train(self.model):
            return {
                name: f"{'trained' if p.requires_grad else 'frozen'}, of shape {tuple(p.shape)}"
                for name, p in self.model.named_parameters()
            }

    def _order(self) -> list[list[str]]:
        """Return the names of the optimizer's parameters, by its groups."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [[names.get(id(each), "") for each in group["params"]] for group in groups]

    @property
    def in_shards(self) -> bool:
        """Whether this process holds only a part of each weight (FSDP)."""
        return bool(self.is_fsdp_enabled) or is_sharded(self.model)

    # -- steps that fail --

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | int | None]:
        """Fetch what a step takes, as Trainer does; raises as :meth:`saves_what_ran`."""
        if self._run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        told = nullcontext() if self.in_shards else self._run.processes.telling()
        with self.saves_what_ran(), told, self.silent():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    @contextmanager
    def saves_what_ran(self) -> Iterator[None]:
        """Save a checkpoint of the steps so far if a step fails inside, before its release. The
        error says what is spent. All processes must hear of it inside."""
        run, done = self._run, self.state.global_step
        assert run is not None
        try:
            yield
        except Exception as problem:
            said = "No step ran before it: nothing is spent."
            if len(run.ledger):
                said = f"{done} steps ran before it, and count."
                if run.established:
                    epsilon = run.epsilon().rounded_up()
                    said += f" Epsilon {epsilon} is spent at delta {run.plan.delta:g}."
            said += f" {self._saved_where(run)}"
            if isinstance(problem, HfDpError):
                raise type(problem)(f"{problem} {said}") from problem
            raise StepError(
                f"Step {done + 1} failed before anything of it was released "
                f"({type(problem).__name__}: {problem}). {said}"
            ) from problem

    def _saved_where(self, run: PrivateRun) -> str:
        checkpoint = run.folder / self._checkpoint_name
        if not self.state.global_step:
            return "Fix what failed, and start again."
        if self.in_shards and not run.processes.alone:  # the others may wait in a forward
            return f"Nothing was saved since the last complete checkpoint. {_GO_ON}"
        try:
            if not run.processes.on_main(checkpoint.exists):
                self._save_checkpoint(self.model, None)
        except (HfDpError, OSError) as also:
            return f"Their weights could not be saved ({also})."
        return f"Their weights are in {checkpoint}. {_GO_ON}"

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
                self.write_beside_weights(folder)
            return
        before = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(before)

    # -- going on --

    def _checkpoint_of(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checkpoint to go on from, with the run's ledger taken over, or None."""
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
                "Continuing from %s. The ledger records %s releases after it: they are lost to "
                "the model, but were made, so they count towards epsilon.",
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

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load weights, as Trainer does, where the checkpoint is of the same parameters."""
        self._refuse_other_parameters(Path(resume_from_checkpoint))
        if self.in_shards or not load_prompts(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _refuse_other_parameters(self, checkpoint: Path) -> None:
        now = self._parameters()
        then = self._listed(checkpoint).get("parameters", now)
        others = [name for name in {**now, **then} if now.get(name) != then.get(name)]
        if not others:
            return
        configs = self.model.peft_config if isinstance(self.model, PeftModel) else {}
        for config in configs.values():
            if isinstance(config, SelectionConfig) and Path(checkpoint, SELECTION).exists():
                refuse_other_options(type(config).from_pretrained(str(checkpoint)), config)
        other = max(others, key=lambda name: "trained" in now.get(name, ""))
        here, there = now.get(other, "not there"), then.get(other, "not there")
        raise ConfigError(
            f"Cannot resume: the parameter {other!r} is {here}, and in {checkpoint.name!r} it is "
            f"{there}. Use the model and the `peft_config` that the run was started with, {_ANEW}"
        )

    def _listed(self, checkpoint: Path) -> dict[str, Any]:
        """Return what a checkpoint lists of its run's parameters: nothing in a plain Trainer's."""
        path = checkpoint / _PARAMETERS
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        if self._run is not None:
            raise ConfigError(
                f"Cannot resume: the checkpoint {checkpoint.name!r} has no {path.name}, which says "
                f"what the run trains. Copy the whole checkpoint, resume from another, {_ANEW}"
            )
        return {}

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, as Trainer does, and take its metrics."""
        self.put_average()  # first: it would take what is loaded for the point of the last step
        best = str(self.state.best_model_checkpoint)
        if self.in_shards or not load_prompts(self.model, best):
            super()._load_best_model()
        step = Path(best).name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        found: dict[str, float] = {}
        for entry in self.state.log_history:
            if str(entry.get("step")) == step and Path(best).is_dir():  # else nothing was loaded
                found |= {name: each for name, each in entry.items() if name.startswith("eval_")}
        self._evaluation = {self.state.global_step: found}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and schedule, as Trainer does, where they are of the same parameters."""
        order = self._order()
        there = {} if checkpoint is None else self._listed(Path(checkpoint))
        if there.get("optimizer", order) != order:
            raise ConfigError(
                "Cannot resume: the optimizer's parameters differ from those of "
                f"{Path(str(checkpoint)).name!r}, or their order. Create it as the run did, {_ANEW}"
            )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _run_epoch(self, *args: object, **kwargs: object) -> None:
        """Run an epoch, unless all steps were made: Trainer would make one more after a full
        resume."""
        if self._run is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)


def save_prompts(model: nn.Module, checkpoint: str | Path) -> None:
    """Write into a checkpoint all that trains of an adapter that consists of prompts."""
    if _is_of_prompts(model):
        kept = {name: p.detach().cpu().contiguous() for name, p in _trained(model).items()}
        save_file(kept, Path(checkpoint, _PROMPTS))


@torch.no_grad()
def load_prompts(model: nn.Module, checkpoint: str | Path) -> bool:
    """Load what :func:`save_prompts` wrote. Return whether the adapter is one of prompts."""
    if not _is_of_prompts(model):
        return False
    path = Path(checkpoint, _PROMPTS)
    if not path.exists():
        raise ConfigError(
            f"Cannot resume: the checkpoint {path.parent.name!r} has no {path.name}, so it holds "
            f"prompts but not the encoder that makes them. Resume from another checkpoint, {_ANEW}"
        )
    kept = load_file(path)
    for name, parameter in _trained(model).items():
        parameter.copy_(kept[name])
    return True


def _is_of_prompts(model: nn.Module) -> bool:
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
