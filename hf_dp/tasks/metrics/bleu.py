"""BLEU of a corpus, from 0 to 100, by sacrebleu: lower case, tokenized as mteval-v13a does."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import evaluate

from hf_dp.tasks.generation.text_metric import text_metric_info


class Bleu(evaluate.Metric):
    """``{"bleu": float, "how": signature}``, with all references of a row.

    It is the number of the E2E challenge's script (mteval-v13a), but for a corpus without a single
    n-gram of some order up to 4: 0 here.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from sacrebleu.metrics.bleu import BLEU

        # force: no warning about texts that end in " .", which data sets of this kind do.
        bleu = BLEU(lowercase=True, tokenize="13a", force=True)
        found = bleu.corpus_score(list(predictions), list(zip_longest(*references)))
        return {"bleu": found.score, "how": f"sacrebleu {bleu.get_signature()}"}
