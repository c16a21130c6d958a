"""Whole runs: what is written, logged and withheld; resuming; stopping; what a Trainer user
expects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from models import DEVICES
from peft import LoraConfig, PeftModel
from tiny import Recorder
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback

from hf_dp.accounting import EARLIER, epsilon
from hf_dp.errors import (
    BudgetExceededError,
    InvalidArgumentError,
    LedgerError,
    UnsupportedArgumentError,
)
from hf_dp.run.witnesses import read_run
from hf_dp.statement.record import disagreements, read
from hf_dp.trainer.trainer import DPTrainer

pytestmark = pytest.mark.usefixtures("unchecked")

WITHHELD = {
    "loss",
    "train_loss",
    "total_flos",
    "num_input_tokens_seen",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def leaks(folder: Path) -> set[str]:
    """Withheld names with a value other than 0 in any trainer_state.json below a folder."""
    found = set()
    for path in folder.rglob("trainer_state.json"):
        state = json.loads(path.read_text())
        records = [*state["log_history"], {k: v for k, v in state.items() if k != "log_history"}]
        found |= {name for record in records for name in WITHHELD & set(record) if record[name]}
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_each_checkpoint_has_its_card_and_ledger_and_no_unnoised_number(device, bf16, tmp_path):
    trainer = tiny.trainer(
        tmp_path, save_strategy="steps", save_steps=2, use_cpu=device == "cpu", bf16=bf16
    )
    assert trainer.args.device.type == device
    output = trainer.train()
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert read_run(folder).ledger.steps() == step
        document = json.loads((folder / "privacy.json").read_text())
        assert " ".join(document) == (
            "schema_version hf_dp_version plan ledger ledger_head facts statement card "
            "privacy_section files digest"
        )
        assert document["statement"]["steps"] == step
        epsilon = document["statement"]["epsilon"]
        assert f"{epsilon:.3f}" in (folder / "README.md").read_text()
    assert read_run(tmp_path).ledger.steps() == 4
    assert read(tmp_path).status == "proven"
    assert leaks(tmp_path) == set()
    assert WITHHELD.isdisjoint(output.metrics)
    assert output.training_loss != output.training_loss  # NaN: not released


def test_planted_unnoised_loss_in_the_state_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dp.trainer.logs.withhold", lambda *args, **options: None)
    trainer = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2)
    step = trainer.training_step
    monkeypatch.setattr(trainer, "training_step", lambda *args: step(*args) + 0.7)
    trainer.train()
    assert leaks(tmp_path) == {"loss"}


def test_callbacks_get_epsilon_at_each_log_and_never_a_withheld_number(tmp_path):
    recorder = Recorder()
    trainer = tiny.trainer(
        tmp_path, eval_strategy="steps", eval_steps=2, given={"callbacks": [recorder]}
    )
    trainer.train()
    assert len(recorder.logs) >= 6
    assert all("epsilon" in logs for logs in recorder.logs)
    assert all(WITHHELD.isdisjoint(logs) for logs in recorder.logs)
    spent = [logs["epsilon"] for logs in recorder.logs]
    assert spent == sorted(spent)
    assert spent[-1] == trainer.epsilon().rounded_up()


def test_tensorboard_gets_epsilon_and_no_loss(tmp_path):
    tiny.trainer(tmp_path, report_to=["tensorboard"]).train()
    names = tiny.tracked(tmp_path)
    assert "train/epsilon" in names
    assert not {name for name in names if name.split("/")[-1] in WITHHELD}


def test_a_released_loss_is_logged_and_the_statement_says_so(tmp_path):
    recorder = Recorder()
    trainer = tiny.trainer(tmp_path, release=["training_loss"], given={"callbacks": [recorder]})
    output = trainer.train()
    assert recorder.logs[0]["loss"] > 0
    assert output.training_loss > 0
    assert any("training_loss" in line for line in trainer.privacy_statement().not_covered)


def test_training_learns_without_much_noise(tmp_path):
    marked = tiny.dataset(40)
    # label = does the row contain the word with id 4; learnable in a few steps
    marked = marked.map(lambda row: {"label": int(4 in row["input_ids"])})
    options = {
        "noise_multiplier": 0.05,
        "accountant": "rdp",
        "max_steps": 150,
        "expected_batch_size": 40,
        "per_device_train_batch_size": 40,
        "learning_rate": 1e-3,
        "evaluate_on_training_rows": True,
    }
    trainer = tiny.trainer(
        tmp_path,
        given={"train_dataset": marked, "model": tiny.model(num_hidden_layers=2)},
        per_example_max_grad_norm=1.0,
        logging_steps=999,
        **options,
    )
    before = trainer.predict(marked.select(range(39))).metrics["test_loss"]
    trainer.train()
    assert trainer.predict(marked.select(range(39))).metrics["test_loss"] < before - 0.1
    statement = trainer.privacy_statement()
    assert statement.status == "proven_weights_only" and "evaluation_on_training_rows" in str(
        statement
    )


# -- resuming ---


def interrupted(tmp_path, **options) -> DPTrainer:
    """A run of 4 planned steps with checkpoints at 2 and 4."""
    trainer = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2, **options)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def once_interrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    interrupted(folder)
    return folder


@pytest.fixture
def interrupted_run(once_interrupted, tmp_path) -> None:
    """A copy of an interrupted run, in ``tmp_path``."""
    shutil.copytree(once_interrupted, tmp_path, dirs_exist_ok=True)


def test_resuming_from_an_earlier_checkpoint_counts_the_branch(interrupted_run, tmp_path):
    trainer = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert trainer.ledger.steps() == 6
    assert read_run(tmp_path).ledger.steps() == 6


def test_a_branch_stops_before_the_target_is_passed(tmp_path):
    options = {"target_epsilon": 4.0, "accountant": "rdp"}
    first = interrupted(tmp_path, **options)
    assert first.epsilon().value <= 4.0
    trainer = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2, **options)
    with pytest.raises(BudgetExceededError, match="would pass it"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert read_run(tmp_path).ledger.steps() == 4


def test_resume_without_the_checkpoints_ledger_is_refused(interrupted_run, tmp_path):
    (tmp_path / "checkpoint-2" / "_ledger_copy.jsonl").unlink()
    with pytest.raises(LedgerError, match="_ledger_copy.jsonl"):
        tiny.trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"noise_multiplier": 0.9}, "`noise_multiplier` is 0.9 but .* 1.0"),
        ({"expected_batch_size": 9}, "`expected_batch_size` is 9.0 but .* 8.0"),
        ({"per_example_max_grad_norm": 0.2}, "`per_example_max_grad_norm`.* is 0.2 but .* 0.1"),
        ({"target_delta": 1e-3}, "`target_delta`.* is 0.001 but .* 0.0125"),
        ({"given": {"train_dataset": tiny.dataset(30)}}, "`train_dataset`.* is 30 but .* 40"),
    ],
    ids=["noise", "batch", "clipping", "delta", "rows"],
)
def test_resume_with_another_plan_is_refused(interrupted_run, tmp_path, changed, match):
    with pytest.raises(LedgerError, match=match):
        tiny.trainer(tmp_path, **changed).train(resume_from_checkpoint=True)


def test_resume_after_weights_were_published_as_insecure_stays_not_private(tmp_path):
    interrupted(tmp_path, insecure_seed=1)
    trainer = tiny.trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.privacy_statement().status == "not_private"


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
def test_weights_are_never_saved_beside_another_runs_statement(tmp_path, mode):
    interrupted(tmp_path / "a")
    before = (tmp_path / "a" / "checkpoint-4" / "model.safetensors").read_bytes()
    other = tiny.trainer(tmp_path / "b", privacy_mode=mode)
    other.train()
    with pytest.raises(LedgerError, match="another run"):
        other.save_model(str(tmp_path / "a" / "checkpoint-4"))
    assert (tmp_path / "a" / "checkpoint-4" / "model.safetensors").read_bytes() == before


def test_rng_states_of_a_checkpoint_hold_no_private_stream(tmp_path):
    trainer = interrupted(tmp_path)
    saved = torch.load(tmp_path / "checkpoint-4" / "rng_state.pth", weights_only=False)
    private = trainer.run.randomness._streams["torch"]
    assert not torch.equal(saved["cpu"], private)


# -- what a Trainer user expects ---


def test_evaluate_predict_save_and_reload(tmp_path):
    trainer = tiny.trainer(tmp_path, given={"compute_metrics": accuracy})
    trainer.train()
    metrics = trainer.evaluate()
    assert 0 <= metrics["eval_accuracy"] <= 1
    predicted = trainer.predict(tiny.evaluation_set())
    trainer.save_model(str(tmp_path / "final"))
    assert "eval_accuracy" in (tmp_path / "final" / "README.md").read_text()
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    row = tiny.evaluation_set()[0]
    with torch.no_grad():
        logits = reloaded(input_ids=torch.tensor([row["input_ids"]])).logits
    torch.testing.assert_close(
        logits[0], torch.tensor(predicted.predictions[0]), rtol=1e-4, atol=1e-5
    )


def test_best_model_and_early_stopping_are_stated(tmp_path):
    trainer = tiny.trainer(
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        given={"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]},
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    (line,) = [
        line for line in trainer.privacy_statement().not_covered if "model selection" in line
    ]
    assert "not used by this run" not in line


def test_learning_rates_that_follow_evaluation_are_stated(tmp_path):
    steered = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    trainer = tiny.trainer(tmp_path, eval_steps=2, **steered)
    trainer.train()
    assert trainer.privacy_statement().facts.model_selection


def test_model_selection_is_remembered_after_a_resume(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    tiny.trainer(tmp_path, load_best_model_at_end=True, **options).train()
    again = tiny.trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.privacy_statement().facts.model_selection


def test_schedulers_count_private_steps(tmp_path):
    recorder = Recorder()
    tiny.trainer(tmp_path, lr_scheduler_type="linear", given={"callbacks": [recorder]}).train()
    rates = [logs["learning_rate"] for logs in recorder.logs if "learning_rate" in logs]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_steps_follow_from_epochs_and_the_callers_arguments_are_untouched(tmp_path):
    args = tiny.arguments(tmp_path, max_steps=-1, num_train_epochs=1.5)
    trainer = DPTrainer(model=tiny.model(), args=args, train_dataset=tiny.dataset())
    assert trainer.privacy_plan.steps == 8  # ceil(1.5 * 40 / 8)
    assert args.max_steps == -1


def test_empty_draws_are_steps(tmp_path):
    trainer = tiny.trainer(tmp_path, expected_batch_size=1, max_steps=12, accountant="rdp")
    trainer.train()
    assert trainer.ledger.steps() == 12


def test_stock_lora_by_peft_config(tmp_path):
    config = LoraConfig(r=2, target_modules=["query", "value"])
    trainer = tiny.trainer(tmp_path, given={"peft_config": config})
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainable = {n: p.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert trainer.model.peft_config["default"].task_type == "SEQ_CLS"
    assert any("classifier" in name for name in trainable)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
        else:
            assert not torch.equal(parameter, trainable[name]), name
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert "differential_privacy:" in (tmp_path / "README.md").read_text()
    base = tiny.model()
    assert isinstance(PeftModel.from_pretrained(base, tmp_path), PeftModel)


def test_non_private_mode_is_stock_trainer(tmp_path):
    recorder = Recorder()
    trainer = tiny.trainer(tmp_path, privacy_mode="non_private", given={"callbacks": [recorder]})
    trainer.train()
    assert recorder.logs[0]["loss"] > 0
    assert "epsilon" not in recorder.logs[0]
    assert trainer.ledger is None
    assert trainer.privacy_plan is None
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(UnsupportedArgumentError, match="no privacy plan"):
        trainer.epsilon()


def test_an_insecure_seed_reproduces_the_run_and_marks_it_not_private(tmp_path):
    weights = []
    for name in "ab":
        trainer = tiny.trainer(
            tmp_path / name, insecure_seed=3, given={"model": tiny.model(dropout=0.3)}
        )
        trainer.train()
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert "NOT private" in (tmp_path / "b" / "README.md").read_text()
    assert read(tmp_path / "b").status == "not_private"


@pytest.mark.parametrize("variant", [None, "frozen"])
def test_an_earlier_run_on_the_same_rows_is_paid_from_the_same_target(tmp_path, variant):
    first = tiny.trainer(tmp_path / "first")
    first.train()
    options = {
        "target_epsilon": 8.0,
        "accountant": "rdp",
        "earlier_runs": [str(tmp_path / "first")],
    }
    if variant is not None:
        options |= {"privacy_mode": "dp_fp", "dp_fp_variant": variant}
    second = tiny.trainer(tmp_path / "second", **options)
    second.train()
    alone = tiny.trainer(tmp_path / "alone", **{**options, "earlier_runs": []})
    assert second.privacy_plan.noise_multiplier > alone.privacy_plan.noise_multiplier
    assert [(entry.event, entry.purpose) for entry in second.ledger.entries][:1] == [
        (first.ledger.events[0], EARLIER)
    ]
    assert second.ledger.steps(EARLIER) == 4 and len(second.ledger) == 2
    total = epsilon(
        [*first.ledger.events, *second.privacy_plan.events()], second.privacy_plan.delta, "rdp"
    )
    assert second.epsilon() == total and 7.9 < total.value <= 8
    assert "what earlier runs released of the same rows" in second.privacy_statement().sentence()
    assert disagreements(read(tmp_path / "second")) == []
    if variant == "frozen":  # (of the others nothing is left)
        second.train()
        assert second.ledger.steps(EARLIER) == 4  # once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"given": {"train_dataset": tiny.dataset(50)}},
            "to be a run with num_examples=40, not 50",
        ),
        (None, "privacy.json"),
    ],
)
def test_an_earlier_run_that_cannot_count_is_refused(tmp_path, change, message):
    if change is not None:
        tiny.trainer(tmp_path / "first", **change).train()
    with pytest.raises((InvalidArgumentError, LedgerError), match=message):
        tiny.trainer(tmp_path / "second", earlier_runs=[str(tmp_path / "first")])


def test_a_ledger_without_all_earlier_runs_does_not_go_on(tmp_path):
    """Resumed with one more: it would never be recorded."""
    tiny.trainer(tmp_path / "first").train()
    options = {"noise_multiplier": 1.0, "save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path / "second", **options).train()
    again = tiny.trainer(tmp_path / "second", earlier_runs=[str(tmp_path / "first")], **options)
    with pytest.raises(
        LedgerError, match="`earlier_runs` to name what the ledger of this run began with"
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-2"))


def test_planted_earlier_run_that_is_not_recorded_is_seen(tmp_path, monkeypatch):
    tiny.trainer(tmp_path / "first").train()
    second = tiny.trainer(
        tmp_path / "second",
        target_epsilon=8.0,
        accountant="rdp",
        earlier_runs=[str(tmp_path / "first")],
    )
    monkeypatch.setattr(second.run, "earlier", ())
    monkeypatch.setattr(second.run.book, "_earlier_entries", ())  # which refuses such a ledger
    second.train()
    assert second.epsilon().value < 7.9  # what test_an_earlier_run_... would refuse
