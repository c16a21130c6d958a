"""BERTScore F1, mostly from 0 to 1, by bert-score with a model from a local folder."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import evaluate
import numpy as np

from hf_dp.errors import MetricUnavailableError
from hf_dp.tasks.generation.text_metric import text_metric_info


class BertScore(evaluate.Metric):
    """``{"bertscore_f1": float, "how": text}``, a mean over rows, not rescaled.

    A row's number is that of the best reference. ``how`` names the model's folder and the layer:
    the one that bert-score's authors chose for a model of that name, else the last. An empty
    prediction scores 0.

    Raises: MetricUnavailableError without a model.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(
        self, predictions: Any, references: Any, model: str | Path | None = None
    ) -> dict[str, Any]:
        if model is None:
            raise MetricUnavailableError("no `bertscore_model` was given: name a local folder")
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
        from transformers import AutoConfig

        folder = Path(model).resolve()  # a name that is no path would be looked for on the Hub
        config = AutoConfig.from_pretrained(folder)
        if "t5" in str(folder) and "t5" not in config.model_type:
            raise MetricUnavailableError("bert-score reads any model below a path with 't5' as T5")
        layer = model2layers.get(folder.name, config.num_hidden_layers)
        scorer = BERTScorer(model_type=str(folder), num_layers=layer)
        tokenizer = scorer._tokenizer
        if tokenizer.pad_token_id is None:
            raise MetricUnavailableError(f"the tokenizer in {folder.name} has no pad token")
        # Where its files name no limit this is 1e30, which tokenizers cannot cut at. RoBERTa keeps
        # two positions for itself.
        positions = getattr(config, "max_position_embeddings", 512) - 2
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)

        # bert-score 0.3.13 asks for a method of empty texts that transformers 5 has not.
        some = [index for index, text in enumerate(predictions) if text.strip()]
        rows = np.zeros(len(predictions))
        if some:
            texts = [predictions[index] for index in some]
            rows[some] = scorer.score(texts, [list(references[index]) for index in some])[2].numpy()
        used = f"{folder.name}, layer {layer} of {config.num_hidden_layers}"
        how = f"bert-score {version('bert-score')}, {used}, not rescaled"
        return {"bertscore_f1": float(rows.mean()), "how": how}
