"""ROUGE-L of the E2E challenge's script, from 0 to 1, by pycocoevalcap. It needs Java."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import evaluate
import numpy as np

from hf_dp.tasks.generation.ptb import ptb_rows
from hf_dp.tasks.generation.text_metric import text_metric_info


class E2ERougeL(evaluate.Metric):
    """``{"e2e_rouge_l": float, "how": text}``, a mean over rows.

    A row's number weighs recall by 1.2 squared, and joins the best precision and the best recall,
    though they may come from different references.

    Raises: MetricUnavailableError where Java is missing or fails.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from pycocoevalcap.rouge.rouge import Rouge

        scorer = Rouge()
        # To pycocoevalcap a text without a word has one, the empty one.
        rows = [
            scorer.calc_score([words], row) if words else 0.0
            for words, row in zip(*ptb_rows(list(predictions), list(references)), strict=True)
        ]
        how = f"pycocoevalcap {version('pycocoevalcap')}, PTBTokenizer"
        return {"e2e_rouge_l": float(np.mean(rows)), "how": how}
