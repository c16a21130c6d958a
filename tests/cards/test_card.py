"""The card: statement first, a key equal to it, nothing local, nothing that breaks its format."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from statements import SST2, statement_of

from hf_dp._dataclasses import plain
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails, here, markdown, public_name
from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.statement import PrivacyStatement

HOSTILE = (
    "x: y\n---\n# Owned\n- [a](http://b) | <script>alert(1)</script> `c` \"q\" 'r' {{ 1234567*3 }} "
    "{% raw %} *b* _u_ \\ &amp;\u2028\u202e"
)


def render(statement: PrivacyStatement, **values: Any) -> str:
    return render_card(statement, CardDetails(**{"model_name": "my-model", **values}))


def loaded(text: str, folder: Path) -> ModelCard:
    (folder / "README.md").write_text(text, encoding="utf-8")
    card = ModelCard.load(folder / "README.md")
    assert card.content == text
    return card


@pytest.fixture(scope="module")
def sst2() -> PrivacyStatement:
    return statement_of(SST2)


@pytest.fixture(scope="module")
def small() -> PrivacyStatement:
    return statement_of()


def test_sst2_card(sst2: PrivacyStatement, tmp_path: Path) -> None:
    text = render(
        sst2,
        base_model="distilroberta-base",
        dataset="stanfordnlp/sst2",
        task_tag="text-classification",
        metrics={"eval_accuracy": 0.9123456789},
        training={"learning_rate": 5e-4, "num_train_epochs": 3.0, "max_steps": -1},
        license="apache-2.0",
        language="en",
        tags=["mine", "dp-sgd"],
        library_name="peft",
    )
    card = loaded(text, tmp_path)
    data = card.data
    in_yaml = yaml.safe_load(text.split("---\n")[1])["differential_privacy"]
    assert data["differential_privacy"] == in_yaml == plain(sst2.to_dict())
    assert data["differential_privacy"]["epsilon"] == sst2.epsilon
    assert data["differential_privacy"]["delta"] == SST2.delta
    names = (data.base_model, data.datasets, data.license)
    assert names == ("distilroberta-base", ["stanfordnlp/sst2"], "apache-2.0")
    names = (data.pipeline_tag, data.library_name, data.language)
    assert names == ("text-classification", "peft", ["en"])
    assert data.tags == ["mine", "dp-sgd", "differential-privacy", "hf_dp"]
    assert f"({sst2.epsilon:.3f}, 7.425e-06)-differentially private" in card.text
    assert re.search(r"\| gdp_clt \| 1\.5\d+ \| estimate, not a guarantee \|", card.text)
    assert f"| pld | {sst2.epsilon:.3f} | upper bound: **the epsilon of this card** |" in card.text
    assert "point estimate 2.410" in card.text
    assert "evaluation data" in card.text
    assert "| eval_accuracy | 0.912346 |" in card.text
    assert "| Settings | learning_rate 0.0005; num_train_epochs 3; max_steps -1 |" in card.text
    assert card.text.index("differentially private") < card.text.index("## How it was trained\n")


def test_a_run_that_is_not_private_has_no_epsilon_and_no_dp_tags(tmp_path: Path) -> None:
    statement = statement_of(insecure_seed=True)
    card = loaded(render(statement, tags=["differential-privacy", "mine"]), tmp_path)
    key = card.data["differential_privacy"]
    assert (key["status"], key["epsilon"], "accountant" in key) == ("not_private", None, False)
    assert "| pld" not in card.text
    assert card.data.tags == ["mine", "hf_dp"]
    assert "This run is NOT private" in card.text
    assert "differentially private" not in card.text


def test_a_release_is_said_in_prose_and_metadata(tmp_path: Path) -> None:
    statement = statement_of(released=("training_loss",))
    card = loaded(render(statement), tmp_path)
    assert card.data["differential_privacy"]["released_without_noise"] == ["training_loss"]
    assert "Training_loss: released without noise at the user's request" in card.text
    assert "proven for the weights only" in card.text


@pytest.mark.parametrize(
    ("values", "released"),
    [
        ({"metrics": {"train_accuracy": 0.9}}, ()),
        ({"metrics": {"loss": 0.9}}, ()),
        ({"training": {"train_loss": 0.3}}, ()),
        ({"training": {"grad_norm": 0.3}}, ()),
        ({"training": {"total_flos": 1e9}}, ()),
        # of the steps, not of an evaluation
        ({"metrics": {"train_loss": 0.1}}, ("evaluation_on_training_rows",)),
    ],
)
def test_unnoised_training_quantities_are_refused(values, released):
    with pytest.raises(InvalidArgumentError, match="not noised"):
        render(statement_of(released=released), **values)


def test_unnoised_training_quantities_are_shown_when_released(small: PrivacyStatement) -> None:
    assert "| Settings | train_batch_size 8 |" in render(small, training={"train_batch_size": 8})
    text = render(small, metrics={"eval_accuracy": 0.9})
    assert "epsilon does not cover the evaluation data" in text
    released = statement_of(released=("training_loss", "evaluation_on_training_rows"))
    metrics = {"eval_accuracy": 0.9, "train_accuracy": 0.95}
    text = render(released, metrics=metrics, training={"training_loss": 0.3})
    assert "| Settings | training_loss 0.3 |" in text and "| train_accuracy | 0.95 |" in text
    said = "evaluation data and, at the user's request, on training rows. Epsilon covers neither."
    assert said in text


def test_what_is_unknown_has_no_row(small: PrivacyStatement, tmp_path: Path) -> None:
    card = loaded(render(small, training={"seed": None}), tmp_path)
    for name in ("Base model", "Training data", "Recipe"):
        assert name not in card.text
    assert "| Settings | seed unknown |" in card.text
    assert re.search(r"## Evaluation results\n\nNone was reported", card.text)
    assert card.data.license == "unknown"
    assert card.data.base_model is None


def test_no_local_path_gets_in(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "encoder").mkdir(parents=True)
    files = ["./a/b.json", "C:\\data\\c.json"]
    text = render(
        small,
        model_name="/data/main/runs/my-model",
        base_model=here("here/encoder"),
        dataset=str(tmp_path / "train.csv"),
        training={"optim_args": "/data/secret/args.yaml", "files": files},
        tags=["/data/tag"],
        metrics={"eval_accuracy": 0.9},
    )
    for private in ("/data", str(tmp_path), "/tmp", "secret"):
        assert private not in text
    card = loaded(text, tmp_path)
    assert (card.data.base_model, card.data.datasets) == (None, None)
    assert card.text.lstrip().startswith("# my-model: on train.csv (local), trained with ")
    assert "| Base model | encoder (local) |" in text
    assert "files b.json, c.json |" in text


def test_whether_a_name_is_local_is_asked_where_it_is_given(tmp_path, monkeypatch):
    """Not where a card is read: a folder there may have the name of a repository."""
    monkeypatch.chdir(tmp_path)
    for name in ("stanfordnlp/sst2", "mybert"):
        (tmp_path / name).mkdir(parents=True)
    read = CardDetails.from_dict(CardDetails(dataset="stanfordnlp/sst2").to_dict())
    assert read.dataset == read.hub_dataset == "stanfordnlp/sst2"
    said = read.with_given(base_model="mybert", license="mit")
    assert (said.dataset, said.base_model, said.hub_base) == (
        "stanfordnlp/sst2",
        "mybert (local)",
        None,
    )
    assert CardDetails.from_dict(said.to_dict()) == said


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("org/model", "org/model"),
        ("/a/b/", "b"),
        ("./run", "run"),
        ("~/run", "run"),
        ("file:///a/b", "b"),
        ("C:\\a\\b", "b"),
        ("..", None),
        ("/", None),
        ("", None),
        (None, None),
    ],
)
def test_public_name(value: str | None, name: str | None) -> None:
    assert public_name(value) == name


@pytest.mark.parametrize(
    "field", ["model_name", "base_model", "dataset", "recipe", "license_name", "trained"]
)
def test_hostile_names_break_neither_yaml_nor_markdown(small, field, tmp_path):
    statement = statement_of(trained=HOSTILE) if field == "trained" else small
    values = {} if field == "trained" else {field: HOSTILE}
    if field == "license_name":
        values["license"] = "other"
    values |= {"metrics": {HOSTILE: 0.1}, "training": {HOSTILE: HOSTILE}}
    check_intact(render(statement, **values), statement, tmp_path)


def check_intact(text: str, statement: PrivacyStatement, folder: Path) -> None:
    card = loaded(text, folder)
    assert card.data["differential_privacy"] == plain(statement.to_dict())
    titles = [line for line in card.text.splitlines() if line.startswith("#")]
    assert len(titles) == 4  # the title, and three sections
    assert not any(line.startswith("# Owned") for line in titles)
    assert not re.search(r"(?<!\\)<script", card.text)
    assert not re.search(r"(?<!\\)\[a(?<!\\)\]", card.text)
    assert "3703701" not in text
    for line in card.text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)
        assert "---" not in line or set(line) <= set("|-") or "\\# Owned" in line


def test_markdown_keeps_ordinary_text_readable() -> None:
    ordinary = "eval_accuracy 0.91 (7.4e-06, -1) a-b"
    assert markdown(ordinary) == ordinary
    assert markdown("- a") == "\\- a"
    assert markdown("1. a") == "1\\. a"
    assert markdown("_u_") == "\\_u\\_"
