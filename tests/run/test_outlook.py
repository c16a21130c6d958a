"""Warnings before the first step: of settings known to fail, and of none known to work."""

from __future__ import annotations

import logging
import re

import datasets
import pytest
import tiny
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy.stats import binom
from torch.utils.data import ConcatDataset, Subset

from hf_dp.overlap import TrainingRows
from hf_dp.planning import most_signal
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run import outlook, private_run
from hf_dp.run.outlook import doubts, of_repeated_rows

EXACT = outlook._epsilon


def plan(**options):
    options = {
        "num_examples": 67_349,
        "expected_batch_size": 1024,
        "num_train_epochs": 3,
        "target_epsilon": 3,
        "clipping_norm": 0.1,
        "accountant": "rdp",
        **options,
    }
    return PrivacyPlan.create(**options)


def said(made, parameters=22_000_000, learning_rate=1e-3, optimizer="adamw_torch_fused"):
    return list(
        doubts(made, parameters=parameters, learning_rate=learning_rate, optimizer=optimizer)
    )


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
    assert [each.startswith("learning_rate is") for each in found] == [True] * warned


def test_noise_that_drowns_the_gradients():
    few = plan(num_examples=300, expected_batch_size=32)
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


def test_the_trainer_says_so_once(tmp_path, caplog):
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    made = tiny.trainer(tmp_path, learning_rate=5e-5, **options)
    with caplog.at_level(logging.WARNING, "hf_dp"):
        made.train()
    assert sum("learning_rate is 5e-05" in message for message in caplog.messages) == 1
    caplog.clear()
    again = tiny.trainer(tmp_path, learning_rate=5e-5, **options)
    with caplog.at_level(logging.WARNING, "hf_dp"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not any("learning_rate" in message for message in caplog.messages)


# Equal rows


def test_the_epsilon_of_a_record_in_ten_rows_is_that_of_dp_accountings_mixture(monkeypatch):
    monkeypatch.setattr(outlook, "_epsilon", EXACT)
    made = PrivacyPlan.create(
        num_examples=1000, expected_batch_size=50, max_steps=20, noise_multiplier=1.5,
        target_delta=1e-5, clipping_norm=0.1,
    )  # fmt: skip
    said = of_repeated_rows(made, 10, "`sentence`")
    of_record, of_row = map(float, re.findall(r"(?:epsilon|row has) (\d+\.\d+)", said))
    step = google_pld.from_mixture_gaussian_mechanism(
        1.5,
        list(range(11)),
        binom.pmf(range(11), 10, 0.05).tolist(),
        value_discretization_interval=1e-2,
    )
    expected = step.self_compose(20).get_epsilon_for_delta(1e-5)
    assert 0.999 * expected <= of_record <= 1.02 * expected
    assert of_row < of_record / 3
    assert "10 rows" in said and "`sentence`" in said
    assert "weight its loss" in said and "privacy_unit='user'" in said


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
    "concatenate_datasets": lambda rows: datasets.concatenate_datasets(
        [rows, *[rows.select([7])] * 9]
    ),
    "Subset": lambda rows: Subset(rows, [*range(30), *[7] * 9]),
    "ConcatDataset": lambda rows: ConcatDataset([rows, *[Subset(rows, [7])] * 9]),
    "other labels and ids": lambda rows: datasets.concatenate_datasets(
        [
            rows,
            datasets.Dataset.from_dict({"text": ["row 7"] * 9, "idx": range(9), "label": [5] * 9}),
        ]
    ),
    "a list": lambda rows: [*rows, *[rows[7]] * 9],
    "indices into rows that differ at each reading": lambda rows: Subset(
        Noisy(), [*range(30), *[7] * 9]
    ),
}


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


@pytest.mark.parametrize("planted", [False, True])
def test_training_says_it_once_on_the_console_and_nowhere_else(tmp_path, monkeypatch, planted):
    said: list[str] = []
    monkeypatch.setattr(private_run.logger, "warning", lambda text, *given: said.append(text))
    if planted:
        monkeypatch.setattr(TrainingRows, "repeats", lambda rows: (1, "nothing"))
    rows = tiny.dataset().select([*range(25), *[7] * 4])
    trainer = tiny.trainer(tmp_path, given={"train_dataset": rows}, max_steps=1)
    trainer.train()
    trainer.save_model()
    found = [text for text in said if "Up to 5 rows of the training set are equal" in text]
    assert len(found) == (0 if planted else 1)
    files = [file for file in tmp_path.rglob("*") if file.suffix in (".json", ".md", ".jsonl")]
    assert files and not any("are equal" in file.read_text() for file in files)
