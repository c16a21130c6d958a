"""BERTScore by a model in a local folder: its definition, the model's name, empty texts."""

from __future__ import annotations

import shutil
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from transformers import BertModel

from hf_dp.errors import InvalidArgumentError
from hf_dp.tasks.generation.scores import check_metrics, score

PREDICTIONS = ["the film was good", "a very long plot", "bad"]
REFERENCES = [["a good film", "the plot was fine and long"], ["the plot is not short"], ["bad"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-encoder"
    tiny.model().bert.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


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
    best = [max(of(text, other) for other in row) for text, row in zip(PREDICTIONS, REFERENCES)]
    found = score(["bertscore_f1"], PREDICTIONS, REFERENCES, bertscore_model=folder)
    assert found.values["bertscore_f1"] == pytest.approx(np.mean(best), rel=1e-5)
    assert "tiny-encoder, layer 1 of 1" in found.how["bertscore_f1"]
    assert str(folder.parent) not in str(found)


def test_empty_predictions_score_nothing(folder):
    full = score(["bertscore_f1"], PREDICTIONS, REFERENCES, bertscore_model=str(folder))
    texts, rows = [*PREDICTIONS, "", " "], [*REFERENCES, ["a"], ["b"]]
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
        found = score(["bertscore_f1"], PREDICTIONS, REFERENCES, bertscore_model=tmp_path / name)
        assert found.values == {} and why in found.not_available["bertscore_f1"]


def test_without_a_model_it_is_not_available():
    found = score(["bertscore_f1"], PREDICTIONS, REFERENCES)
    assert found.values == {}
    assert "`bertscore_model`" in found.not_available["bertscore_f1"]


def test_a_name_of_the_hub_is_no_folder():
    with pytest.raises(InvalidArgumentError, match=r"`bertscore_model`.*'roberta-large'.*download"):
        check_metrics(["bertscore_f1"], bertscore_model="roberta-large")
