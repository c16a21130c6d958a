"""DPRewardTrainer: a pair is one example, whose loss is that of Bradley and Terry."""

from typing import Any

import chat
import pytest
import tiny
import torch
import transformers as hf
from chat import tokenizer
from datasets import Dataset
from peft import LoraConfig
from preferences import pairs, talks
from trl import RewardConfig, RewardTrainer

from hf_dp.clipping import ClippingEngine
from hf_dp.errors import DataError, InvalidArgumentError, SelfCheckError, UnsupportedArgumentError
from hf_dp.trainer.reward import DPRewardConfig, DPRewardTrainer

PLACES = [0, 3, 5, 10, 11]


def judge(num_labels: int = 1) -> Any:
    torch.manual_seed(0)
    config = chat.model().config
    config.num_labels, config.initializer_range = num_labels, 0.3
    return hf.Qwen2ForSequenceClassification(config)


def with_margins(count: int = 24, start: int = 0) -> Dataset:
    return pairs(count, start).add_column("margin", [0.25 * (i % 5) for i in range(count)])


def arguments(folder: Any, **options: Any) -> Any:
    sizes = {"expected_batch_size": 6, "per_device_train_batch_size": 8, "max_steps": 2}
    return tiny.arguments(folder, DPRewardConfig, **{**sizes, **options})


def trainer(folder: Any, made: Any = with_margins, kind: Any = DPRewardTrainer, **options: Any):
    given = {name: options.pop(name) for name in ("eval_dataset", "peft_config") if name in options}
    model, words = options.pop("model", None) or judge(), tokenizer()
    args = arguments(folder, **options)
    return kind(model, args, train_dataset=made(), processing_class=words, **given)


def by_hand(model: Any, row: dict[str, Any], centering: float = 0.0) -> torch.Tensor:
    """The loss of one pair, from unpadded texts, by backbone and head."""
    rewards = []
    for answer in (row["chosen"], row["rejected"]):
        tokens = torch.tensor(tokenizer()(row["prompt"] + answer + "<|im_end|>")["input_ids"])
        rewards.append(model.score(model.model(tokens[None]).last_hidden_state[0, -1])[0])
    chosen, rejected = rewards
    likely = torch.sigmoid(chosen - rejected - row.get("margin", 0.0))
    return -torch.log(likely) + centering * (chosen + rejected) ** 2


def batch_of(tested: Any) -> dict[str, torch.Tensor]:
    return tested.data_collator([tested.train_dataset[place] for place in PLACES])


@pytest.mark.parametrize(("made", "centering"), [(pairs, None), (with_margins, 0.1)])
def test_losses_are_those_of_the_formula_and_of_trl(made, centering, tmp_path):
    tested = trainer(
        tmp_path / "ours",
        made,
        center_rewards_coefficient=centering,
        evaluate_on_training_rows=True,
    )
    losses = tested.compute_per_example_loss(tested.model, batch_of(tested))
    rows = made()
    expected = [by_hand(tested.model, rows[place], centering or 0.0) for place in PLACES]
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert losses.std() > 0.01
    args = RewardConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        per_device_eval_batch_size=1, gradient_checkpointing=False, center_rewards_coefficient=centering,
    )  # fmt: skip
    theirs = RewardTrainer(
        judge(), args, train_dataset=made(), eval_dataset=made(8), processing_class=tokenizer()
    ).evaluate()
    ours = tested.evaluate(made(8))
    for name in ("loss", "accuracy", "margin"):  # of the others TRL logs the mean over batches
        assert ours[f"eval_{name}"] == pytest.approx(theirs[f"eval_{name}"], rel=1e-4, abs=1e-6)


def test_both_texts_of_a_pair_are_clipped_as_one(tmp_path):
    tested = trainer(tmp_path)
    model, rows = tested.model, with_margins()
    alone = [
        torch.autograd.grad(by_hand(model, rows[place]), list(model.parameters()))
        for place in PLACES
    ]
    expected = [float(sum(each.double().square().sum() for each in one) ** 0.5) for one in alone]
    clip = sorted(expected)[2] * 0.99
    with ClippingEngine(model, clip) as engine:
        norms = engine.backward(tested.compute_per_example_loss(model, batch_of(tested)))
        sums = engine.collect()
    assert norms.tolist() == pytest.approx(expected, rel=1e-3)
    weights = [min(1.0, clip / each) for each in expected]
    for place, name in enumerate(dict(model.named_parameters())):
        exact = sum(weight * one[place] for weight, one in zip(weights, alone, strict=True))
        torch.testing.assert_close(sums[name], exact.double(), rtol=1e-3, atol=1e-4 * clip)


class CenteredOverTheBatch(DPRewardTrainer):
    """The planted bug: rewards less their mean over the batch, which all of its pairs share."""

    def rewards(self, model, inputs):
        found = super().rewards(model, inputs)
        return found - found.mean()

    def scored(self, model, inputs):
        losses, rewards, right = super().scored(model, inputs)
        return losses + rewards[:, 0].square(), rewards, right


def test_rewards_that_pairs_share_are_refused(tmp_path):
    tested = trainer(tmp_path, kind=CenteredOverTheBatch)
    with pytest.raises(SelfCheckError):
        tested.train()
    assert not tested.ledger.steps()


@pytest.mark.parametrize(("made", "lora"), [(with_margins, True), (talks, False)])
def test_a_private_run_is_proven(made, lora, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS") if lora else None
    tested = trainer(tmp_path, made, peft_config=adapter, eval_dataset=made(6, 100))
    tested.train()
    assert tested.privacy_statement().status == "proven" and tested.ledger.steps() == 2
    found = tested.predict(made(4, 200))
    assert found.predictions.shape == (4, 2) and found.label_ids.tolist() == [0] * 4
    right = float((found.predictions[:, 0] > found.predictions[:, 1]).mean())
    assert found.metrics["test_accuracy"] == right


def test_an_evaluation_in_batches_reports_the_same(tmp_path):
    whole, parts = (
        trainer(tmp_path / f"{together}", eval_do_concat_batches=together, per_device_eval_batch_size=2)
        .evaluate(with_margins(5, 50))
        for together in (True, False)
    )  # fmt: skip
    names = {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"}
    assert names == {name.removeprefix("eval_") for name in whole} & names
    assert [parts[f"eval_{name}"] for name in names] == [whole[f"eval_{name}"] for name in names]
    with pytest.raises(UnsupportedArgumentError, match="`batch_eval_metrics` to be False without"):
        trainer(tmp_path, batch_eval_metrics=True)
    own = {
        "compute_metrics": lambda prediction, compute_result: (
            {"pairs": 1.0} if compute_result else {}
        )
    }
    given = {"train_dataset": with_margins(), "processing_class": tokenizer(), **own}
    tested = DPRewardTrainer(judge(), arguments(tmp_path, batch_eval_metrics=True), **given)
    assert tested.evaluate(with_margins(5, 50))["eval_pairs"] == 1.0


def test_what_cannot_be_a_reward_model_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="`model` to be a sequence classifier with one"):
        trainer(tmp_path, model=judge(2))
    with pytest.raises(InvalidArgumentError, match="`center_rewards_coefficient`.*>= 0"):
        trainer(tmp_path, center_rewards_coefficient=-1)
    long = [*pairs().to_list(), {"prompt": "film " * 50, "chosen": ".", "rejected": "!"}]
    with pytest.raises(
        DataError, match="1 of the 25 rows have a text that is longer than max_length=40"
    ):
        trainer(tmp_path, lambda: Dataset.from_list(long), max_length=40)
