"""Warnings before the first step: of settings with which a run learns or protects little."""

from __future__ import annotations

from transformers.utils import logging

from hf_dp.accounting import TRAINING
from hf_dp.features.base import Feature, Seen, register
from hf_dp.run.outlook import doubts
from hf_dp.statement.provenance import seen_in_pretraining

logger = logging.get_logger(__name__)


@register
class Outlook(Feature):
    """Warns, before the first step of a new run, why it will learn little; and of training data
    that the base model was pretrained on."""

    def start(self, seen: Seen) -> None:
        dataset = seen.card.get("dataset")
        if known := seen_in_pretraining(dataset, seen.pretraining_sources):
            logger.warning(
                "The base model was pretrained on %s, the same text as the training data %s: what "
                "it knows of these rows is not covered by epsilon. The card says so.",
                ", ".join(known),
                dataset,
            )
        if seen.book.ledger.steps(TRAINING) or not seen.processes.is_main:
            return
        for doubt in doubts(
            seen.plan,
            parameters=seen.trained,
            learning_rate=float(self.args.learning_rate or 0.0),
            optimizer=str(getattr(self.args.optim, "value", self.args.optim)),
        ):
            logger.warning(doubt)
