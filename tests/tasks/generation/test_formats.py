"""Rows to prompts and targets, as Li et al. write them, and what is refused."""

from __future__ import annotations

import pytest

from hf_dp.errors import DataError
from hf_dp.tasks.generation.arguments import (
    TextArguments,
    dart_triples,
    e2e_table,
    persona_dialog,
    read_row,
)
from hf_dp.tasks.generation.encoding import columns_read

# Li et al. (2021), appendix O, table 11, first row; its meaning representation is of the E2E test
# set, its dashes are the table's typesetting of "|".
PUNTER = (
    "name[The Punter], eatType[restaurant], food[Indian], priceRange[cheap], "
    "customer rating[average], area[riverside], familyFriendly[no], near[Express by Holiday Inn]"
)
PUNTER_IN_THE_PAPER = (
    "name : The Punter | Type : restaurant | food : Indian | price : cheap | "
    "customer rating : average | area : riverside | family friendly : no | "
    "near : Express by Holiday Inn"
)


def test_a_table_is_written_as_in_the_paper():
    assert e2e_table(PUNTER) == PUNTER_IN_THE_PAPER


@pytest.mark.parametrize(
    ("meaning", "text"),
    [
        ("name[Aromi]", "name : Aromi"),
        ("name[A, B], area[x]", "name : A, B | area : x"),
        ("priceRange[£20-25],near[Café]", "price : £20-25 | near : Café"),
        ("name[]", "name : "),
    ],
)
def test_commas_empty_cells_and_accents_stay(meaning, text):
    assert e2e_table(meaning) == text


@pytest.mark.parametrize("meaning", ["no table", "name[Aromi", "name[Aromi]] x", "[x]"])
def test_what_is_no_table_is_refused(meaning):
    with pytest.raises(DataError, match=r"like 'name\[Aromi\]"):
        e2e_table(meaning)


def test_triples_are_written_as_in_the_paper():
    # table 12, second row
    first = ["United States", "ETHNIC_GROUP", "Asian Americans"]
    expected = "United States : ethnic group : Asian Americans | Albany : is part of : Oregon"
    assert dart_triples([first, ["Albany", "IS_PART_OF", "Oregon"]]) == expected
    with pytest.raises(DataError, match="triples of subject"):
        dart_triples([["a", "b"]])


def test_a_dialog_keeps_its_latest_utterances_and_names_who_spoke():
    text = persona_dialog(["i ski.", "i cook."], list("abcdefg"))
    assert text == (
        "persona : i ski. i cook.\npartner : c\nself : d\npartner : e\nself : f\npartner : g\nself :"
    )
    assert persona_dialog(["i ski."], ["hi"]).splitlines()[1:] == ["partner : hi", "self :"]


def test_every_layout_reads_its_columns():
    named = {"prompt_column": "question", "target_column": "answer", "text_column": "note"}
    assert columns_read(TextArguments(**named)) == ["question", "answer"]
    assert columns_read(TextArguments(data_format="text", **named)) == ["note"]
    e2e = ["meaning_representation", "human_reference"]
    assert columns_read(TextArguments(data_format="e2e")) == e2e
    assert read_row("pairs", ["q", "a"], 0).targets == ("a",)
    assert read_row("pairs", ["q", ["a", "b"]], 0).targets == ("a", "b")
    assert read_row("text", ["free"], 0).prompt == ""
    assert read_row("dart", [[["a", "B", "c"]], {"text": ["x", "y"]}], 0).targets == (" x", " y")
    assert read_row("persona_chat", [["p"], ["h"], ["no", "yes"]], 0).targets == (" yes",)


@pytest.mark.parametrize("name", ["pairs", "text"])
def test_a_column_that_is_not_named_is_refused(name):
    with pytest.raises(DataError, match=rf"{name}.*_column"):
        columns_read(TextArguments(data_format=name))


UNFIT = [
    ("pairs", ["q", None]), ("pairs", [3, "a"]), ("pairs", ["q", [1]]), ("pairs", ["q", []]),
    ("dart", [[["a", "b", "c"]], {"text": []}]), ("dart", [[["a", "b"]], {"text": ["x"]}]),
    ("persona_chat", [["p"], ["h"], []]), ("e2e", ["nonsense", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), UNFIT)
def test_a_row_that_does_not_fit_is_named(name, values):
    with pytest.raises(DataError, match="Row 17"):
        read_row(name, values, 17)
