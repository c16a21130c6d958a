"""F1 of words, from 0 to 1, as ParlAI scores dialog: no case, punctuation or articles."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

import evaluate
import numpy as np

from hf_dp.tasks.generation.text_metric import text_metric_info

_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class DialogF1(evaluate.Metric):
    """``{"dialog_f1": float, "how": text}``, a mean over rows.

    A word counts as often as both texts have it. A row's number is that of the best reference, and
    0 where no word is in common, also between two texts without words.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        rows = [
            max(_f1(_words(text), _words(reference)) for reference in row)
            for text, row in zip(predictions, references, strict=True)
        ]
        how = "after ParlAI: words without case, punctuation and articles, best reference of a row"
        return {"dialog_f1": float(np.mean(rows)), "how": how}


def _words(text: str) -> Counter[str]:
    """Return how often each word occurs. A mark of punctuation separates words."""
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_SPACES)).split())


def _f1(predicted: Counter[str], expected: Counter[str]) -> float:
    """Return the harmonic mean of precision and recall."""
    total = predicted.total() + expected.total()
    return 2 * (predicted & expected).total() / total if total else 0.0
