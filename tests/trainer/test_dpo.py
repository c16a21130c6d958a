"""DPDPOTrainer: a pair is one example, whose loss is that of the DPO paper."""

import copy
from typing import Any

import pytest
import tiny
import torch
from chat import model, tokenizer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from preferences import BETA, ROWS, arguments, moved, pairs, talks, trainer
from trl import DPOConfig, DPOTrainer

from hf_dp.clipping import ClippingEngine
from hf_dp.errors import (
    DataError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedLossError,
)
from hf_dp.trainer.dpo import DPDPOConfig, DPDPOTrainer, answer_log_probs
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.trainer.trl_preparation import PairCollator


def by_hand(policy: Any, reference: Any, row: dict[str, Any]) -> torch.Tensor:
    """The loss of one pair, from unpadded texts."""
    prompt = tokenizer()(row["prompt"])["input_ids"]
    ratios = []
    for answer in (row["chosen"], row["rejected"]):
        tokens = torch.tensor(tokenizer()(row["prompt"] + answer + "<|im_end|>")["input_ids"])
        assert tokens[: len(prompt)].tolist() == prompt
        by_model = []
        for each in (policy, reference):
            logits = each(tokens[None]).logits[0, :-1].log_softmax(-1)
            picked = logits.gather(1, tokens[1:, None])[:, 0]
            by_model.append(picked[len(prompt) - 1 :].sum())
        ratios.append(by_model[0] - by_model[1].detach())
    return -torch.log(torch.sigmoid(BETA * (ratios[0] - ratios[1])))


def batch_of(tested: Any, places: list[int]) -> dict[str, torch.Tensor]:
    return tested.data_collator([tested.train_dataset[place] for place in places])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> DPDPOTrainer:
    """A trainer of pairs, for tests that change nothing of it."""
    return trainer(tmp_path_factory.mktemp("pairs"), evaluate_on_training_rows=True)


PLACES = [0, 3, 5, 10, 11]
COLUMNS = ("input_ids", "attention_mask", "labels")


def test_the_loss_of_a_pair_is_that_of_the_paper_and_of_trl(prepared, tmp_path):
    tested, rows = prepared, pairs()
    losses = tested.compute_per_example_loss(tested.model, batch_of(tested, PLACES))
    expected = torch.stack([by_hand(tested.model, model(), rows[place]) for place in PLACES])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert losses.std() > 0.01
    args = DPOConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, beta=BETA, report_to="none",
        per_device_eval_batch_size=1, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = {"train_dataset": pairs(), "eval_dataset": pairs(8)}
    theirs = DPOTrainer(moved(), model(), args, processing_class=tokenizer(), **rows)
    expected = theirs.evaluate()["eval_loss"]
    assert tested.evaluate(pairs(8))["eval_loss"] == pytest.approx(expected, rel=1e-4)


def gradients(loss: torch.Tensor, policy: Any) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(policy.parameters()))
    return dict(zip(dict(policy.named_parameters()), found, strict=True))


def norm(found: dict[str, torch.Tensor]) -> float:
    return float(sum(each.double().square().sum() for each in found.values()) ** 0.5)


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass", "per_example"])
def test_both_answers_of_a_pair_are_clipped_as_one(strategy, prepared):
    """Against autograd on one pair after the other, written out by hand."""
    tested, rows = prepared, pairs()
    policy = tested.model
    alone = [gradients(by_hand(policy, model(), rows[place]), policy) for place in PLACES]
    expected = [norm(each) for each in alone]
    clip = sorted(expected)[2] * 0.99
    with ClippingEngine(policy, clip, strategy=strategy) as engine:
        norms = engine.backward(tested.compute_per_example_loss(policy, batch_of(tested, PLACES)))
        sums = engine.collect()
    assert norms.tolist() == pytest.approx(expected, rel=1e-3)
    weights = [min(1.0, clip / each) for each in expected]
    for name, total in sums.items():
        exact = sum(weight * each[name] for weight, each in zip(weights, alone, strict=True))
        torch.testing.assert_close(total, exact.double(), rtol=1e-3, atol=1e-4 * clip)


class OneAnswerEach(DPDPOTrainer):
    """The planted bug: one loss for each answer, so each is clipped by itself."""

    def compute_per_example_loss(self, model, inputs):
        both = {name: torch.cat([inputs[name], inputs[f"rejected_{name}"]]) for name in COLUMNS}
        margins = self.margins(model, inputs).detach()
        log_probs = answer_log_probs(model, both)
        pull = self.args.beta * torch.sigmoid(-margins)
        return torch.cat([-pull, pull]) * log_probs


def test_answers_that_are_clipped_by_themselves_are_refused(tmp_path):
    tested = OneAnswerEach(
        moved(), model(), arguments(tmp_path), train_dataset=pairs(), processing_class=tokenizer()
    )
    with pytest.raises(UnsupportedLossError, match=r"one loss for each example, shape \(1,\)"):
        tested.train()
    assert not tested.ledger.steps()


def test_a_pair_is_one_row_of_every_column_and_the_collator_copies(prepared):
    assert {len(value) for value in batch_of(prepared, PLACES).values()} == {len(PLACES)}
    alone = batch_of(prepared, [3])
    for prefix in ("", "rejected_"):
        attended = alone[f"{prefix}attention_mask"][0].bool()
        tokens = alone[f"{prefix}input_ids"][0, attended]
        answer = pairs()[3]["rejected" if prefix else "chosen"]
        text = pairs()[3]["prompt"] + answer + "<|im_end|>"
        assert tokens.tolist() == tokenizer()(text)["input_ids"]
    # hf_dp gives each row a fresh copy of the collator's state.
    assert isinstance(copy.deepcopy(prepared.data_collator), PairCollator)


def test_the_reference_sees_one_answer_at_a_time(tmp_path):
    """Without padding; so with other neighbors, the same numbers to the last bit."""
    reference, seen = model(), []
    reference.register_forward_pre_hook(
        lambda module, args, given: seen.append((given["input_ids"], given["attention_mask"])),
        with_kwargs=True,
    )
    together = trainer(tmp_path / "a", given={"ref_model": reference}).train_dataset
    assert len(seen) == 2 * ROWS
    assert all(len(tokens) == 1 and bool(mask.all()) for tokens, mask in seen)
    others = pairs(ROWS, 100).to_list()
    among = Dataset.from_list([*others[:3], pairs()[7], *others[3:]])
    beside = trainer(tmp_path / "b", given={"train_dataset": among}).train_dataset
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert beside[3][name] == together[7][name] != together[8][name]


def test_a_reference_of_ones_own_is_stated_to_be_public(tmp_path):
    for reference, public, fits in (
        (model(), True, True),
        (model(), False, False),
        (None, False, True),
    ):
        given = {"ref_model": reference}
        if not fits:
            with pytest.raises(
                UnsupportedArgumentError, match="`teacher_is_public` to be True with a"
            ):
                trainer(tmp_path / "refused", given=given, teacher_is_public=public)
            continue
        made = trainer(tmp_path / str(public), given=given, teacher_is_public=public)
        said = any(
            "the user states that it is public" in each
            for each in made.privacy_statement().not_covered
        )
        assert said == public


def test_without_a_reference_it_is_the_model_before_training_and_new_pairs_need_one(
    prepared, tmp_path
):
    tested = trainer(tmp_path, given={"ref_model": None})
    losses = tested.compute_per_example_loss(tested.model, batch_of(tested, PLACES))
    torch.testing.assert_close(losses, torch.full_like(losses, 2.0).log())
    with pytest.raises(DataError, match="no other copy of the reference"):
        tested.evaluate(pairs(4, 100))
    assert prepared.predict(pairs(4, 100)).predictions.shape == (4,)


@pytest.mark.parametrize(("made", "lora"), [(pairs, True), (talks, False)])
def test_a_private_run_is_proven(made, lora, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"preferred": float((prediction.predictions > 0).mean())}

    given = {
        "ref_model": None, "eval_dataset": made(6, 100), "compute_metrics": metrics,
        "peft_config": config if lora else None,
    }  # fmt: skip
    tested = trainer(tmp_path, made, given=given, eval_strategy="steps", eval_steps=1)
    tested.train()
    assert tested.privacy_statement().status == "proven" and tested.ledger.steps() == 2
    assert seen == [(6,)] * 2
    assert tested.state.log_history[-2]["eval_loss"] > 0


def test_left_padding_changes_nothing(tmp_path):
    left, losses = tokenizer(), []
    left.padding_side = "left"
    for words in (tokenizer(), left):
        each = trainer(tmp_path, given={"processing_class": words})
        each.run.check_engine()
        losses.append(each.compute_per_example_loss(each.model, batch_of(each, PLACES)))
    torch.testing.assert_close(*losses)


# -- what is refused ---


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("loss_type", ["ipo"], "`loss_type`.*none of its variants"),
        ("label_smoothing", 0.1, "`label_smoothing` to be 0"),
        ("use_weighting", True, "`use_weighting` to be False"),
        ("ld_alpha", 0.5, "`ld_alpha` to be None"),
        ("f_divergence_type", "js_divergence", "`f_divergence_type`"),
        ("padding_free", True, "`padding_free` to be False.*flattens"),
        ("sync_ref_model", True, "`sync_ref_model` to be False.*frozen"),
        ("router_aux_loss_coef", 0.1, "`router_aux_loss_coef`"),
        ("activation_offloading", True, "`activation_offloading`"),
        ("privacy_mode", "non_private", "`privacy_mode` to be 'dp_sgd'.*trl.DPOTrainer"),
        ("beta", 0, "`beta`"),
    ],
)
def test_refused_arguments(option, value, message, tmp_path):
    private = ("noise_multiplier", "expected_batch_size") if option == "privacy_mode" else ()
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        arguments(tmp_path, **{option: value}, **dict.fromkeys(private))
    assert option == "beta" or type(refused.value) is UnsupportedArgumentError


def test_an_adapter_a_classifier_and_trls_trainer_mixed_with_ours_are_refused(tmp_path):
    class Mixed(DPTrainer, DPOTrainer):
        arguments_class = DPDPOConfig

    with pytest.raises(UnsupportedArgumentError, match="Mixed overrides compute_loss"):
        Mixed(model(), arguments(tmp_path), train_dataset=pairs())
    adapted = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(InvalidArgumentError, match="`model` to be a model without adapter"):
        trainer(tmp_path, given={"model": adapted})
    with pytest.raises(InvalidArgumentError, match="`model` to be a model that generates, got"):
        trainer(tmp_path, given={"model": tiny.model()})


def test_reference_columns_of_ones_own_are_kept(tmp_path):
    def own(rows):
        rows = rows.add_column("ref_chosen_logps", [-3.0] * len(rows))
        return rows.add_column("ref_rejected_logps", [-5.0] * len(rows))

    tested = trainer(tmp_path, given={"ref_model": None, "train_dataset": own(pairs())})
    batch = batch_of(tested, PLACES)
    assert batch["ref_chosen_logps"].tolist() == [-3.0] * len(PLACES)
    nothing = dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), torch.zeros(len(PLACES)))
    found = tested.margins(tested.model, batch)
    without = tested.margins(tested.model, {**batch, **nothing})
    torch.testing.assert_close(found, without - BETA * 2.0)
    assert tested.predict(own(pairs(4, 100))).predictions.shape == (4,)


def test_training_rows_are_known_by_their_texts_whatever_stands_beside_them(tmp_path):
    def beside(rows: Dataset, name: str) -> Dataset:
        return rows.add_column("source", [f"{name} {place}" for place in range(len(rows))])

    rows, same = beside(pairs(), "train"), beside(pairs(4), "held out")
    with pytest.raises(UnsupportedArgumentError, match="held-out set"):
        trainer(tmp_path, given={"train_dataset": rows, "eval_dataset": same})
    tested = trainer(tmp_path, given={"train_dataset": rows})
    encoded = beside(tested.train_dataset.remove_columns("source").select(range(4)), "held out")
    for each in (same, Dataset.from_list(encoded.to_list())):
        with pytest.raises(UnsupportedArgumentError, match="held-out set"):
            tested.evaluate(each)


def test_rows_that_trl_would_drop_or_without_an_answer_are_refused(tmp_path):
    long = [*pairs().to_list(), {"prompt": "film " * 50, "chosen": ".", "rejected": "!"}]
    with pytest.raises(DataError, match="1 of the 25 rows have no token to predict"):
        trainer(tmp_path, given={"train_dataset": Dataset.from_list(long)}, max_length=40)
    for column in ("prompt", "chosen", "rejected"):
        rows = pairs().to_list()
        rows[5][column] = None
        with pytest.raises(DataError, match="cannot prepare row 5 of the train set"):
            trainer(tmp_path, given={"train_dataset": Dataset.from_list(rows)})
