"""The form that every metric of generated texts takes."""

from __future__ import annotations

import datasets
import evaluate


def text_metric_info(description: str | None) -> evaluate.MetricInfo:
    """Return what ``evaluate`` asks of a metric: here texts, and a list of references for each."""
    return evaluate.MetricInfo(
        description=description or "",
        citation="",
        inputs_description="predictions: texts; references: for each a list of one or more texts",
        features=datasets.Features(
            {
                "predictions": datasets.Value("string"),
                "references": datasets.List(datasets.Value("string")),
            }
        ),
    )
