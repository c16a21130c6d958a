"""Accuracy and F1 of predicted classes, as metrics of ``evaluate``."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

NAMES = ("accuracy", "f1")


class ClassMetric(evaluate.Metric):
    """``{name: float}`` from integer ``predictions`` and ``references`` of equal length.

    Args: config_name: ``accuracy``, the share of predictions equal to their reference; or ``f1`` of
        class 1 of two, the harmonic mean of precision and recall, 0 where both are undefined.
    """

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: lists of class ids",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        found, there = np.asarray(predictions), np.asarray(references)
        if self.config_name == "accuracy":
            return {"accuracy": float(np.mean(found == there))}
        both = float(np.sum((found == 1) & (there == 1)))
        return {"f1": 2 * both / max(float(np.sum(found == 1) + np.sum(there == 1)), 1.0)}
