"""SIGTERM and SIGINT end a run after its step, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers.utils import logging

from hf_dp.features.base import Feature, Seen, register

logger = logging.get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class TrainingStopped(SystemExit):
    """A signal (``signum``) ended the training, after a checkpoint was saved.

    A script that does not catch it ends with the exit code ``128 + signum``, as one that the signal
    killed; it does not go on to evaluate and publish a run that is not finished.
    """

    def __init__(self, signum: int):
        super().__init__(128 + signum)
        self.signum = signum


@register
class Signals(Feature):
    """Ends all processes of a run after the step in which a signal reaches one, with a checkpoint.
    Before the first step a signal does what it always does: there is nothing to save. A stop by a
    callback after a step is saved, too, unless save_strategy is "no"."""

    _signum: int | None = None  # the first signal that arrived in this process
    _stopping = False
    _process = 0
    _saved: int | None = None  # the last step that is in a checkpoint

    def begin(self, seen: Seen) -> None:
        self._processes = seen.processes
        self._before: dict[int, Handler] = {}

    def leave(self, seen: Seen | None = None) -> None:
        """Give the handlers back."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def end(self, seen: Seen) -> None:
        """Raise TrainingStopped when a signal ended the training."""
        if not self._stopping:
            return
        signum = self._signum or signal.SIGTERM  # another process of the run may have got it
        go_on = (
            "Continue with trainer.train(resume_from_checkpoint=True), or `hf-dp train ... "
            "--resume_from_checkpoint True`."
        )
        if self.args.save_only_model or self.args.audit_canaries:
            why = "save_only_model" if self.args.save_only_model else "audit_canaries"
            go_on = f"A run with {why} cannot be continued. Start again in a new output_dir."
        logger.warning(
            "%s: stopped after step %d of %d, which is saved as checkpoint-%d in %s. %s",
            signal.Signals(signum).name,
            seen.state.global_step,
            seen.state.max_steps,
            seen.state.global_step,
            self.args.output_dir,
            go_on,
        )
        raise TrainingStopped(signum)

    def on_train_begin(self, args: object, state: State, control: Control, **kw: object) -> None:
        self._signum = self._saved = None
        self._stopping, self._process = False, os.getpid()
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {each: signal.signal(each, self._arrived) for each in SIGNALS}

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self._stops():
            # A scheduler may kill soon: no evaluation first.
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self._stops():
            control.should_save = control.should_training_stop = True

    def on_save(self, args: object, state: State, control: Control, **kw: object) -> None:
        self._saved = state.global_step
        if self._stops():
            control.should_training_stop = True
            # Trainer would load the best model, and with save_total_limit=1 delete the checkpoint
            # that was just saved. The best one is known in there.
            state.best_model_checkpoint = None

    def on_epoch_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self._stopping:
            control.should_evaluate = control.should_save = False  # not a second time
        elif control.should_training_stop and state.global_step < state.max_steps:
            saves = self.args.save_strategy != "no" and self._saved != state.global_step
            control.should_save |= saves

    def _stops(self) -> bool:
        self._stopping = self._stopping or bool(self._processes.largest(self._signum is not None))
        return self._stopping

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a worker that fetches rows, forked from this process
            if signum != signal.SIGINT:  # Ctrl-C reaches all; the step under way needs its rows
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
        elif self._signum is not None:
            self.leave()
            signal.raise_signal(signum)
        else:
            self._signum = signum
            logger.warning(
                "%s: finishing the current step and saving a checkpoint. A second signal stops at "
                "once.",
                signal.Signals(signum).name,
            )
