"""An average of the weights is a callback of the user's: it reads released weights alone."""

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dp.cards.verify import verify

pytestmark = pytest.mark.usefixtures("unchecked")


class Average(TrainerCallback):
    """The mean of the weights after each step, which the model ends with."""

    def __init__(self):
        self.after, self.mean = [], {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for name, weight in self.after[-1].items():
            before = self.mean.setdefault(name, weight.clone())
            self.mean[name] = before + (weight - before) / len(self.after)

    @torch.no_grad()
    def on_train_end(self, args, state, control, model=None, **kwargs):
        for name, weight in model.named_parameters():
            weight.copy_(self.mean[name])


def test_a_model_that_ends_with_the_average_of_a_callback_is_saved_and_verified(tmp_path):
    trainer, average = tiny.trainer(tmp_path, max_steps=4), Average()
    trainer.add_callback(average)
    trainer.train()
    trainer.save_model()
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in saved.items():
        mean = torch.stack([each[name].double() for each in average.after]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
    head = "classifier.weight"
    assert (saved[head] - average.after[-1][head]).abs().max() > 0
    assert verify(tmp_path).outcome == "ok"
