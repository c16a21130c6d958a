"""CIDEr of the E2E challenge's script, from 0 to 10, by pycocoevalcap. It needs Java."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import evaluate

from hf_dp.tasks.generation.ptb import ptb_rows
from hf_dp.tasks.generation.text_metric import text_metric_info


class Cider(evaluate.Metric):
    """``{"cider": float, "how": text}``, a mean over rows.

    N-grams that all rows have weigh nothing, so a corpus of one row scores 0.

    Raises: MetricUnavailableError where Java is missing or fails.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from pycocoevalcap.cider.cider_scorer import CiderScorer

        scorer = CiderScorer()
        predicted, expected = ptb_rows(list(predictions), list(references))
        for words, row in zip(predicted, expected, strict=True):
            scorer += (words, row)
        some = any(words for row in expected for words in row)  # else it has no most frequent one
        how = f"pycocoevalcap {version('pycocoevalcap')}, PTBTokenizer"
        return {"cider": float(scorer.compute_score()[0]) if some else 0.0, "how": how}
