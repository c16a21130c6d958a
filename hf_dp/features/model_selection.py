"""Notes whether evaluation chooses what a run lets out: epsilon does not cover that choice."""

from __future__ import annotations

from transformers import EarlyStoppingCallback
from transformers.trainer_utils import SaveStrategy

from hf_dp.features.base import Feature, Seen, register
from hf_dp.statement.weaknesses import Flags


@register
class ModelSelection(Feature):
    """Weakens the claim where evaluation chooses a checkpoint, the end or learning rates."""

    def weaken(self, seen: Seen) -> None:
        args = self.args
        selects = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        early = any(isinstance(each, EarlyStoppingCallback) for each in seen.callbacks)
        steered = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        seen.book.weaken(Flags(model_selection=bool(selects or early or steered)))
