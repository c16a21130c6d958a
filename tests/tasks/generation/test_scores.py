"""The driver of scores: names, refusals, degenerate texts, what is missing; and BERTScore."""

import importlib.util
import math
import shutil
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from restaurants import PREDICTIONS, REFERENCES
from transformers import BertModel

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
    highest = {"bleu": 100.0, **dict.fromkeys(("rouge1", "rouge2", "rougeL", "dialog_f1"), 1.0)}
    assert found == pytest.approx(found | highest)


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


FILMS = ["the film was good", "a very long plot", "bad"]
CRITICS = [["a good film", "the plot was fine and long"], ["the plot is not short"], ["bad"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny-encoder", tiny.model().bert)


def embeddings(encoder, text: str) -> np.ndarray:
    """Unit vectors of the last layer, those of [CLS] and [SEP] first and last."""
    encoded = tiny.tokenizer()([text], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        vectors = encoder(**encoded).last_hidden_state[0].double().numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def f1(encoder, predicted: str, expected: str) -> float:
    """Zhang et al. 2020: each token meets the nearest of the other text; [CLS] and [SEP] may be met,
    but do not count."""
    cosines = embeddings(encoder, predicted) @ embeddings(encoder, expected).T
    precision, recall = cosines.max(1)[1:-1].mean(), cosines.max(0)[1:-1].mean()
    return 2 * precision * recall / (precision + recall)


def test_it_is_the_mean_over_rows_of_the_best_reference(folder):
    of = partial(f1, BertModel.from_pretrained(folder))
    best = [max(of(text, other) for other in row) for text, row in zip(FILMS, CRITICS)]
    found = score(["bertscore_f1"], FILMS, CRITICS, bertscore_model=folder)
    assert found.values["bertscore_f1"] == pytest.approx(np.mean(best), rel=1e-5)
    assert "tiny-encoder, layer 1 of 1" in found.how["bertscore_f1"]
    assert str(folder.parent) not in str(found)


def test_empty_predictions_score_nothing(folder):
    full = score(["bertscore_f1"], FILMS, CRITICS, bertscore_model=str(folder))
    texts, rows = [*FILMS, "", " "], [*CRITICS, ["a"], ["b"]]
    more = score(["bertscore_f1"], texts, rows, bertscore_model=folder)
    assert more.values["bertscore_f1"] == pytest.approx(full.values["bertscore_f1"] * 3 / 5)
    nothing = score(["bertscore_f1"], [""], [["a"]], bertscore_model=folder)
    assert nothing.values == {"bertscore_f1": 0.0}


def test_long_and_odd_texts_have_finite_scores(folder):
    predictions = ["the film was good " * 20, "\x00", "é ||| 日本語"]
    found = score(["bertscore_f1"], predictions, [["a"], ["\x00"], ["b"]], bertscore_model=folder)
    assert 0 < found.values["bertscore_f1"] < 1


def test_a_model_that_bert_score_cannot_use_is_a_reason(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "not-t5")
    shutil.copytree(folder, tmp_path / "unpadded")
    words = tiny.tokenizer()
    words.pad_token = None
    words.save_pretrained(tmp_path / "unpadded")
    for name, why in {"not-t5": "as T5", "unpadded": "no pad token"}.items():
        found = score(["bertscore_f1"], FILMS, CRITICS, bertscore_model=tmp_path / name)
        assert found.values == {} and why in found.not_available["bertscore_f1"]


def test_without_a_model_it_is_not_available():
    found = score(["bertscore_f1"], FILMS, CRITICS)
    assert found.values == {}
    assert "`bertscore_model`" in found.not_available["bertscore_f1"]


def test_a_name_of_the_hub_is_no_folder():
    with pytest.raises(InvalidArgumentError, match=r"`bertscore_model`.*'roberta-large'.*download"):
        check_metrics(["bertscore_f1"], bertscore_model="roberta-large")
