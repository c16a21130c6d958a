"""Resumed, best and saved weights are those of the checkpoint, or those that were evaluated."""

import peft
import pytest
import tiny
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dp.cards.verify import verify
from hf_dp.errors import ConfigError
from hf_dp.run.witnesses import read_run

pytestmark = pytest.mark.usefixtures("unchecked")

KINDS = {
    "LoRA": peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"),
    "prompts": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"),
    "P-tuning": peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, task_type="SEQ_CLS"
    ),
    "prefixes": peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, task_type="SEQ_CLS"
    ),
}
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "logging_steps": 100}
BEST = {
    "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1,
    "metric_for_best_model": "score", "greater_is_better": True,
}  # fmt: skip


class Logits(TrainerCallback):
    """What the model says of the same rows when a step ends, or training begins or ends."""

    def __init__(self):
        self.at = {}

    def look(self, model):
        """Logits of two rows, by the model's own forward."""
        batch = tiny.DataCollatorWithPadding(tiny.tokenizer())(list(tiny.dataset().select([0, 1])))
        batch.pop("labels")
        training = model.training
        with torch.no_grad():
            found = model.eval()(**batch).logits.clone()
        model.train(training)
        return found

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at["begin"] = self.look(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = self.look(model)


def adapted(folder, kind, seed=0, **options):
    torch.manual_seed(seed)
    logits = Logits()
    given = {"model": peft.get_peft_model(tiny.model(), KINDS[kind]), "callbacks": [logits]}
    return tiny.trainer(folder, given=given, learning_rate=0.1, **{**SAVING, **options}), logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_adapter_says_what_its_checkpoint_said(tmp_path, kind):
    """P-tuning was 0.2 off: its file holds prompts, which went through the network once more."""
    made, first = adapted(tmp_path, kind)
    made.train()
    loaded = peft.PeftModel.from_pretrained(tiny.model(), str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(Logits().look(loaded), first.at[2], rtol=0, atol=1e-6)
    again, resumed = adapted(tmp_path, kind, seed=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not torch.equal(first.at[1], first.at[2])
    torch.testing.assert_close(resumed.at["begin"], first.at[1], rtol=0, atol=0)


def test_the_best_weights_are_those_of_its_checkpoint(tmp_path):
    """With a prefix projection it failed after the last step."""
    scores = iter([0.9, 0.1])
    made, logits = adapted(tmp_path, "prefixes", **BEST)
    made.compute_metrics = lambda predicted: {"score": next(scores)}
    made.train()
    assert str(made.state.best_model_checkpoint).endswith("checkpoint-1")
    torch.testing.assert_close(logits.look(made.model), logits.at[1], rtol=0, atol=0)


def test_a_checkpoint_without_what_makes_the_prompts_is_refused(tmp_path):
    made, _ = adapted(tmp_path, "P-tuning")
    made.train()
    (tmp_path / "checkpoint-2" / "_prompt_weights.safetensors").unlink()
    again, _ = adapted(tmp_path, "P-tuning", max_steps=3)
    with pytest.raises(ConfigError, match="Cannot resume: .*holds prompts but not the encoder"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert read_run(tmp_path).ledger.steps() == 2


def test_planted_loading_by_peft_alone_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dp.trainer.checkpointing.load_prompts", lambda *given: False)
    with pytest.raises(AssertionError, match="Tensor-likes are not equal"):
        test_a_resumed_adapter_says_what_its_checkpoint_said(tmp_path, "P-tuning")


# -- averages: schedule-free optimizers, and a callback --


class ScheduleFree(torch.optim.SGD):
    """Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682): gradients are taken at y, and x,
    the average of the points z, is what is evaluated."""

    BETA = 0.9

    def _each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    yield p, self.state[p]["z"]

    @torch.no_grad()
    def _switch(self, to_training):
        for group in self.param_groups:
            if group.setdefault("training", False) == to_training:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    weight = 1 - self.BETA if to_training else 1 - 1 / self.BETA
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = to_training

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["training"]
            count = group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / self.BETA)
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / count)
                p.copy_(x.lerp(z, 1 - self.BETA))

    def average(self):
        """Of the classifier's weight, also in the middle of training."""
        p = self.param_groups[0]["params"][-2]
        training = self.param_groups[0]["training"]
        return p.lerp(self.state[p]["z"], 1 - 1 / self.BETA) if training else p.detach().clone()


class Averages(TrainerCallback):
    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.after.append(getattr(optimizer, "optimizer", optimizer).average())


def schedule_free(folder, **options):
    model, averages = tiny.model(), Averages()
    optimizer = ScheduleFree(model.parameters(), lr=0.5)
    given = {"model": model, "optimizers": (optimizer, None), "callbacks": [averages]}
    given["eval_dataset"] = tiny.evaluation_set()
    return tiny.trainer(folder, given=given, **{**SAVING, **options}), averages.after


WEIGHT = "classifier.weight"


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
def test_what_is_saved_is_the_average_that_was_evaluated(tmp_path, mode):
    made, after = schedule_free(tmp_path, privacy_mode=mode)
    made.train()
    made.save_model()
    for step in (1, 2):
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        torch.testing.assert_close(saved[WEIGHT], after[step - 1])
    assert not torch.equal(after[0], after[1])
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")[WEIGHT], after[1])
    again, resumed = schedule_free(tmp_path, privacy_mode=mode, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    moved = (resumed[0] - after[1]).norm()
    assert 0 < moved < 1 and again.state.global_step == 3


def test_the_best_average_is_that_of_its_checkpoint(tmp_path):
    scores = iter([0.9, 0.1])
    made, after = schedule_free(tmp_path, **BEST)
    made.compute_metrics = lambda predicted: {"score": next(scores)}
    made.train()
    made.save_model()
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")[WEIGHT], after[0])


def test_planted_save_of_the_training_point_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dp.trainer.trainer.DPTrainer.put_average", lambda self: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_what_is_saved_is_the_average_that_was_evaluated(tmp_path, "dp_sgd")


class Average(TrainerCallback):
    """Of the user's own: the mean of the weights after each step, which the model ends with."""

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
    """It reads released weights alone."""
    average = Average()
    tiny.trained(tiny.trainer(tmp_path, given={"callbacks": [average]})).save_model()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        mean = torch.stack([each[name].double() for each in average.after]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
    assert not torch.equal(average.mean[WEIGHT], average.after[-1][WEIGHT])
    assert verify(tmp_path).outcome == "ok"


# -- rows without a target --


def warned_of(tmp_path, warnings_of, without: int) -> list[str]:
    """What is said where so many of 40 rows have -100 as every label."""
    said = warnings_of("run.training_data")
    labels = [
        [-100 if i < without else 1] * len(row["input_ids"]) for i, row in enumerate(tiny.dataset())
    ]
    given = {
        "model": hf.BertForTokenClassification(tiny.model().config), "eval_dataset": None,
        "train_dataset": tiny.dataset().remove_columns("label").add_column("labels", labels),
        "data_collator": hf.DataCollatorForTokenClassification(tiny.tokenizer()),
    }  # fmt: skip
    tiny.trainer(tmp_path, given=given).run.training_data()
    return [text for text in said if "every label is -100" in text]


def test_rows_whose_labels_are_all_left_out_are_warned_of(tmp_path, warnings_of, monkeypatch):
    assert warned_of(tmp_path, warnings_of, 20) == []
    (said,) = warned_of(tmp_path, warnings_of, 21)
    assert "In 21 of 40 rows" in said
    monkeypatch.setattr("hf_dp.batches.look_over.has_target", lambda example: True)
    assert warned_of(tmp_path, warnings_of, 40) == []  # planted: they are not counted
