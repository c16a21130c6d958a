"""A user's CSV file: all that is wrong at once, and class names to paste."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny
import yaml

from hf_dp.errors import DataError
from hf_dp.tasks.classification import checked_names, encode, label_names
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
    with pytest.raises(DataError, match="declares no class names.*nobody away") as caught:
        label_names(rows, "label", [])
    line = re.search(r"class_names: \[.*?\]", str(caught.value))
    assert line is not None and yaml.safe_load(line[0]) == {"class_names": expected}
    assert checked_names({"rows": rows}, [], "label", expected) == expected


def test_numbers_that_are_no_ids_are_not_offered_as_names(tmp_path):
    rows = load_file(written(tmp_path, "label", "1", "2", "5"))
    with pytest.raises(DataError, match=r"class_names: \[negative, positive\]$"):
        label_names(rows, "label", [])
