"""What a private forward computes reaches no log: neither from within a step, nor later."""

import json
from contextlib import nullcontext

import tiny
import torch
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.trainer import logs as logs_module
from hf_dp.trainer.logs import ReleasedLogs

SECRET, PUBLIC = 6.125, 7.25


def replace_history(trainer, value):
    trainer.state.log_history = [*trainer.state.log_history, {"eval_loss": value}]


def change_the_last_entry(trainer, value):
    if trainer.state.log_history:
        trainer.state.log_history[-1]["learning_rate"] = value


# Exact in float32, and no value of a run that logs nothing of its rows.
LEAKS = {
    6.125: lambda trainer, value: trainer.log({"ce_part": value, "rows_in_batch": 4}),
    6.25: lambda trainer, value: trainer.log({"eval_loss": value}),
    6.375: lambda trainer, value: trainer.log({"learning_rate": value}),
    6.5: lambda trainer, value: trainer.state.log_history.append(
        {"eval_accuracy": value, "step": 1}
    ),
    6.625: replace_history,
    6.75: change_the_last_entry,
    6.875: lambda trainer, value: setattr(trainer.state, "best_metric", value),
}


class Leaking(DPTrainer):
    """Its private loss leaks in every way."""

    def compute_per_example_loss(self, model, inputs):
        if self.is_in_train:
            for value, leak in LEAKS.items():
                leak(self, value)
        return super().compute_per_example_loss(model, inputs)


def leaked(folder, values=tuple(LEAKS), cls=Leaking, callbacks=(), **given):
    """Train; return which of the values are in a log."""
    told = tiny.Recorder()
    given = {"callbacks": [*callbacks, told], **given}
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = tiny.trainer(folder, cls=cls, max_steps=2, given=given, **saving)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train()
    trainer.save_state()
    files = [*folder.rglob("trainer_state.json")]
    assert len(files) == 2 and any("epsilon" in logs for logs in told.logs)
    logs = [vars(trainer.state), told.logs, *(json.loads(path.read_text()) for path in files)]
    return [value for value in values if str(value) in str(logs)]


def test_a_private_forward_logs_nothing_and_planted_steps_that_are_not_silent_are_seen(
    tmp_path, monkeypatch
):
    assert leaked(tmp_path) == []
    monkeypatch.setattr(ReleasedLogs, "silent", lambda self: nullcontext())
    monkeypatch.setattr(logs_module, "unknown_names", lambda logs, known: [])
    assert leaked(tmp_path / "planted") == list(LEAKS)


class Hooked(TrainerCallback):
    """Logs from a hook on the model, and later what a step kept."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        log = self.trainer.log
        self.hooks = [
            model.classifier.register_forward_hook(lambda *given: log({"eval_in": SECRET})),
            model.classifier.register_full_backward_hook(lambda *given: log({"eval_out": SECRET})),
        ]

    def on_step_end(self, args, state, control, **kwargs):
        for hook in self.hooks:
            hook.remove()
        self.trainer.log({"kept": SECRET, "eval_loss": PUBLIC})
        state.log_history.append({"kept_too": SECRET})


def test_hooks_and_what_a_step_kept_log_nothing(tmp_path, warnings_of):
    said = warnings_of("trainer.logs")
    hooked = Hooked()
    found = leaked(tmp_path, (SECRET,), DPTrainer, [hooked])
    assert found == []
    history = hooked.trainer.state.log_history
    assert [row["eval_loss"] for row in history if "eval_loss" in row] == [PUBLIC] * 2
    for name in ("eval_in", "eval_out", "kept", "kept_too"):
        assert sum(f"`{name}`" in text for text in said) == 1, name  # and not one a step
    assert all("noised_loss_bound" in text for text in said)


def test_names_of_other_rows_are_logged_and_without_privacy_all(tmp_path):
    told = tiny.Recorder()
    trainer = tiny.trainer(tmp_path, given={"callbacks": [told]})
    known = trainer.evaluate(metric_key_prefix="test_held_out")
    other = trainer.evaluate(metric_key_prefix="dev")
    assert known["test_held_out_loss"] == told.logs[0]["test_held_out_loss"]
    assert torch.isfinite(torch.tensor(other["dev_loss"])) and len(told.logs) == 1
    trainer = tiny.trainer(tmp_path, privacy_mode="non_private")
    trainer.log({"ce_part": 1.0})
    assert trainer.state.log_history[-1]["ce_part"] == 1.0
