"""Labels: which class a value means, by the names that a file declares, and which it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
from tiny_images import NAMES

from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.tasks import classification
from hf_dp.tasks.classification import encode, label_ids
from hf_dp.tasks.sources import load_file


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
    with pytest.raises(
        DataError,
        match="it declares .'wolf', 'cat'.: row 2 holds 0. Correct the row .*`class_names`",
    ):
        ids(rows([1, 1, 0], ["wolf", "cat"]))


OUTSIDE = [("1", "cat"), (-1, 0), (None, 0), (3, 0), ("Cat", "cat")]


@pytest.mark.parametrize(("bad", "good"), OUTSIDE)
def test_a_label_outside_the_classes_is_named_with_its_row(bad, good):
    with pytest.raises(
        DataError, match=f"'label' has a value outside the classes .*: row 1 holds {bad!r}. Correct"
    ):
        ids(rows([good, bad]))
    with pytest.raises(DataError, match="ids 0 to 2.: row 0 holds 0.0, row 1 holds 1.5. Correct"):
        ids(rows([0.0, 1.5]))


def test_a_missing_label_of_a_declared_column_is_named():
    with pytest.raises(DataError, match="row 1 holds -1. Correct the row"):
        ids(rows([0, -1], NAMES))


def ids_of_file(folder: Path, text: str, names: list[str]) -> list[int]:
    folder.mkdir(exist_ok=True)
    file = folder / "rows.csv"
    file.write_text("label\n" + text.replace(" ", "\n"))
    return label_ids(load_file(str(file)), "label", names)


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
