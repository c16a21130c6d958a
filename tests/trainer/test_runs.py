"""Whole runs: what is written, logged and withheld, resumed, and what a Trainer user expects."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from models import DEVICES
from peft import LoraConfig, PeftModel
from tiny import Recorder
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback

from hf_dp.accounting import EARLIER, epsilon
from hf_dp.errors import LedgerError, UnsupportedArgumentError
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer.trainer import DPTrainer

pytestmark = pytest.mark.usefixtures("unchecked")

WITHHELD = {
    "loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_runtime",
    "train_samples_per_second", "train_steps_per_second",
}  # fmt: skip
SAVING = {"save_strategy": "steps", "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


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


# -- one run, which is saved, evaluated and tracked ---


@pytest.fixture(scope="module", params=DEVICES)
def observed(request, tmp_path_factory):
    """The trainer after its run, its folder, what ``train()`` returned and what callbacks got."""
    recorder, folder = Recorder(), tmp_path_factory.mktemp("observed")
    given = {"callbacks": [recorder], "compute_metrics": accuracy}
    options = {"use_cpu": request.param == "cpu", "report_to": ["tensorboard"], **SAVING}
    trainer = tiny.trainer(folder, given=given, **options, **EVALUATING)
    assert trainer.args.device.type == request.param
    output = trainer.train()
    logs = [*recorder.logs]
    return SimpleNamespace(trainer=trainer, folder=folder, output=output, logs=logs)


def test_each_checkpoint_has_its_card_and_ledger_and_no_unnoised_number(observed):
    for step in (2, 4):
        folder = observed.folder / f"checkpoint-{step}"
        assert read_run(folder).ledger.steps() == step
        document = json.loads((folder / "privacy.json").read_text())
        assert " ".join(document) == (
            "schema_version hf_dp_version plan ledger ledger_head facts statement card "
            "privacy_section files digest"
        )
        assert document["statement"]["steps"] == step
        epsilon = document["statement"]["epsilon"]
        assert f"{epsilon:.3f}" in (folder / "README.md").read_text()
    assert read_run(observed.folder).ledger.steps() == 4
    assert read(observed.folder).status == "proven"
    assert leaks(observed.folder) == set()
    assert WITHHELD.isdisjoint(observed.output.metrics)
    assert observed.output.training_loss != observed.output.training_loss  # NaN: not released


def test_planted_unnoised_loss_in_the_state_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dp.trainer.logs.withhold", lambda *args, **options: None)
    trainer = tiny.trainer(tmp_path, max_steps=2, **SAVING)
    step = trainer.training_step
    monkeypatch.setattr(trainer, "training_step", lambda *args: step(*args) + 0.7)
    trainer.train()
    assert leaks(tmp_path) == {"loss"}


def test_callbacks_and_tensorboard_get_epsilon_rates_of_private_steps_and_no_withheld_number(
    observed,
):
    logs = observed.logs
    assert len(logs) >= 6
    assert all("epsilon" in each and WITHHELD.isdisjoint(each) for each in logs)
    spent = [each["epsilon"] for each in logs]
    assert spent == sorted(spent)
    assert spent[-1] == observed.trainer.epsilon().rounded_up()
    names = tiny.tracked(observed.folder)
    assert {"train/epsilon", "eval/loss"} <= names.keys()
    assert names.keys().isdisjoint(f"train/{name}" for name in WITHHELD)
    rates = [logs["learning_rate"] for logs in observed.logs if "learning_rate" in logs]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_rng_states_of_a_checkpoint_hold_no_private_stream(observed):
    path = observed.folder / "checkpoint-4" / "rng_state.pth"
    saved = torch.load(path, weights_only=False)
    private = observed.trainer.run.randomness._streams.torch
    assert not torch.equal(saved["cpu"], private)


def test_evaluate_predict_save_and_reload(observed, tmp_path):
    trainer = observed.trainer
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    predicted = trainer.predict(tiny.evaluation_set())
    trainer.save_model(str(tmp_path))
    assert "eval_accuracy" in (tmp_path / "README.md").read_text()
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    row = tiny.evaluation_set()[0]
    with torch.no_grad():
        logits = reloaded(input_ids=torch.tensor([row["input_ids"]])).logits
    expected = torch.tensor(predicted.predictions[0])
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-5)


def test_a_released_loss_is_logged_and_the_statement_says_so(tmp_path):
    trainer = tiny.trainer(
        tmp_path, release=["training_loss"], max_steps=1, expected_batch_size=40
    )  # (of all rows: of none, it would be 0)
    output = trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    assert output.training_loss > 0
    assert any("training_loss" in line for line in trainer.privacy_statement().not_covered)


def test_training_learns_without_much_noise(tmp_path):
    # label = does the row contain the word with id 4; learnable in a few steps
    marked = tiny.dataset().map(lambda row: {"label": int(4 in row["input_ids"])})
    options = {
        "noise_multiplier": 0.05, "accountant": "rdp", "max_steps": 20, "expected_batch_size": 40, "learning_rate": 6e-3,
        "per_device_train_batch_size": 40, "per_example_max_grad_norm": 1.0, "logging_strategy": "no",
        "evaluate_on_training_rows": True,
    }  # fmt: skip
    given = {"train_dataset": marked, "model": tiny.model(num_hidden_layers=2)}
    trainer = tiny.trainer(tmp_path, given=given, **options)
    before = trainer.predict(marked.select(range(39))).metrics["test_loss"]
    trainer.train()
    assert trainer.predict(marked.select(range(39))).metrics["test_loss"] < before - 0.1
    statement = trainer.privacy_statement()
    assert statement.status == "proven_weights_only"
    assert "evaluation_on_training_rows" in str(statement)


# -- resuming ---


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
def test_resume_with_another_plan_is_refused(finished, changed, match):
    with pytest.raises(LedgerError, match=match):
        tiny.resumed(tiny.trainer(finished, **changed))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"max_steps": 5}, "`steps` .`max_steps`, `num_train_epochs`. is 5 but .* 4. The noise .* 4 steps.*Ctrl-C"),
        ({"max_steps": -1, "num_train_epochs": 2}, "`steps` .* is 10 but .* started with 4"),
        ({"max_steps": 5, "target_delta": 1e-3}, "`delta` .`target_delta`. is 0.001 but"),
        ({"accountant": "pld"}, "`accountant` is 'pld'"), ({"max_steps": 5, "accountant": "pld"}, "`accountant` is"),
        ({"max_steps": 5, "target_epsilon": 5.0}, "`target_epsilon` is 5.0 but .* 4.0"),
    ],
    ids=["steps", "epochs", "delta", "accountant", "both", "target"],
)  # fmt: skip
def test_the_steps_that_a_targets_noise_was_chosen_for_stay(tmp_path, changed, match):
    target = {"target_epsilon": 4.0, "accountant": "rdp", **SAVING}
    tiny.trained(tiny.trainer(tmp_path, **target))
    with pytest.raises(LedgerError, match=match):
        tiny.resumed(tiny.trainer(tmp_path, **{**target, **changed}))


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
def test_weights_are_never_saved_beside_another_runs_statement(run, tmp_path, mode):
    weights = run / "checkpoint-4" / "model.safetensors"
    before = weights.read_bytes()
    other = tiny.trained(tiny.trainer(tmp_path / "other", privacy_mode=mode, max_steps=1))
    with pytest.raises(LedgerError, match="another run"):
        other.save_model(str(run / "checkpoint-4"))
    assert weights.read_bytes() == before


# -- what a Trainer user expects ---


def test_a_model_that_was_selected_is_stated_and_remembered_after_a_resume(tmp_path):
    given = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]}
    best = {"load_best_model_at_end": True, **SAVING, **EVALUATING}
    trainer = tiny.trained(tiny.trainer(tmp_path, given=given, **best))
    assert trainer.state.best_model_checkpoint is not None
    not_covered = trainer.privacy_statement().not_covered
    (line,) = [line for line in not_covered if "model selection" in line]
    assert "not used by this run" not in line
    again = tiny.resumed(tiny.trainer(tmp_path, **SAVING, **EVALUATING), 2)
    assert again.privacy_statement().facts.model_selection


def test_a_card_shows_the_scores_of_its_own_weights(tmp_path):
    """Not those of the last evaluation, whatever weights that was of."""

    def shown(name, scores, **options):
        left = iter(scores)
        options = {"given": {"compute_metrics": lambda _: {"accuracy": next(left)}}, **options}
        made = tiny.trainer(
            tmp_path / name, max_steps=4, eval_strategy="steps", save_strategy="steps",
            save_total_limit=None, metric_for_best_model="accuracy", **options
        )  # fmt: skip
        made.train()
        made.save_model()
        places = [tmp_path / name, *sorted((tmp_path / name).glob("checkpoint-*"))]
        return made, [read(each).card["metrics"].get("eval_accuracy") for each in places]

    every = {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    made, found = shown("best", [0.5, 0.9, 0.4, 0.3, 0.8], **every)
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert found == [0.9, 0.5, 0.9, 0.4, 0.3]
    made.evaluate()
    assert made.evaluation_metrics()["eval_accuracy"] == 0.8
    _, found = shown("between", [0.5, 0.6], eval_steps=2, save_steps=1)
    assert found == [0.6, None, 0.5, None, 0.6]


def test_learning_rates_that_follow_evaluation_are_stated(tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 2, **EVALUATING}
    statement = tiny.trained(tiny.trainer(tmp_path, **options)).privacy_statement()
    assert statement.facts.model_selection


def test_a_resume_without_the_release_logs_no_loss_and_keeps_what_was_released(tmp_path):
    options = {**SAVING, "save_steps": 1, "expected_batch_size": 40}
    tiny.trained(tiny.trainer(tmp_path, max_steps=1, release=["training_loss"], **options))
    again = tiny.resumed(tiny.trainer(tmp_path, max_steps=2, **options), 1)
    again.save_state()
    ((step, loss),) = [(e["step"], e["loss"]) for e in again.state.log_history if "loss" in e]
    assert step == 1 and loss > 0


class Steered(DPTrainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        """Make one of its own."""
        self.lr_scheduler = ReduceLROnPlateau(self.optimizer)
        return self.lr_scheduler


@pytest.mark.parametrize("cls", [tiny.DPTrainer, Steered])
def test_learning_rates_that_a_schedule_of_ones_own_lets_follow_are_stated(cls, tmp_path):
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = (optimizer, ReduceLROnPlateau(optimizer) if cls is tiny.DPTrainer else None)
    given = {"model": model, "optimizers": mine}
    options = {"metric_for_best_model": "loss", "max_steps": 2, **EVALUATING}
    made = tiny.trained(tiny.trainer(tmp_path, cls=cls, given=given, **options))
    assert made.privacy_statement().facts.model_selection
    first, *_ = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(first)["weaknesses"]["model_selection"]  # before the first step


def test_steps_follow_from_epochs_and_the_callers_arguments_are_untouched(tmp_path):
    args = tiny.arguments(tmp_path, max_steps=-1, num_train_epochs=1.5)
    trainer = DPTrainer(model=tiny.model(), args=args, train_dataset=tiny.dataset())
    assert trainer.privacy_plan.steps == 8  # ceil(1.5 * 40 / 8)
    assert args.max_steps == -1


def test_empty_draws_are_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: [])
    trainer = tiny.trainer(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.ledger.steps() == trainer.state.global_step == 2


def test_stock_lora_by_peft_config(tmp_path):
    config = LoraConfig(r=2, target_modules=["query", "value"])
    trainer = tiny.trainer(tmp_path, given={"peft_config": config}, max_steps=2)
    before = {n: (p.requires_grad, p.clone()) for n, p in trainer.model.named_parameters()}
    assert trainer.model.peft_config["default"].task_type == "SEQ_CLS"
    assert any("classifier" in name for name, (trains, _) in before.items() if trains)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        trains, value = before[name]
        assert torch.equal(parameter, value) != trains, name
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert "differential_privacy:" in (tmp_path / "README.md").read_text()
    assert isinstance(PeftModel.from_pretrained(tiny.model(), tmp_path), PeftModel)


def test_non_private_mode_is_stock_trainer(tmp_path):
    trainer = tiny.trained(tiny.trainer(tmp_path, privacy_mode="non_private"))
    first = trainer.state.log_history[0]
    assert first["loss"] > 0 and "epsilon" not in first
    assert trainer.ledger is None
    assert trainer.privacy_plan is None
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(UnsupportedArgumentError, match="no privacy plan"):
        trainer.epsilon()


def test_an_insecure_seed_reproduces_the_run_and_marks_it_not_private_for_good(tmp_path):
    models = []
    for name in "ab":
        given = {"model": tiny.model(dropout=0.3)}
        trainer = tiny.trainer(tmp_path / name, insecure_seed=3, given=given, **SAVING)
        trainer.train()
        models.append(trainer.model)
    assert tiny.moved(tiny.weights(models[0]), models[1]) == set()
    assert "NOT private" in (tmp_path / "b" / "README.md").read_text()
    assert read(tmp_path / "b").status == "not_private"
    again = tiny.resumed(tiny.trainer(tmp_path / "b"), 2)  # without the seed
    assert again.privacy_statement().status == "not_private"


# -- earlier runs on the same rows ---


@pytest.mark.parametrize("variant", [None, "frozen"])
def test_an_earlier_run_on_the_same_rows_is_paid_from_the_same_target(finished, tmp_path, variant):
    options = {"target_epsilon": 8.0, "accountant": "rdp", "earlier_runs": [str(finished)]}
    if variant is not None:
        options |= {"privacy_mode": "dp_fp", "dp_fp_variant": variant}
    second = tiny.trained(tiny.trainer(tmp_path / "second", **options))
    alone = tiny.trainer(tmp_path / "alone", **{**options, "earlier_runs": []})
    assert second.privacy_plan.noise_multiplier > alone.privacy_plan.noise_multiplier
    before = read_run(finished).ledger.events
    first = second.ledger.entries[0]
    assert ((first.event,), first.purpose) == (before, EARLIER)
    assert second.ledger.steps(EARLIER) == 4 and len(second.ledger) == 2
    plan = second.privacy_plan
    total = epsilon([*before, *plan.events()], plan.delta, "rdp")
    assert second.epsilon() == total and 7.9 < total.value <= 8
    assert "what earlier runs released of the same rows" in second.privacy_statement().sentence()
    assert disagreements(read(tmp_path / "second")) == []
    if variant == "frozen":  # (of the others nothing is left)
        second.train()
        assert second.ledger.steps(EARLIER) == 4  # once


def test_planted_earlier_run_that_is_not_recorded_is_seen(finished, tmp_path, monkeypatch):
    options = {"target_epsilon": 8.0, "accountant": "rdp", "earlier_runs": [str(finished)]}
    second = tiny.trainer(tmp_path, **options)
    monkeypatch.setattr(second.run.book, "earlier_entries", ())  # which refuses such a ledger
    second.train()
    assert second.epsilon().value < 7.9  # what test_an_earlier_run_... would refuse
