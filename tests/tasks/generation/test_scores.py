"""The driver: names, rows that it refuses, degenerate texts, and what is missing."""

from __future__ import annotations

import importlib.util
import math

import pytest
from restaurants import PREDICTIONS, REFERENCES

from hf_dp.errors import DataError, InvalidArgumentError
from hf_dp.tasks.generation.scores import check_metrics, score

# Those that need neither Java nor a model.
PLAIN = ["bleu", "e2e_nist", "rouge1", "rouge2", "rougeL", "dialog_f1"]


def test_references_of_other_rows_score_lower():
    own = score(PLAIN, PREDICTIONS, REFERENCES).values
    others = score(PLAIN, PREDICTIONS, [*REFERENCES[1:], REFERENCES[0]]).values
    assert list(own) == PLAIN
    for name in PLAIN:
        assert others[name] < own[name] / 2, name


def test_one_perfect_prediction_in_a_row_of_its_own():
    """Identical texts have the highest score where there is one."""
    found = score(PLAIN, PREDICTIONS, [[text] for text in PREDICTIONS]).values
    assert found == pytest.approx(
        found | {"bleu": 100.0, "rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "dialog_f1": 1.0}
    )


DEGENERATE = {
    "one word": (["pub"], [["pub"]]),
    "other words": (["pub"], [["bar", "inn"]]),
    "one empty": (["", "a pub in the city centre"], [["a pub"], ["a pub", "a bar", "an inn"]]),
    "punctuation": (["...", "!"], [["?"], ["the", "a", "..."]]),
    "not ASCII": (["日本語 é", "Ünïcødé"], [["日本語 é"], ["ünïcødé", "другое"]]),
    "marks of programs": (["a ||| b\nc\x85d\u2028e", "<skipped>"], [["a ||| b"], ["<skipped>"]]),
    "one word again and again": (["pub pub pub pub pub pub"], [["pub"]]),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_texts_have_finite_scores(case):
    found = score(PLAIN, *DEGENERATE[case])
    assert list(found.values) == PLAIN
    assert all(math.isfinite(value) and value >= 0 for value in found.values.values()), found


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_generated_scores_nothing(count):
    found = score(PLAIN, [""] * count, [["a pub", "a bar in the city centre"]] * count)
    assert found.values == dict.fromkeys(PLAIN, 0.0)


REFUSED = [
    (["a", "b"], [["a"]], "2 predictions, but references for 1 rows"),
    (["a", "b"], [["a"], []], "Row 1 has no reference"),
    (["a", "b"], [["a"], ["b", " "]], "Row 1 has .* an empty reference"),
    (["a", "b"], [["a"], "b"], "Row 1 has references that are no list of texts"),
    (["a", "b"], [["a"], [None]], "Row 1 has references that are no list of texts"),
    (["a", None], [["a"], ["b"]], "Row 1 has a prediction of type NoneType"),
    ([], [], "`predictions` to have a row"),
]


@pytest.mark.parametrize(("predictions", "references", "message"), REFUSED)
def test_rows_without_a_score_are_named(predictions, references, message):
    with pytest.raises((DataError, InvalidArgumentError), match=message):
        score(["bleu"], predictions, references)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match="`metrics` to be .*'e2e_nist'.*'rougeL'"):
        score(["bleu", "rouge_l"], PREDICTIONS, REFERENCES)


@pytest.mark.parametrize("name", ["bleu", "e2e_nist", "rouge2", "cider", "bertscore_f1"])
def test_a_missing_package_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(InvalidArgumentError, match=r"installed.*pip install 'hf-dp\[generation\]'"):
        check_metrics(["dialog_f1", name])
    check_metrics(["dialog_f1"])


def test_no_text_is_written_to_the_cache(tmp_path, monkeypatch):
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path))
    score(["bleu", "dialog_f1"], PREDICTIONS, REFERENCES)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
