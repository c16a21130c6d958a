"""Warnings before the first step: of settings known to fail, and of none known to work."""

import dataclasses
import logging
import re

import datasets
import pytest
import tiny
import torch
from dp_accounting.pld import privacy_loss_distribution as google_pld
from pages import ROOT
from scipy.stats import binom
from statements import statement_of
from torch.utils.data import ConcatDataset, Subset

from hf_dp import planning
from hf_dp.accounting.accountants import table
from hf_dp.accounting.composition import doubt_of_delta
from hf_dp.cards.card import in_short
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap import TrainingRows
from hf_dp.planning import LEAST_SIGNAL, doubts, forecast, most_signal, of_repeated_rows
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import Users
from hf_dp.statement.evidence import read

EXACT = planning._epsilon


def plan(**options):
    options = {
        "num_examples": 67_349, "expected_batch_size": 1024, "num_train_epochs": 3, "target_epsilon": 3,
        "clipping_norm": 0.1, "accountant": "rdp", **options,
    }  # fmt: skip
    return PrivacyPlan.create(**options)


def said(made, parameters=22_000_000, learning_rate=1e-3, optimizer="adamw_torch_fused"):
    given = {"learning_rate": learning_rate, "optimizer": optimizer}
    return list(doubts(made, parameters=parameters, **given))


def test_the_recipes_that_work_get_no_warning():
    assert said(plan()) == []
    # E2E with GPT-2, Li et al., table 2
    e2e = plan(num_examples=42_061, num_train_epochs=10, target_epsilon=8)
    assert said(e2e, parameters=124_000_000) == []


@pytest.mark.parametrize(
    ("optimizer", "rate", "warned"),
    [
        ("adamw_torch_fused", 5e-5, True),
        ("adamw_torch", 1e-5, True),
        ("adamw_torch", 5e-4, False),
        ("sgd", 5e-5, False),
    ],
)
def test_transformers_default_rate_under_adam(optimizer, rate, warned):
    found = said(plan(), learning_rate=rate, optimizer=optimizer)
    assert [each.startswith("The learning rate is") for each in found] == [True] * warned


def test_noise_that_drowns_the_gradients():
    few = plan(num_examples=300, expected_batch_size=32, target_delta=1e-3)
    (found,) = said(few)
    assert "drown" in found and "22,000,000 numbers train" in found
    assert said(few, parameters=400) == []  # a head alone
    # It falls with the root of the numbers that train, and does not depend on the clipping norm.
    assert most_signal(few, 400) == pytest.approx(100 * most_signal(few, 4_000_000))
    assert most_signal(plan(clipping_norm=1.0), 10) == pytest.approx(most_signal(plan(), 10))


def test_a_large_delta():
    assert said(plan(target_delta=1 / (2 * 67_349))) == []
    (found,) = said(plan(target_delta=1.2e-5))
    assert "above 1/(2N) = 7.42e-06" in found


@pytest.mark.parametrize(("delta", "warned"), [(9.9e-5, False), (1e-4, True), (2e-3, True)])
def test_a_large_delta_has_one_threshold_and_one_advice(delta, warned):
    """In warnings, `hf-dp account`, `hf-dp plan` and cards; and the advice can be followed."""
    made = plan(num_examples=400, expected_batch_size=40, target_delta=delta)
    doubt = doubt_of_delta(made.delta, made.of_delta)
    assert ("set target_delta=1e-5" in doubt) == warned == bool(doubt)
    assert ("target_delta=1e-5" in table([], delta)) == warned
    assert ("target_delta=1e-5" in str(forecast(made))) == warned
    stated = dataclasses.replace(statement_of(), plan=made)
    assert ("A large delta" in "\n".join(in_short(stated))) == warned
    # Not beside the advice to leave it unset.
    assert not any("1/(2N)" in each for each in said(made, parameters=100))
    advised = dataclasses.replace(made, delta=1e-5)
    assert doubt_of_delta(advised.delta) == "" == "".join(said(advised, parameters=100))


def test_a_large_delta_is_named_as_the_default_or_as_chosen():
    rows = plan(num_examples=1300, expected_batch_size=40)
    assert "0.000385, by default 1/(2 x 1,300 rows)." in doubt_of_delta(rows.delta, rows.of_delta)
    assert "by default 1/(2 x 1,300 rows)" in str(forecast(rows))
    users = plan(
        num_examples=1300,
        expected_batch_size=40,
        privacy_unit="user",
        users=Users("writer", max_rows=4),
    )
    assert ", by default 1/(2 x 1,300 users)" == users.of_delta
    assert (
        plan(target_delta=1e-4, num_examples=1300, expected_batch_size=40).of_delta == ", as chosen"
    )


@pytest.mark.usefixtures("unchecked")
def test_the_trainer_says_so_of_delta_when_it_is_made(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_dp"):
        made = tiny.trainer(tmp_path)
        (told,) = [each for each in caplog.messages if each.startswith("delta is")]
        assert told.startswith("delta is 0.0125, by default 1/(2 x 40 rows). It is roughly")
        made.train()
        assert sum(each.startswith("delta is") for each in caplog.messages) == 1


def test_a_trainers_forecast_is_that_of_its_plan_and_of_the_numbers_that_train(tmp_path):
    made = tiny.trainer(tmp_path)
    made.model.requires_grad_(False)
    made.model.classifier.requires_grad_(True)
    numbers = sum(p.numel() for p in made.model.classifier.parameters())
    found = made.forecast()
    assert found == forecast(made.privacy_plan, parameters=numbers)
    assert f"{found.most_signal:.3g} of their noise" in str(found) and "drown" not in str(found)
    more = str(forecast(made.privacy_plan, parameters=10**9))
    assert more.endswith("or spend a larger epsilon.") and "The noise will drown" in more
    assert len(made.ledger) == 0
    with pytest.raises(UnsupportedArgumentError):
        tiny.trainer(tmp_path / "other", privacy_mode="non_private").forecast()


@pytest.mark.usefixtures("unchecked")
def test_the_trainer_says_so_once(tmp_path, caplog):
    options = {"learning_rate": 5e-5, "optim": "adamw_torch", "accountant": "rdp"}
    options |= {"save_strategy": "steps", "save_steps": 2}
    with caplog.at_level(logging.WARNING, "hf_dp"):
        tiny.trainer(tmp_path, **options).train()
        assert sum("The learning rate is 5e-05" in message for message in caplog.messages) == 1
        caplog.clear()
        tiny.resumed(tiny.trainer(tmp_path, **options), 2)
    assert not any("learning rate" in message for message in caplog.messages)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("of_arguments", "own", "warned"),
    [(5e-5, 1e-3, False), (1e-3, 1e-5, True), (1e-5, None, True), (1e-3, None, False)],
)
def test_the_rate_is_that_of_the_optimizer_that_steps(tmp_path, caplog, of_arguments, own, warned):
    """Also in a warmup, whose first rate is 0."""
    options = {"optim": "adamw_torch", "accountant": "rdp", "warmup_steps": 2, "max_steps": 4}
    made = tiny.trainer(tmp_path, learning_rate=of_arguments, **options)
    if own is not None:
        made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=own)
    with caplog.at_level(logging.WARNING, "hf_dp"):
        made.train()
    assert any("learning rate is" in message for message in caplog.messages) == warned


# What learned, and what stayed at chance: numbers that train, and the plan.
SMOLLM2 = {"expected_batch_size": 256, "max_steps": 20, "accountant": "pld"}
QUICKSTART = {"num_examples": 8000, "expected_batch_size": 256, "num_train_epochs": 0.5}


def test_no_card_of_a_run_that_learned_is_warned():
    """The lowest is that of 1.8 million numbers on CIFAR-10 at epsilon 0.5, at 0.59."""
    ratios = {}
    for file in sorted(ROOT.glob("model_cards/*/*/privacy.json")):
        record = read(file.parent)
        card = file.with_name("README.md").read_text()
        trained = re.search(r"What was trained \| (?:all )?([\d,]+)", card)
        assert trained is not None, file
        ratios[str(file)] = most_signal(record.plan, int(trained[1].replace(",", "")))
    assert len(ratios) >= 5
    assert min(ratios.values()) > 1.5 * LEAST_SIGNAL, ratios


def test_an_adapter_of_a_decoder_and_the_quickstart_learned_and_are_not_warned():
    assert said(plan(**SMOLLM2), parameters=921_600) == []  # 82.8 % on SST-2
    assert most_signal(plan(**SMOLLM2), 921_600) == pytest.approx(2.3, rel=0.01)
    assert said(plan(**QUICKSTART, target_epsilon=8), learning_rate=2e-3) == []


@pytest.mark.parametrize("ratio", [0.06, 0.19, 0.29, 0.5])
def test_runs_that_stayed_at_chance_are_warned_and_one_that_learned_is_not(ratio):
    """At these ratios; the one at 0.5 reached 82 %."""
    made = plan(num_examples=600, expected_batch_size=32)
    numbers = round((most_signal(made, 1) / ratio) ** 2)
    found = [f"{ratio:.2g} of the noise" in each for each in said(made, parameters=numbers)]
    assert found == [True] * (ratio < 0.5)


def test_planted_limit_of_before_lets_runs_at_chance_pass(monkeypatch):
    monkeypatch.setattr(planning, "LEAST_SIGNAL", 0.1)
    made = plan(num_examples=600, expected_batch_size=32)
    assert said(made, parameters=round((most_signal(made, 1) / 0.29) ** 2)) == []


# Equal rows


def test_the_epsilon_of_a_record_in_ten_rows_is_that_of_dp_accountings_mixture(monkeypatch):
    monkeypatch.setattr(planning, "_epsilon", EXACT)
    made = PrivacyPlan.create(
        num_examples=1000, expected_batch_size=50, max_steps=20, noise_multiplier=1.5,
        target_delta=1e-5, clipping_norm=0.1,
    )  # fmt: skip
    said = of_repeated_rows(made, 10, "`sentence`")
    of_record, of_row = map(float, re.findall(r"(?:epsilon|row has) (\d+\.\d+)", said))
    chances = binom.pmf(range(11), 10, 0.05).tolist()
    step = google_pld.from_mixture_gaussian_mechanism(
        1.5, list(range(11)), chances, value_discretization_interval=1e-2
    )
    expected = step.self_compose(20).get_epsilon_for_delta(1e-5)
    assert 0.999 * expected <= of_record <= 1.02 * expected
    assert of_row < of_record / 3
    assert "10 rows" in said and "`sentence`" in said
    assert "Leave the copies out" in said and "privacy_unit='user'" in said


@pytest.mark.parametrize(
    ("options", "most"), [({"sampling": "random_allocation"}, 3), ({}, 500), ({}, 1000)]
)
def test_without_a_bound_it_says_how_many_times_weaker(options, most):
    made = PrivacyPlan.create(
        num_examples=1000, expected_batch_size=50, max_steps=20, noise_multiplier=1.5,
        clipping_norm=0.1, **options,
    )  # fmt: skip
    assert f"protected {most}-fold weaker" in of_repeated_rows(made, most, "`x`")


def rare() -> datasets.Dataset:
    texts = [f"row {i}" for i in range(30)]
    return datasets.Dataset.from_dict({"text": texts, "idx": range(30), "label": [0, 1] * 15})


COPIED = {
    "select": lambda rows: rows.select([*range(30), *[7] * 9]),
    "concatenate_datasets": lambda rows: datasets.concatenate_datasets([rows, *[rows.select([7])] * 9]),
    "Subset": lambda rows: Subset(rows, [*range(30), *[7] * 9]),
    "ConcatDataset": lambda rows: ConcatDataset([rows, *[Subset(rows, [7])] * 9]),
    "other labels and ids": lambda rows: datasets.concatenate_datasets(
        [rows, datasets.Dataset.from_dict({"text": ["row 7"] * 9, "idx": range(9), "label": [5] * 9})]
    ),
    "a list": lambda rows: [*rows, *[rows[7]] * 9],
    "indices into rows that differ at each reading": lambda rows: Subset(Noisy(), [*range(30), *[7] * 9]),
}  # fmt: skip


class Noisy:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        import torch

        return {"pixel_values": torch.rand(3), "labels": index % 2}


@pytest.mark.parametrize("name", COPIED)
def test_copies_of_a_row_are_counted_by_content_or_index(name):
    assert TrainingRows(COPIED[name](rare())).repeats()[0] == 10
    assert TrainingRows(rare()).repeats() == (1, "`text`")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("planted", [False, True])
def test_training_says_it_once_on_the_console_and_nowhere_else(
    tmp_path, monkeypatch, warnings_of, planted
):
    said = warnings_of("run.private_run")
    if planted:
        monkeypatch.setattr(TrainingRows, "repeats", lambda rows: (1, "nothing"))
    rows = tiny.dataset().select([*range(25), *[7] * 4])
    trainer = tiny.trainer(tmp_path, given={"train_dataset": rows}, max_steps=1, accountant="rdp")
    trainer.train()
    trainer.save_model()
    found = [text for text in said if "Up to 5 rows of the training set are equal" in text]
    assert len(found) == (0 if planted else 1)
    files = [file for file in tmp_path.rglob("*") if file.suffix in (".json", ".md", ".jsonl")]
    assert files and not any("are equal" in file.read_text() for file in files)
