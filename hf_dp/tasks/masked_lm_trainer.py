"""Continue training a masked language model, on predicted tokens only, until gains are small."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_outputs import BaseModelOutput


class Stop(TrainerCallback):
    """End training by processor time of all threads, or when an evaluation gained too little
    accuracy, of 0 to 1."""

    def __init__(self, max_minutes: float, smallest_gain: float):
        self.max_minutes, self.smallest_gain = max_minutes, smallest_gain
        self.began = time.process_time()
        self.accuracies: list[float] = []
        self.evaluated_at = 0
        self.reason = "all steps were taken"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if time.process_time() - self.began > 60 * self.max_minutes:
            self._stop(f"{self.max_minutes:g} minutes of processor time were used", state, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: dict[str, float],
    ) -> None:
        self.evaluated_at = state.global_step
        self.accuracies.append(kwargs["metrics"]["eval_accuracy"])
        gain = self.accuracies[-1] - self.accuracies[-2] if len(self.accuracies) > 2 else 1.0
        if gain < self.smallest_gain and not control.should_training_stop:
            said = f"the accuracy gained {gain:.4f} since the evaluation before"
            self._stop(said, state, control)

    def _stop(self, reason: str, state: TrainerState, control: TrainerControl) -> None:
        self.reason = f"{reason}, at step {state.global_step}"
        control.should_training_stop = True


class MaskedLMTrainer(Trainer):
    """The stock Trainer, with vocabulary logits only where a token is predicted. Its evaluation
    measures accuracy on held-out masked tokens."""

    model: PreTrainedModel

    def __init__(self, stop: Stop, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # compute_loss returns a mean, so Trainer must divide by gradient_accumulation_steps.
        self.model_accepts_loss_kwargs = False
        self.stop = stop
        self.add_callback(stop)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        labels = inputs["labels"]
        predicted = labels != -100

        def only_predicted(
            module: nn.Module, args: object, output: BaseModelOutput
        ) -> BaseModelOutput:
            hidden = output.last_hidden_state
            assert hidden is not None
            output.last_hidden_state = hidden[predicted]
            return output

        texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with self.model.base_model.register_forward_hook(only_predicted):
            logits = model(**texts).logits
        loss = F.cross_entropy(logits, labels[predicted])
        return (loss, logits) if return_outputs else loss

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Return the share of held-out masked tokens that are predicted, with the same masks each
        time."""
        self.model.eval()
        right = count = 0
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            for batch in self.get_eval_dataloader():
                batch = self._prepare_inputs(batch)
                _, logits = self.compute_loss(self.model, batch, return_outputs=True)
                targets = batch["labels"][batch["labels"] != -100]
                right += int((logits.argmax(-1) == targets).sum())
                count += len(targets)
        metrics = {"eval_accuracy": right / max(count, 1)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics
