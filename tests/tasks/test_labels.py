"""Labels: which class a value means, by the names that a file declares, and which it cannot."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import tiny
from tiny_images import NAMES

from hf_dp.errors import DataError
from hf_dp.tasks.classification import encode, label_ids


def rows(labels: list[Any], declared: list[str] | None = None) -> datasets.Dataset:
    made = datasets.Dataset.from_dict({"sentence": ["a film"] * len(labels), "label": labels})
    if declared is None:
        return made
    return made.cast_column("label", datasets.ClassLabel(names=declared))


def encoded(made: datasets.Dataset) -> list[int]:
    return encode(made, tiny.tokenizer(), ["sentence"], "label", NAMES, 16)["label"][:]


BOTH = pytest.mark.parametrize(
    "ids", [lambda made: label_ids(made, "label", NAMES), encoded], ids=["images", "texts"]
)


@BOTH
def test_ids_of_a_declared_column_stand_for_their_names(ids):
    assert ids(rows([0, 1, 2, 0], ["owl", "dog", "cat"])) == [2, 1, 0, 2]
    assert ids(rows([0, 3], ["owl", "dog", "wolf", "cat"])) == [2, 0]
    assert ids(rows(["owl", "cat"])) == [2, 0]
    assert ids(rows([2, 0])) == [2, 0]


@BOTH
def test_a_declared_name_that_is_no_class_is_named(ids):
    with pytest.raises(
        DataError,
        match="row 2 holds 0, which the data calls 'wolf'. Correct the row .*`class_names` to names "
        "out of .'wolf', 'cat'",
    ):
        ids(rows([1, 1, 0], ["wolf", "cat"]))


@BOTH
@pytest.mark.parametrize(
    ("bad", "good"), [(1.5, 0.0), ("1", "cat"), (-1, 0), (None, 0), (3, 0), ("Cat", "cat")]
)
def test_a_label_outside_the_classes_is_named_with_its_row(ids, bad, good):
    if good == 0.0 and isinstance(good, float):
        with pytest.raises(DataError, match="ids 0 to 2.: row 0 holds 0.0. Correct the row"):
            ids(rows([good, bad]))
        return
    with pytest.raises(
        DataError, match=f"'label' has a value outside the classes .*: row 1 holds {bad!r}. Correct"
    ):
        ids(rows([good, bad]))


@BOTH
def test_a_missing_label_of_a_declared_column_is_named(ids):
    with pytest.raises(DataError, match="row 1 holds -1. Correct the row"):
        ids(rows([0, -1], NAMES))
