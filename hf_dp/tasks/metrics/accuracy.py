"""Accuracy: the share of predictions equal to their reference, in [0, 1]."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """``{"accuracy": float}`` from integer ``predictions`` and ``references`` of equal length."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: lists of class ids",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
