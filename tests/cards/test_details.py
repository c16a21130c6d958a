"""What a card says beside the statement: the Hub's rules, what the user gave, plain words."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from huggingface_hub import ModelCard
from scipy import stats
from statements import FACTS, statement_of

from hf_dp.accounting import Ledger
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails
from hf_dp.cards.evidence import card_files
from hf_dp.cards.plain_words import in_short, most_found
from hf_dp.cli.main import main
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.statement.statement import PrivacyStatement


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tags", ["a\nb"], "on one line"),
        ("model_name", 3, "to be text"),
        ("metrics", [1], "to be a mapping"),
        ("given", ["colour"], "'colour'"),
    ],
)
def test_what_no_card_can_say_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        CardDetails(**{field: value})


def test_names_that_are_no_ids_are_said_and_stay_out_of_the_metadata() -> None:
    details = CardDetails(dataset="AG News", base_model="/data/models/bert", license="mit")
    assert (details.hub_dataset, details.hub_base) == (None, None)
    assert CardDetails(dataset="nyu-mll/glue/sst2").hub_dataset == "nyu-mll/glue"
    assert CardDetails(base_model="gpt2").hub_base == "gpt2"
    cached = "/data/.cache/huggingface/hub/models--org--bert/snapshots/0a1b"
    assert CardDetails(base_model=cached).hub_base == "org/bert"
    assert CardDetails(base_model="/site-packages/encoder/model").base_model == (
        "encoder/model (local)"
    )


def test_metadata_survives_a_round_trip_and_keeps_the_rules(tmp_path: Path) -> None:
    details = CardDetails(
        model_name="m",
        base_model="org/base",
        dataset="nyu-mll/glue/mnli",
        evaluation_split="validation",
        task_tag="text-classification",
        metrics={"eval_accuracy": 0.5, "eval_validation_matched_f1": 0.25, "eval_loss": 1.0},
        license="other",
        license_name="mine",
        license_link="LICENSE",
        language=["en", "zh-Hant"],
        repository="org/m",
    )
    text = render_card(statement_of(), details)
    (tmp_path / "README.md").write_text(text)
    data = ModelCard.load(tmp_path / "README.md").data
    found = data.to_dict()
    assert (found["license"], found["license_name"], found["license_link"]) == (
        "other",
        "mine",
        "LICENSE",
    )
    assert (found["base_model"], found["datasets"]) == ("org/base", ["nyu-mll/glue"])
    (index,) = found["model-index"]
    assert index["name"] == "m"
    scores = {
        (result["dataset"]["split"], metric["type"]): metric["value"]
        for result in index["results"]
        for metric in result["metrics"]
        if result["dataset"]["config"] == "mnli"
    }
    assert scores == {("validation", "accuracy"): 0.5, ("validation_matched", "f1"): 0.25}
    assert str(data) == text.split("---\n")[1].rstrip()
    assert "hf-dp verify org/m" in text


def test_what_the_user_gave_survives_later_saves_and_a_resume(tmp_path: Path) -> None:
    arguments = {"accountant": "rdp", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = tiny.trainer(tmp_path, **arguments)
    first.describe(license="mit")
    first.train()
    first.create_model_card(language="en", finetuned_from="org/base", tags=["mine"])
    with pytest.raises(InvalidArgumentError, match="licence"):
        first.create_model_card(licence="mit")
    first.save_model()
    first.save_model()
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.language, data.base_model) == ("mit", ["en"], "org/base")
    assert "mine" in data.tags
    again = tiny.trainer(tmp_path, **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.license == "mit"


def test_an_edited_card_is_kept_until_it_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tiny.trainer(tmp_path, accountant="rdp")
    trainer.train()
    trainer.describe(tags="films")
    trainer.save_model()
    assert main(["card", str(tmp_path), "--language", "en", "de"]) == 0
    made = (tmp_path / "README.md").read_text()
    for edited in (made.replace("license: unknown", "license: mit"), made + "\nMine.\n", "# x\n"):
        assert edited != made
        (tmp_path / "README.md").write_text(edited)
        assert main(["card", str(tmp_path), "--license", "mit"]) == 2
        assert "README.md was edited" in capsys.readouterr().err
        assert (tmp_path / "README.md").read_text() == edited
    (tmp_path / "README.md").unlink()
    assert main(["card", str(tmp_path), "--license", "mit", "--dataset", "org/rows"]) == 0
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.language, data.datasets) == ("mit", ["en", "de"], ["org/rows"])
    assert "films" in data.tags
    assert main(["verify", str(tmp_path)]) == 0
    files = card_files(tmp_path)
    assert files["README.md"] == (tmp_path / "README.md").read_bytes()


def test_epochs_are_expected_passes_over_the_rows(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, accountant="rdp", num_train_epochs=2, max_steps=-1, expected_batch_size=17
    )
    trainer.train()
    plan = trainer.privacy_plan
    assert plan is not None
    assert trainer.state.epoch == pytest.approx(plan.steps * 17 / plan.num_examples)
    assert plan.steps == math.ceil(2 * plan.num_examples / 17)


# -- plain words --


def test_most_found_bounds_every_test_of_a_gaussian_mechanism() -> None:
    """Against the exact trade-off of the Gaussian mechanism (Dong, Roth, Su 2022)."""
    for mu, delta in itertools.product((0.2, 1.0, 3.0), (1e-6, 1e-3)):
        found = 1 - stats.norm.cdf(stats.norm.ppf(0.99) - mu)
        grid = np.linspace(0, 40, 40_001)
        spent = stats.norm.cdf(mu / 2 - grid / mu) - np.exp(grid) * stats.norm.cdf(
            -mu / 2 - grid / mu
        )
        epsilon = grid[np.argmax(spent <= delta)]
        assert found <= most_found(epsilon, delta)
    assert most_found(0.0, 0.0) == pytest.approx(0.01)
    assert most_found(3.0, 1e-5) == pytest.approx(0.2009, abs=1e-4)
    assert most_found(8.0, 1e-5) == pytest.approx(1 - math.exp(-8) * 0.98999)
    assert most_found(1000.0, 1e-5) <= 1.0


@pytest.mark.parametrize(
    ("sigma", "words"),
    [(20.0, "strongly"), (0.6, "moderately"), (0.4, "weakly")],
)
def test_a_guarantee_is_judged_by_what_it_promises(sigma: float, words: str) -> None:
    plan = PrivacyPlan(100_000, 500.0, 20, 1e-6, DpSgdPlan(0.1, sigma))
    ledger = Ledger()
    ledger.append(plan.event(), "training")
    (line,) = [x for x in in_short(PrivacyStatement.from_ledger(plan, ledger, FACTS)) if "100" in x
               and "How strongly" in x]  # fmt: skip
    assert words in line


def test_a_large_delta_is_remarked() -> None:
    plan = PrivacyPlan(5, 2.0, 4, 0.1, DpSgdPlan(0.1, 2.0))
    ledger = Ledger()
    ledger.append(plan.event(), "training")
    text = "\n".join(in_short(PrivacyStatement.from_ledger(plan, ledger, FACTS)))
    assert "A large delta" in text and "Of so few rows" in text
    assert "A large delta" not in "\n".join(
        in_short(PrivacyStatement.from_ledger(PrivacyPlan(10**6, 1e3, 4, 1e-7, DpSgdPlan(0.1, 1.0)),
                                              Ledger(), FACTS))
    )  # fmt: skip


def test_without_a_guarantee_nothing_is_promised() -> None:
    text = "\n".join(in_short(statement_of(insecure_seed=True)))
    assert "nothing that anyone could rely on" in text and "How strongly" not in text


def test_only_numbers_are_metrics_and_a_diverged_run_can_be_saved(tmp_path: Path) -> None:
    given = {"eval_loss": float("nan"), "eval_accuracy": np.float32(0.5), "eval_samples": "row 17"}
    details = CardDetails(metrics=given, training={"betas": (0.9, float("inf")), "x": tmp_path})
    assert details.metrics == {"eval_loss": None, "eval_accuracy": 0.5}
    assert CardDetails.from_dict(json.loads(json.dumps(details.to_dict()))) == details
    assert "row 17" not in render_card(statement_of(), details)
    trainer = tiny.trainer(tmp_path, accountant="rdp")
    trainer.train()
    trainer._evaluation.update(given)
    trainer.save_model()
    assert main(["verify", str(tmp_path)]) == 0
