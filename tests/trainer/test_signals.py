"""SIGTERM and SIGINT: the step under way is finished, a checkpoint saved, and handlers given back."""

import os
import signal
import threading
from pathlib import Path

import pytest
import tiny
from processes import outcomes
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, TrainerCallback
from warm import run_program
from watch import watch

from hf_dp import DPTrainer
from hf_dp.cards.verify import verify
from hf_dp.features.signals import TrainingStopped
from hf_dp.publishing.publication import Publication
from hf_dp.run.witnesses import checkpoints, read_run

pytestmark = pytest.mark.usefixtures("unchecked")


TESTS = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]


class SignalAt(TrainerCallback):
    """Sends a signal to this process in the middle of a step, or in another place of the loop."""

    def __init__(self, step: int, signum: int = signal.SIGTERM, place: str = "on_step_begin"):
        self.step, self.signum = step, signum
        setattr(self, place, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.signum)


def stopped_by(folder: Path, *sent, **options):
    trainer = tiny.trainer(folder, logging_strategy="no", **options)
    for each in sent:
        trainer.add_callback(each)
    return trainer


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    mine = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    yield
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    for each, handler in zip((signal.SIGTERM, signal.SIGINT), mine):
        signal.signal(each, handler)
    assert after == before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, signum):
    trainer = stopped_by(tmp_path, SignalAt(1, signum))
    with pytest.raises(TrainingStopped) as stopped:
        trainer.train()
    assert stopped.value.code == 128 + signum
    (checkpoint,) = checkpoints(tmp_path)
    assert checkpoint.name == "checkpoint-2"
    assert f"weights are in {checkpoint}" in str(verify(tmp_path))
    assert f"Weights are in {checkpoint}." in str(Publication.of(tmp_path).refusals)
    assert read_run(tmp_path).ledger.steps() == 2
    again = tiny.resumed(tiny.trainer(tmp_path))
    assert (again.state.global_step, again.ledger.steps()) == (4, 4)


def test_a_signal_during_evaluation_costs_no_further_step(tmp_path):
    trainer = stopped_by(
        tmp_path, SignalAt(1, place="on_prediction_step"), eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    assert trainer.ledger.steps() == 1


def test_the_checkpoint_of_a_signal_survives_load_best_model_and_a_limit_of_one(tmp_path):
    options = {
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the first step is the best, most likely
    }  # fmt: skip
    trainer = stopped_by(tmp_path, SignalAt(2), **options)
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert checkpoints(tmp_path)[0].name == "checkpoint-3"
    tiny.trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert read_run(tmp_path).ledger.steps() == 4


def test_a_run_that_cannot_be_continued_is_not_told_to(tmp_path, caplog):
    trainer = stopped_by(tmp_path, SignalAt(2), save_only_model=True)
    with caplog.at_level("WARNING", "hf_dp"), pytest.raises(TrainingStopped):
        trainer.train()
    (said,) = [each for each in caplog.messages if "stopped after step" in each]
    assert "save_only_model cannot be continued" in said and "resume_from" not in said


class StopAt(TrainerCallback):
    def __init__(self, step: int, place: str = "on_step_end"):
        self.step = step
        setattr(self, place, self.stop)

    def stop(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def stopped_at(folder, *stop, **options):
    """A run that a callback stops, and the names of its checkpoints."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **options}
    trainer = tiny.trained(stopped_by(folder, StopAt(*stop), **options))
    return trainer, [path.name for path in checkpoints(folder)]


def test_a_stop_by_a_callback_loses_no_step(tmp_path):
    _, names = stopped_at(tmp_path, 3)
    assert names == ["checkpoint-3", "checkpoint-2"]
    again = tiny.resumed(tiny.trainer(tmp_path, max_steps=6))
    assert (again.state.global_step, again.ledger.steps()) == (6, 6)


@pytest.mark.parametrize(
    ("stop", "options", "kept", "saves"),
    [
        ((4,), {}, [4, 2], 2),
        ((6,), {}, [6, 4], 3),
        ((1,), {"save_strategy": "epoch"}, [1], 1),
        ((2, "on_step_begin"), {}, [3, 2], 2),
        ((3,), {"save_strategy": "no"}, [], 0),
        ((3,), {"save_total_limit": 1}, [3], 2),
    ],
)
def test_a_stop_by_a_callback_is_saved_once_and_as_asked(
    tmp_path, monkeypatch, stop, options, kept, saves
):
    seen = watch(monkeypatch, DPTrainer, "_save_checkpoint")
    assert stopped_at(tmp_path, *stop, **options)[1] == [f"checkpoint-{step}" for step in kept]
    assert len(seen) == saves


@pytest.mark.parametrize(("limit", "kept"), [(1, [2]), (2, [3, 2])])
def test_early_stopping_keeps_the_best_checkpoint_and_loads_it(tmp_path, limit, kept):
    """It stops after the evaluation of step 3, where nothing would be saved."""
    scores = iter([0.5, 0.9, 0.1])
    options = {
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": limit, "max_steps": 6,
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    }  # fmt: skip
    given = {"compute_metrics": lambda _: {"accuracy": next(scores)}}
    trainer = stopped_by(tmp_path, EarlyStoppingCallback(1), given=given, **options)
    assert tiny.trained(trainer).ledger.steps() == trainer.state.global_step == 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert tiny.moved(tiny.weights(trainer.model), best) == set()


def test_a_second_signal_stops_at_once(tmp_path):
    trainer = stopped_by(
        tmp_path, SignalAt(1, signal.SIGINT), SignalAt(1, signal.SIGINT, "on_pre_optimizer_step")
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert checkpoints(tmp_path) == []
    assert read_run(tmp_path).ledger.steps() == 2  # the step that it broke off was recorded


def test_before_the_first_step_a_signal_does_what_it_always_does(tmp_path):
    trainer = stopped_by(tmp_path)
    trainer.mechanism.prepare = lambda: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_handlers_are_installed_in_the_main_thread_only(tmp_path):
    found = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    trainer = stopped_by(tmp_path, Look(), max_steps=1)
    worker = threading.Thread(target=trainer.train)
    worker.start()
    worker.join()
    stopped_by(tmp_path / "main", Look(), max_steps=1).train()
    assert found[0] == before and found[1] != before


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    def train():
        sent = [SignalAt(2)] if os.environ["RANK"] == "1" else []
        trainer = stopped_by(tmp_path, *sent, max_steps=6, accountant="rdp")
        try:
            trainer.train()
        except TrainingStopped as stopped:
            return stopped.code, trainer.state.global_step

    assert [each.result for each in outcomes(2, train)] == [(128 + signal.SIGTERM, 3)] * 2
    assert read_run(tmp_path).ledger.steps() == 3
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]


@pytest.mark.slow
def test_the_command_line_ends_with_128_and_the_signal(tmp_path):
    code = """
import pathlib, sys
sys.path[:0] = sys.argv[2:]
import test_signals
from hf_dp.cli import main, train
trainer = test_signals.stopped_by(pathlib.Path(sys.argv[1]), test_signals.SignalAt(1))
train.main = lambda words: trainer.train() and 0
sys.exit(main.main(["train"]))
"""
    done = run_program(code, tmp_path, [str(tmp_path / "run"), *TESTS])
    assert done.returncode == 143, done.stderr[-2000:]
    assert "resume_from_checkpoint" in done.stderr
