"""Rows of classification: all that is wrong in a user's CSV file at once, which class a value means
and which it cannot, class names to paste; and metrics."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import tiny
import tiny_text
import torch
import yaml
from tiny_images import NAMES
from transformers import BertForSequenceClassification, set_seed

from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.tasks import classification
from hf_dp.tasks.classification import (
    METRICS,
    checked_names,
    encode,
    label_ids,
    label_names,
    metrics,
)
from hf_dp.tasks.models import ModelArguments, load_classifier
from hf_dp.tasks.sources import load_file


def written(folder: Any, *lines: str, name: str = "rows.csv") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def test_all_that_is_wrong_is_said_at_once_with_its_rows(tmp_path):
    train = written(tmp_path, "sentence,label", "a film,good", ",bad", "b,god", ",good", "c,bda")
    dev = written(tmp_path, "text,label", "a plot,good", "b,fine", name="dev.csv")
    sets = {"training rows": load_file(train), "dev rows": load_file(dev)}
    with pytest.raises(DataError) as caught:
        checked_names(sets, ["sentence"], "label", ["bad", "good"])
    no_text, labels, missing, other = str(caught.value).splitlines()
    assert no_text.startswith("training rows: The text column 'sentence' holds no text: row 1 hold")
    assert "row 1 holds None, row 3 holds None. Fill" in no_text
    assert "training rows: The label column" in labels
    assert "row 2 holds 'god', row 4 holds 'bda'. Correct" in labels
    assert missing.startswith("dev rows: `text_columns` names ['sentence'], but the data has")
    assert other.startswith("dev rows: The label column") and "row 1 holds 'fine'" in other
    with pytest.raises(DataError, match="row 3 holds None(.|\n)*row 4 holds 'bda'"):
        encode(load_file(train), tiny.tokenizer(), ["sentence"], "label", ["bad", "good"], 16)


def test_a_long_list_of_rows_is_cut(tmp_path):
    file = written(tmp_path, "sentence,label", *["a,goood"] * 30)
    with pytest.raises(DataError, match="row 9 holds 'goood' and 20 more. Correct"):
        checked_names({"rows": load_file(file)}, ["sentence"], "label", ["bad", "good"])


def test_lines_with_commas_outside_quotes_are_all_named(tmp_path):
    lines = ["sentence,label", "a film,good", "slow, long,bad", '"slow, long",bad', "a, b, c,good"]
    with pytest.raises(DataError, match="first line has 2 fields, but line 3 has 3, line 5 has 4"):
        load_file(written(tmp_path, *lines))


PASTED = {
    "words": (["good", "bad", "so so"], ["bad", "good", "so so"]),
    "words that YAML reads otherwise": (["no", "yes", "no"], ["no", "yes"]),
    "true and false": (["true", "false", "true"], ["false", "true"]),
    "ids": (
        ["1", "0", "2"] * 4 + ["10", "3", "4", "5", "6", "7", "8", "9"],
        [*map(str, range(11))],
    ),
}


@pytest.mark.parametrize("case", PASTED)
def test_the_classes_that_the_rows_hold_can_be_pasted(case, tmp_path):
    labels, expected = PASTED[case]
    rows = load_file(written(tmp_path, "label", *labels))
    with pytest.raises(DataError, match="declares no class names.*reveals nobody") as caught:
        label_names(rows, "label", [])
    line = re.search(r"class_names: \[.*?\]", str(caught.value))
    assert line is not None and yaml.safe_load(line[0]) == {"class_names": expected}
    assert checked_names({"rows": rows}, [], "label", expected) == expected


def test_numbers_that_are_no_ids_are_not_offered_as_names(tmp_path):
    rows = load_file(written(tmp_path, "label", "1", "2", "5"))
    with pytest.raises(DataError, match=r"class_names: \[negative, positive\]$"):
        label_names(rows, "label", [])


def rows(labels: list[Any], declared: list[str] | None = None) -> datasets.Dataset:
    made = datasets.Dataset.from_dict({"sentence": ["a film"] * len(labels), "label": labels})
    if declared is None:
        return made
    return made.cast_column("label", datasets.ClassLabel(names=declared))


def ids(made: datasets.Dataset) -> list[int]:
    return label_ids(made, "label", NAMES)


def test_ids_of_a_declared_column_stand_for_their_names():
    declared = rows([0, 1, 2, 0], ["owl", "dog", "cat"])
    assert ids(declared) == [2, 1, 0, 2]
    encoded = encode(declared, tiny.tokenizer(), ["sentence"], "label", NAMES, 16)
    assert encoded["label"][:] == [2, 1, 0, 2]
    assert ids(rows([0, 3], ["owl", "dog", "wolf", "cat"])) == [2, 0]
    assert ids(rows(["owl", "cat"])) == [2, 0]
    assert ids(rows([2, 0])) == [2, 0]


def test_a_declared_name_that_is_no_class_is_named():
    message = "it declares .'wolf', 'cat'.: row 2 holds 0. Correct the row .*`class_names`"
    with pytest.raises(DataError, match=message):
        ids(rows([1, 1, 0], ["wolf", "cat"]))


@pytest.mark.parametrize(
    ("bad", "good"), [("1", "cat"), (-1, 0), (None, 0), (3, 0), ("Cat", "cat")]
)
def test_a_label_outside_the_classes_is_named_with_its_row(bad, good):
    message = f"'label' has a value outside the classes .*: row 1 holds {bad!r}. Correct"
    with pytest.raises(DataError, match=message):
        ids(rows([good, bad]))
    with pytest.raises(DataError, match="ids 0 to 2.: row 0 holds 0.0, row 1 holds 1.5. Correct"):
        ids(rows([0.0, 1.5]))


def test_a_missing_label_of_a_declared_column_is_named():
    with pytest.raises(DataError, match="row 1 holds -1. Correct the row"):
        ids(rows([0, -1], NAMES))


def ids_of_file(folder: Path, text: str, names: list[str]) -> list[int]:
    return label_ids(load_file(written(folder, "label", *text.split())), "label", names)


# In the order of their ids: what a file says, and what its rows are.
TRUTHS = {
    "of two classes": (["bad", "good"], [0, 1, 1]),
    "by name": (["true", "false"], [1, 0, 0]),
    "by a name in capitals": (["FALSE", "True", "unsure"], [0, 1, 1]),
}


@pytest.mark.parametrize("case", TRUTHS)
def test_true_and_false_of_a_file_are_their_classes(case, tmp_path):
    names, expected = TRUTHS[case]
    for number, words in enumerate(["false true true", "False True True", "FALSE TRUE TRUE"]):
        assert ids_of_file(tmp_path / str(number), words, names) == expected
    made = rows([False, True, True])
    assert label_ids(made, "label", names) == expected


@pytest.mark.parametrize("names", [["a", "b", "c"], ["true", "wrong"]])
def test_true_and_false_that_are_no_class_are_named(names):
    with pytest.raises(DataError, match="row 0 holds False, row 1 holds False. Corr"):
        label_ids(rows([False, False]), "label", names)


@pytest.mark.parametrize("names", [["2", "1", "0"], ["1", "2", "3"], ["0.0", "2.0"], ["-1", "1"]])
def test_names_that_are_other_numbers_than_the_ids_are_refused(names, tmp_path):
    """Also where the rows of a set happen to hold nothing that shows it."""
    with pytest.raises(InvalidArgumentError, match="class_names.* count from 0, got .* would be"):
        ids_of_file(tmp_path, "0 1 0", names)
    with pytest.raises(InvalidArgumentError, match="Put the names in the order of the numbers"):
        encode(rows([1]), tiny.tokenizer(), ["sentence"], "label", names, 16)
    assert label_ids(rows([names[1], names[0]]), "label", names) == [1, 0]


def test_names_that_are_the_ids_are_free(tmp_path):
    assert ids_of_file(tmp_path, "0 2 1", ["0", "1", "2"]) == [0, 2, 1]
    assert label_ids(rows([0, 1], ["1", "0"]), "label", ["0", "1"]) == [1, 0]


def test_planted_reading_of_true_as_1_is_seen(monkeypatch):
    monkeypatch.setattr(classification, "_TRUTHS", {})
    assert label_ids(rows([True]), "label", ["true", "false"]) != [0]


def test_accuracy_and_f1_against_counts():
    labels = np.array([0, 1, 1, 0, 1, 1])
    predicted = np.array([0, 1, 0, 1, 1, 1])  # 3 true positives, 1 false positive, 1 false negative
    prediction = SimpleNamespace(predictions=np.eye(2)[predicted], label_ids=labels)
    assert metrics(METRICS, 2)(prediction) == {
        "accuracy": pytest.approx(4 / 6),
        "f1": pytest.approx(2 * 3 / (2 * 3 + 1 + 1)),
    }
    nothing = SimpleNamespace(predictions=np.eye(2)[[0, 0]], label_ids=np.array([0, 0]))
    assert metrics(["f1"], 2)(nothing) == {"f1": 0.0}


def test_f1_is_of_two_classes():
    with pytest.raises(InvalidArgumentError, match="without f1 for 3 classes"):
        metrics(["f1"], 3)
    with pytest.raises(InvalidArgumentError, match="`metrics` to be one of"):
        metrics(["bleu"], 2)


def test_the_modules_are_shipped():
    """A Python file inside a package that setuptools finds is in the wheel."""
    root = Path(__file__).parents[2]
    found = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    setuptools = pytest.importorskip("setuptools")
    packages = setuptools.find_namespace_packages(str(root), include=found["find"]["include"])
    assert {"hf_dp.tasks.generation", "hf_dp.cli.tasks"} <= set(packages)


# -- the head of a base ---


def loaded(path: Path, *names: str) -> Any:
    set_seed(1)
    return load_classifier(ModelArguments(str(path)), ["sentence"], names)[0]


def test_a_head_is_kept_only_where_the_classes_are_the_same(tmp_path):
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    base = tiny.model(**labels)
    kept = loaded(tiny.save(tmp_path, base), "bad", "good")
    assert torch.equal(kept.classifier.weight, base.classifier.weight)
    assert kept.newly_initialized == []
    for names in (("good", "bad"), ("spam", "ham"), ("a", "b", "c")):
        model, again = loaded(tmp_path, *names), loaded(tmp_path, *names)
        assert model.newly_initialized == ["classifier.bias", "classifier.weight"]
        assert [*model.config.id2label.values()] == [*names] and model.num_labels == len(names)
        head = model.classifier.weight
        assert torch.equal(head, again.classifier.weight)  # `seed` makes it
        assert head.shape == (len(names), 16) and head.abs().max() > 0
        assert not torch.equal(head[:2], base.classifier.weight)
        assert torch.equal(model.bert.pooler.dense.weight, base.bert.pooler.dense.weight)


def test_what_a_base_without_a_head_lacks_is_drawn_once(tmp_path):
    model = loaded(tiny.save(tmp_path, tiny.model().bert), "a", "b", "c")
    set_seed(1)
    plain = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(model.classifier.weight, plain.classifier.weight)
    assert model.newly_initialized == ["classifier.bias", "classifier.weight"]


def test_weights_that_do_not_fit_outside_the_head_are_refused(tmp_path):
    tiny.save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"intermediate_size": 32', '"intermediate_size": 64'))
    with pytest.raises(DataError, match="do not fit its config.json: bert.encoder"):
        loaded(tmp_path, "a", "b")


def test_rows_without_tokens_are_named():
    def encoded(*texts: str) -> datasets.Dataset:
        found = {"sentence": [*texts], "label": [0] * len(texts)}
        words = tiny_text.tokenizer()
        return encode(datasets.Dataset.from_dict(found), words, ["sentence"], "label", NAMES, 8)

    assert len(encoded("a film", "good")) == 2
    with pytest.raises(DataError, match="Rows without tokens: 1, 3. Leave them out"):
        encoded("a film", "", "good", "")
    with pytest.raises(DataError, match="6, 7, 8, 9 and 2 more"):
        encoded(*[""] * 12)
