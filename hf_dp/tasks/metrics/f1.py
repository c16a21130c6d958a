"""F1 of class 1: the harmonic mean of precision and recall, in [0, 1]; 0 where both are
undefined."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np


class F1(evaluate.Metric):
    """``{"f1": float}`` from integer ``predictions`` and ``references``, 0 or 1, of equal
    length."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: lists of class ids, 0 or 1",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        found, there = np.asarray(predictions) == 1, np.asarray(references) == 1
        both = float(np.sum(found & there))
        return {"f1": 2 * both / max(float(found.sum() + there.sum()), 1.0)}
