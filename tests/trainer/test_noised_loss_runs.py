"""A noised loss in whole runs: from the argument to logs, ledger, statement and card."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig
from tiny import Recorder
from watch import watch

from hf_dp.accounting import (
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
    event_from_dict,
)
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.mechanisms.dp_sgd import BoundedLosses, DpSgd
from hf_dp.run.gate import Release
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.methods import AdapterConfig, ParamConfig, PvalConfig
from hf_dp.tuners.rgp import RgpConfig

pytestmark = pytest.mark.usefixtures("unchecked")

LOSS = {"noised_loss_bound": 2.0, "noised_loss_budget_ratio": 0.2, "accountant": "rdp"}


def made(folder: Path, **options) -> DPTrainer:
    return tiny.trainer(folder, **{**LOSS, **options})


# -- what is logged --


@pytest.fixture
def noised(monkeypatch) -> list[float]:
    """The noised loss of each step, as the mechanism makes it."""
    return watch(
        monkeypatch, DpSgd, "gradients", lambda _, dp_sgd, *__: float(dp_sgd.noised["noised_loss"])
    )


def logged(trainer: DPTrainer) -> list[tuple[int, float]]:
    history = trainer.state.log_history
    return [(row["step"], row["noised_loss"]) for row in history if "noised_loss" in row]


def test_logs_hold_the_mean_over_the_steps_since_the_last(tmp_path, noised, capsys):
    recorder = Recorder()
    options = {
        "max_steps": 5, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3,  # also between two logs of steps
        "save_strategy": "steps", "save_steps": 5, "report_to": ["tensorboard"], "disable_tqdm": False,
    }  # fmt: skip
    trainer = made(tmp_path, given={"callbacks": [recorder]}, **options)
    output = trainer.train()
    assert len(noised) == 5
    a, b, c, d, e = noised
    expected = [(2, (a + b) / 2), (4, (c + d) / 2), (5, e)]  # and the rest at the end
    assert logged(trainer) == [(step, pytest.approx(value)) for step, value in expected]
    values = [value for _, value in logged(trainer)]
    assert [row["noised_loss"] for row in recorder.logs if "noised_loss" in row] == values
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    told = [row["noised_loss"] for row in state["log_history"] if "noised_loss" in row]
    assert told == values[:2]
    assert not any({"loss", "train_loss"} & set(row) for row in recorder.logs)
    assert output.training_loss != output.training_loss
    assert not any("eval_loss" in row for row in recorder.logs if "noised_loss" in row)
    assert tiny.tracked(tmp_path)["train/noised_loss"] == 3
    assert f", noised loss {values[1]:.4g}" in capsys.readouterr().err


def test_the_end_has_the_mean_of_all_and_it_may_stand_beside_a_released_loss(tmp_path, noised):
    trainer = tiny.trained(made(tmp_path, logging_strategy="no", max_steps=2))
    assert logged(trainer) == [(2, pytest.approx(sum(noised) / 2))]
    all_rows = {"expected_batch_size": 40, "max_steps": 1}  # of none, a loss would be 0
    trainer = tiny.trained(made(tmp_path / "released", release=["training_loss"], **all_rows))
    (row,) = [row for row in trainer.state.log_history if "noised_loss" in row]
    assert row["loss"] > 0
    assert trainer.privacy_statement().status == "proven_weights_only"


def unnoised_numbers(folder: Path) -> list[float]:
    """Numbers below a folder, or in logs, that are a sum of losses without its noise, or a mean."""
    with pytest.MonkeyPatch.context() as patch:
        totals = watch(patch, DpSgd, "clip", lambda clipped, *_: float(clipped.beside["loss"]))
        trainer = tiny.trained(made(folder, save_strategy="steps", save_steps=2, max_steps=3))
    trainer.save_model()
    trainer.save_state()  # with all logs
    assert len([total for total in totals if total > 0]) > 1
    secret = [total / scale for total in totals if total for scale in (1, 8)]
    shown = tiny.numbers_in(folder)
    return [x for x in shown if any(x == pytest.approx(y, rel=1e-6) for y in secret)]


def test_no_loss_without_noise_is_written_or_logged_and_a_planted_one_is_seen(
    tmp_path, monkeypatch
):
    assert unnoised_numbers(tmp_path) == []
    monkeypatch.setattr(Release, "beside", lambda self, part, total: total)
    assert len(unnoised_numbers(tmp_path / "planted")) >= 2


# -- what it costs, and what is said of it --


SAVING = {"save_strategy": "steps", "save_steps": 2}
PAID = {"target_epsilon": 3.0, **SAVING}


@pytest.fixture(scope="module")
def paid(tmp_path_factory) -> DPTrainer:
    """The trainer of a run that spent its target."""
    trainer = tiny.trained(made(tmp_path_factory.mktemp("paid"), **PAID))
    trainer.save_model()
    return trainer


def test_the_target_pays_for_it_and_ledger_statement_and_card_name_it(paid):
    folder, plan = Path(paid.args.output_dir), paid.privacy_plan
    statement = paid.privacy_statement()
    (event,) = paid.ledger.events
    assert isinstance(event, PoissonSampledGaussian) and event == plan.event()
    assert 2.99 < epsilon(event, plan.delta, "rdp").value <= 3.0
    assert paid.epsilon().value <= 3.0
    record = read(folder)
    assert record.status == "proven" and disagreements(record) == []
    written = json.loads((folder / "privacy.json").read_text())
    (entry,) = written["ledger"]
    assert event_from_dict({k: v for k, v in entry.items() if k != "purpose"}) == event
    assert written["plan"]["mechanism"]["loss"]["bound"] == 2.0
    assert "each clipped to [0, 2.0], are summed, too" in statement.mechanism
    covered = "the noised losses in its logs, and whatever is computed from them"
    assert statement.covered.endswith(covered)
    assert statement.noise_multipliers == (event.noise_multiplier, event.noise_multipliers["loss"])
    assert "4 steps of DP-SGD and a noised loss with Poisson sampling" in statement.sentence()
    card = (folder / "README.md").read_text()
    assert "logged as noised\\_loss" in card or "logged as noised_loss" in card


# -- with other ways to train --

SHARE = {"unfreeze_ratio": 0.3, "selection_noise_multiplier": 2.0}
TUNERS = {
    "frost": FrostConfig(**SHARE, selection_sample_rate=0.3, selection_iterations=3),
    "frost twice": FrostConfig(**SHARE, selection_iterations=2, num_selections=2),
    "param": ParamConfig(**SHARE),
    "pval": PvalConfig(unfreeze_ratio=0.3),
    "adapter": AdapterConfig(),
    "lora": LoraConfig(r=2, task_type="SEQ_CLS"),
    "rgp": RgpConfig(rank=2, task_type="SEQ_CLS"),
}


RARE = ("frost twice", "param", "pval", "adapter")


@pytest.mark.parametrize(
    "tuner", [pytest.param(t, marks=[pytest.mark.slow] * (t in RARE)) for t in TUNERS]
)
def test_every_tuner_has_it(tuner, tmp_path):
    trainer = tiny.trained(made(tmp_path, given={"peft_config": TUNERS[tuner]}, max_steps=2))
    assert len(logged(trainer)) == 2
    entries = trainer.ledger.entries
    trained = [entry.event for entry in entries if entry.purpose == "training"]
    assert all(type(event) is PoissonSampledGaussian for event in trained)
    assert sum(event.steps for event in trained) == 2
    selects = tuner.startswith("frost") or tuner == "param"
    assert ("selection" in [entry.purpose for entry in entries]) == selects
    assert disagreements(read(tmp_path)) == []


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize(
    "options",
    [{"bf16": True}, {"clipping_strategy": "two_pass"}, {"clipping": "per_layer"}],
    ids=["bf16", "two passes", "per layer"],
)
def test_the_loss_is_that_of_the_draw_however_the_gradients_are_clipped(options, tmp_path):
    trainer = made(tmp_path, expected_batch_size=40, max_steps=1, **options)
    alone = [trainer.data_collator([row]) for row in trainer.train_dataset]
    with torch.no_grad():
        losses = [float(trainer.compute_per_example_loss(trainer.model, row)) for row in alone]
    trainer.train()
    ((_, found),) = logged(trainer)
    assert found == pytest.approx(sum(losses) / 40, rel=1e-2 if "bf16" in options else 1e-5)


@pytest.mark.slow
def test_a_limit_of_the_draw(tmp_path, monkeypatch):
    counted = watch(monkeypatch, BoundedLosses, "add", lambda _, self, losses: len(losses))
    limit = {"max_logical_batch_size": 9, "accountant": "pld"}
    trainer = tiny.trained(made(tmp_path, max_steps=2, logging_strategy="no", **limit))
    assert trainer.ledger.events == (
        TruncatedPoissonSampledGaussian(1.0, 0.2, 2, 40, 9, beside={"loss": 2.0}),
    )
    assert 0 < sum(counted) <= 2 * 9
    assert "of a draw of more than 9 rows" in trainer.privacy_statement().plan.words.sampling


# -- resuming --


def test_a_resumed_run_goes_on_with_it(tmp_path):
    made(tmp_path, **SAVING).train()
    trainer = tiny.resumed(made(tmp_path, **SAVING), 2)
    assert [step for step, _ in logged(trainer)] == [1, 2, 3, 4]
    assert trainer.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 6, beside={"loss": 2.0}),)


def test_a_resumed_run_with_another_loss_or_beyond_its_target_is_refused(paid):
    folder = Path(paid.args.output_dir)
    for changed, match in (
        ({"noised_loss_bound": 3.0}, "`noised_loss_bound`.* 3.0.* but .* 2.0"),
        ({"noised_loss_budget_ratio": 0.1}, "`noised_loss_budget_ratio`.* 0.1.* but .* 0.2"),
        (dict.fromkeys(LOSS, None), "`noised_loss_bound`.* is None but .* 2.0"),
    ):
        again = made(folder, **{**PAID, **changed, "accountant": "rdp"})
        with pytest.raises(LedgerError, match=match):
            again.train(resume_from_checkpoint=True)
    with pytest.raises(BudgetExceededError):
        made(folder, **PAID).train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def test_it_counts_in_a_later_run_on_the_same_rows(tmp_path):
    first = str(tmp_path / "first")
    made(Path(first), max_steps=1).train()
    later = tiny.trainer(tmp_path / "later", earlier_runs=[first], accountant="rdp", max_steps=1)
    later.train()
    events = (
        PoissonSampledGaussian(1.0, 0.2, 1, beside={"loss": 2.0}),
        PoissonSampledGaussian(1.0, 0.2, 1),
    )
    assert later.ledger.events == events
    assert later.epsilon().value == epsilon(events, later.privacy_plan.delta, "rdp").value
    assert disagreements(read(tmp_path / "later")) == []
