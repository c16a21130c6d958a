"""NIST-5 of a corpus, from 0, by nltk: lower case, tokenized as mteval-v13a does."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import evaluate

from hf_dp.tasks.generation.mteval_words import mteval_words
from hf_dp.tasks.generation.text_metric import text_metric_info


class Nist(evaluate.Metric):
    """``{"nist": float, "how": text}``.

    nltk matches each order of n-grams with the one best reference, and takes its length. mteval,
    and so ``e2e_nist``, matches all references together and takes their average length: with
    several references its number is higher. With one they are equal.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from nltk.translate.nist_score import corpus_nist

        predicted = [mteval_words(text) for text in predictions]
        expected = [[mteval_words(text) for text in row] for row in references]
        # nltk divides by the number of n-grams of each order, which must not be 0.
        order = min(5, max(map(len, predicted)))
        some = order > 0 and any(words for row in expected for words in row)
        return {
            "nist": float(corpus_nist(expected, predicted, n=order)) if some else 0.0,
            "how": f"nltk {version('nltk')}, NIST-5, lower case, 13a, best reference of an order",
        }
