"""What a card says beside the statement: the Hub's rules, what the user gave, plain words."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from huggingface_hub import ModelCard
from scipy import stats
from statements import SMALL, statement_of

from hf_dp import DPTrainer
from hf_dp.cards.card import in_short, most_found, render_card
from hf_dp.cards.details import CardDetails
from hf_dp.cards.verify import card_files
from hf_dp.cli.main import main
from hf_dp.errors import InvalidArgumentError


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
    local = CardDetails(base_model="/site-packages/encoder/model").base_model
    assert local == "encoder/model (local)"


def test_metadata_survives_a_round_trip_and_keeps_the_rules(tmp_path: Path) -> None:
    license = {"license": "other", "license_name": "mine", "license_link": "LICENSE"}
    details = CardDetails(
        **license, model_name="m", base_model="org/base", dataset="nyu-mll/glue/mnli",
        evaluation_split="validation", task_tag="text-classification", language=["en", "zh-Hant"],
        metrics={
            "eval_accuracy": 0.5, "eval_validation_matched_f1": 0.25, "eval_loss": 1.0,
            "eval_e2e_nist": 7.0, "eval_test_bertscore_f1": 0.75, "eval_e2e_rouge_l": 0.625,
        },
        repository="org/m",
    )  # fmt: skip
    text = render_card(statement_of(), details)
    (tmp_path / "README.md").write_text(text)
    data = ModelCard.load(tmp_path / "README.md").data
    found = data.to_dict()
    assert {name: found[name] for name in license} == license
    assert (found["base_model"], found["datasets"]) == ("org/base", ["nyu-mll/glue"])
    (index,) = found["model-index"]
    assert index["name"] == "m"
    scores = {
        (result["dataset"]["split"], metric["type"]): metric["value"]
        for result in index["results"]
        for metric in result["metrics"]
        if result["dataset"]["config"] == "mnli"
    }
    assert scores == {
        ("validation", "accuracy"): 0.5, ("validation_matched", "f1"): 0.25,
        ("validation", "nist"): 7.0, ("test", "bertscore"): 0.75,
    }  # fmt: skip
    assert str(data) == text.split("---\n")[1].rstrip()
    assert "hf-dp verify org/m" in text


def test_what_the_user_gave_survives_later_saves_and_a_resume(tmp_path: Path) -> None:
    arguments = {"accountant": "rdp", "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
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
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "mit"
    assert "; max_steps 2;" in card.content and "num_train_epochs" not in card.content


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> DPTrainer:
    trainer = tiny.trainer(tmp_path_factory.mktemp("run"), accountant="rdp", max_steps=1)
    trainer.train()
    trainer.describe(tags="films")
    trainer.save_model()
    return trainer


def test_an_edited_card_is_kept_until_it_is_deleted(finished, tmp_path, capsys):
    folder = shutil.copytree(finished.args.output_dir, tmp_path / "run")
    card = folder / "README.md"
    assert main(["card", str(folder), "--language", "en", "de"]) == 0
    made = card.read_text()
    for edited in (made.replace("license: unknown", "license: mit"), made + "\nMine.\n", "# x\n"):
        assert edited != made
        card.write_text(edited)
        assert main(["card", str(folder), "--license", "mit"]) == 2
        assert "README.md was edited" in capsys.readouterr().err
        assert card.read_text() == edited
    card.unlink()
    assert main(["card", str(folder), "--license", "mit", "--dataset", "org/rows"]) == 0
    data = ModelCard.load(card).data
    assert (data.license, data.language, data.datasets) == ("mit", ["en", "de"], ["org/rows"])
    assert "films" in data.tags
    assert main(["verify", str(folder)]) == 0
    assert card_files(folder)["README.md"] == card.read_bytes()
    # What was said of it before stays.
    for name, content in card_files(folder, repository="org/here").items():
        (folder / name).write_bytes(content)
    assert b"hf-dp verify org/here" in card_files(folder, given={"license": "mit"})["README.md"]


def test_epochs_are_expected_passes_over_the_rows(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, accountant="rdp", num_train_epochs=1, max_steps=-1, expected_batch_size=17
    )
    trainer.train()
    plan = trainer.privacy_plan
    assert plan is not None
    assert trainer.state.epoch == pytest.approx(plan.steps * 17 / plan.num_examples)
    assert plan.steps == math.ceil(plan.num_examples / 17)
    trainer.create_model_card(dataset_tags="glue", dataset="GLUE SST2", dataset_args="sst2")
    trainer.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert "; num_train_epochs 1;" in card.content and "max_steps" not in card.content
    assert card.data.datasets == ["glue/sst2"]


# -- plain words --


def test_most_found_bounds_every_test_of_a_gaussian_mechanism() -> None:
    """Against the exact trade-off of the Gaussian mechanism (Dong, Roth, Su 2022)."""
    for mu, delta in itertools.product((0.2, 1.0, 3.0), (1e-6, 1e-3)):
        found = 1 - stats.norm.cdf(stats.norm.ppf(0.99) - mu)
        grid = np.linspace(0, 40, 40_001)
        beside = np.exp(grid) * stats.norm.cdf(-mu / 2 - grid / mu)
        spent = stats.norm.cdf(mu / 2 - grid / mu) - beside
        epsilon = grid[np.argmax(spent <= delta)]
        assert found <= most_found(epsilon, delta)
    assert most_found(0.0, 0.0) == pytest.approx(0.01)
    assert most_found(3.0, 1e-5) == pytest.approx(0.2009, abs=1e-4)
    assert most_found(8.0, 1e-5) == pytest.approx(1 - math.exp(-8) * 0.98999)
    assert most_found(1000.0, 1e-5) <= 1.0


@pytest.mark.parametrize(
    ("epsilon", "words"), [(1.0, "strongly"), (3.0, "moderately"), (8.0, "weakly")]
)
def test_a_guarantee_is_judged_by_what_it_promises(epsilon: float, words: str) -> None:
    said = in_short(dataclasses.replace(statement_of(), epsilon=epsilon))
    (line,) = [line for line in said if "How strongly" in line]
    assert words in line and " in 100 used rows" in line


def test_a_large_delta_is_remarked() -> None:
    def said(rows: int, delta: float) -> str:
        plan = dataclasses.replace(SMALL, num_examples=rows, expected_batch_size=2.0, delta=delta)
        return "\n".join(in_short(dataclasses.replace(statement_of(), plan=plan)))

    assert "A large delta" in said(5, 0.1) and "1 in 10,000 is customary" in said(5, 0.1)
    assert "A large delta" not in said(10**6, 1e-7)


def test_without_a_guarantee_nothing_is_promised() -> None:
    text = "\n".join(in_short(statement_of(insecure_seed=True)))
    assert "nothing that anyone could rely on" in text and "How strongly" not in text


def test_only_numbers_are_metrics_and_a_diverged_run_can_be_saved(finished, tmp_path):
    given = {"eval_loss": float("nan"), "eval_accuracy": np.float32(0.5), "eval_samples": "row 17"}
    details = CardDetails(metrics=given, training={"betas": (0.9, float("inf")), "x": tmp_path})
    assert details.metrics == {"eval_loss": None, "eval_accuracy": 0.5}
    assert CardDetails.from_dict(json.loads(json.dumps(details.to_dict()))) == details
    assert "row 17" not in render_card(statement_of(), details)
    finished._evaluation[finished.state.global_step] = given
    finished.save_model(str(tmp_path / "again"))
    assert main(["verify", str(tmp_path / "again")]) == 0
