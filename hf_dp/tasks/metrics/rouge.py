"""ROUGE-1, ROUGE-2 and ROUGE-L, F1 from 0 to 1, by rouge-score with its Porter stemmer."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import evaluate
import numpy as np

from hf_dp.tasks.generation.text_metric import text_metric_info

NAMES = ("rouge1", "rouge2", "rougeL")


class Rouge(evaluate.Metric):
    """``{"rouge1": float, "rouge2": float, "rougeL": float, "how": text}``, means over rows.

    A row's number is that of the reference with the best F1. Words are runs of a-z and 0-9; any
    other letter separates words, so texts of other alphabets score 0.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(NAMES), use_stemmer=True)
        rows = [
            scorer.score_multi(row, text) for text, row in zip(predictions, references, strict=True)
        ]
        found = {name: float(np.mean([row[name].fmeasure for row in rows])) for name in NAMES}
        how = f"rouge-score {version('rouge-score')}, F1, stemmed, best reference of a row"
        return {**found, "how": how}
