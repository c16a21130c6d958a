"""DPSeq2SeqTrainer: what is generated, from which prompts, and what generation leaves alone."""

import itertools
from typing import Any

import datasets
import numpy as np
import pytest
import tiny
import torch
from generating import FAMILIES, NEW, TARGETS, alone, bart, causal, pairs, t5, texts, trainer
from models import POSITIONS, gpt2, llama
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import DataCollatorForLanguageModeling, GenerationConfig, GPT2LMHeadModel
from watch import watch

from hf_dp import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments
from hf_dp.errors import DataError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.trainer import seq2seq
from hf_dp.trainer.inherited import unknown_fields
from hf_dp.trainer.seq2seq import split_rows
from hf_dp.trainer.trainer import DPTrainer


def targets(rows: datasets.Dataset) -> list[list[int]]:
    return [[label for label in row["labels"] if label != -100] for row in rows]


def without_padding(labels: np.ndarray) -> list[list[int]]:
    return [[int(label) for label in row if label != -100] for row in labels]


# -- what is generated ---


@pytest.mark.parametrize(
    ("family", "side", "beams"),
    [*itertools.product(FAMILIES, ["left", "right"], [1]), ("gpt2", "right", 3)],
)
def test_answers_in_a_batch_are_those_of_prompts_alone(family, side, beams, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = side
    model, given = causal(family), {"processing_class": tokenizer}
    tested = trainer(tmp_path, model, given=given, generation_num_beams=beams)
    rows = texts(6, 1)
    found = tested.predict(rows)
    assert found.predictions.tolist() == [alone(model, row, num_beams=beams) for row in rows]
    assert len({tuple(row) for row in found.predictions.tolist()}) > 3  # they depend on the prompt
    assert without_padding(found.label_ids) == targets(rows)
    assert found.metrics["test_rows"] == 6 and np.isfinite(found.metrics["test_loss"])


def given_to_generate(tested, rows) -> list[torch.Tensor]:
    """The prompts that the model was given, batch by batch."""
    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch, tested.model, "generate", before=lambda **given: given["input_ids"])
        tested.predict(rows)
    return seen


def leaves_the_target(inputs, pad_token_id):
    """The planted bug: the row as it is, for a prompt."""
    _, targets = split_rows(inputs, pad_token_id)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}, targets


def test_no_target_reaches_generate(tmp_path, monkeypatch):
    tested, rows = trainer(tmp_path), texts(6, 1)
    assert all(bool((tokens < TARGETS).all()) for tokens in given_to_generate(tested, rows))
    monkeypatch.setattr(seq2seq, "split_rows", leaves_the_target)
    tested = trainer(tmp_path / "planted")
    assert any(bool((tokens >= TARGETS).any()) for tokens in given_to_generate(tested, rows))
    answers = tested.predict(rows).predictions.tolist()
    assert answers != [alone(tested.model, row) for row in rows]


def test_a_row_without_target_is_a_prompt_as_a_whole(tmp_path):
    model = causal()
    rows = texts(4, 1).map(lambda row: {"labels": [-100] * len(row["input_ids"])})
    tested = trainer(tmp_path, model)
    found = tested.predict(rows)
    assert found.predictions.tolist() == [alone(model, row) for row in rows]
    assert without_padding(found.label_ids) == [[]] * 4
    unlabeled = tested.predict(rows.remove_columns("labels"))
    assert unlabeled.predictions.tolist() == found.predictions.tolist()
    assert unlabeled.label_ids is None and "test_loss" not in unlabeled.metrics


def test_lengths_count_new_tokens_and_may_be_given_to_evaluate(tmp_path):
    tested, rows = trainer(tmp_path, generation_max_length=None), texts(6, 1)
    assert tested.predict(rows).predictions.shape == (6, 20)  # transformers' default
    assert tested.predict(rows, max_length=3).predictions.shape == (6, 3)
    assert tested.predict(rows, max_new_tokens=4).predictions.shape == (6, 4)
    tested.model.generation_config.max_new_tokens = 5
    assert tested.predict(rows).predictions.shape == (6, 5)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
        PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=["lora", "prefix", "prompt"],
)
def test_an_adapter_generates(config, tmp_path):
    tested = trainer(tmp_path, llama(dtype=torch.float32), given={"peft_config": config})
    rows = texts(6, 1)
    found = tested.predict(rows).predictions.tolist()
    assert found == [alone(tested.model, row) for row in rows]
    with tested.model.disable_adapter():
        assert found != [alone(tested.model, row) for row in rows]


@pytest.mark.parametrize("made", [t5, bart])
def test_an_encoder_decoder_generates_as_in_transformers(made, tmp_path):
    model = made()
    tested, rows = trainer(tmp_path, model), pairs(6, 1)
    found = tested.predict(rows)
    for row, got in zip(rows, found.predictions.tolist()):
        tokens = torch.tensor([row["input_ids"]])
        expected = model.generate(input_ids=tokens, max_length=NEW)[0].tolist()
        assert got[: len(expected)] == expected and not any(got[len(expected) :])
    assert len({tuple(row) for row in found.predictions.tolist()}) > 1
    assert without_padding(np.where(found.label_ids == 0, -100, found.label_ids)) == targets(rows)


# -- rows that cannot be cut ---


def batch(**changes: Any) -> dict[str, torch.Tensor]:
    made = {
        "input_ids": torch.tensor([[5, 6, 40, 41], [7, 42, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": torch.tensor([[-100, -100, 40, 41], [-100, 42, -100, -100]]),
    }
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def test_split_rows():
    prompts, targets = split_rows(batch(token_type_ids=torch.ones(2, 4, dtype=torch.long)), 9)
    assert prompts["input_ids"].tolist() == [[5, 6], [9, 7]]
    assert prompts["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert prompts["token_type_ids"].tolist() == [[1, 1], [0, 1]]
    assert targets.tolist() == [[40, 41], [42, -100]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([[5, 6, 40, 41], [-100, 42, -100, -100]])}, "has no prompt"),
        ({"labels": torch.tensor([[-100, 6, -100, 41], [-100, 42, -100, -100]])}, "labels in several places"),
        ({"labels": torch.tensor([1, 2])}, r"`labels` have the shape \(2,\), not \(2, 4\)"),
        ({"attention_mask": None}, "no `input_ids` and `attention_mask` among"),
        ({"pixel_values": torch.zeros(2, 3)}, r"how to cut \['pixel_values'\]"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_cut_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        split_rows(batch(**changes), 0)


def test_prompts_that_cannot_be_cut_or_padded_are_refused(tmp_path):
    copies = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows = texts(6, 1).remove_columns("labels")
    with pytest.raises(DataError, match=r"Set the labels of prompts to -100"):
        trainer(tmp_path, given={"data_collator": copies}).predict(rows)
    tested = trainer(tmp_path, generation_max_length=POSITIONS)
    with pytest.raises(DataError, match="do not fit beside it.*of 40.*generation_max_length"):
        tested.predict(texts(4, 1))
    model = causal()
    for config in (model.config, model.generation_config):
        config.pad_token_id = config.eos_token_id = None
    tested = trainer(tmp_path, model)
    tested.processing_class = None
    with pytest.raises(InvalidArgumentError, match="a padding token to generate in batches"):
        tested.predict(texts(4, 1))


# -- arguments ---


def test_every_argument_of_seq2seq_has_a_row_and_dp_fp_none(tmp_path):
    new = {field.name for field in unknown_fields(DPSeq2SeqTrainingArguments._INHERITED)}
    assert new == seq2seq.SEQ2SEQ_FREE | seq2seq.SEQ2SEQ_REFUSED.keys()
    published = {"privacy_mode": "dp_fp", "dp_fp_variant": "published", "noise_multiplier": 1.0}
    message = "`predict_with_generate` to be False with.*'dp_fp'"
    with pytest.raises(UnsupportedArgumentError, match=message):
        DPSeq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, **published)


# -- private runs ---


EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}


@pytest.mark.parametrize("made", [causal, t5])
def test_a_private_run_that_generates_is_proven(made, tmp_path):
    tested = tiny.trained(trainer(tmp_path, made(), **EACH_STEP))
    assert tested.privacy_statement().status == "proven"
    assert tested.ledger.steps() == 2
    history = tested.state.log_history
    assert [row["eval_rows"] for row in history if "eval_rows" in row] == [6] * 2


@pytest.mark.usefixtures("unchecked")
def test_it_trains_as_dptrainer_does(tmp_path):
    """On the per-example loss: the same noise and draws, the same weights to the last bit."""
    models = [causal(), causal()]
    for cls, model in zip((DPSeq2SeqTrainer, DPTrainer), models, strict=True):
        trainer(tmp_path / cls.__name__, model, cls=cls, insecure_seed=5, max_steps=2).train()
    ours, theirs = models
    before = tiny.weights(causal())
    assert tiny.moved(before, ours) == before.keys()
    assert not tiny.moved(tiny.weights(ours), theirs)


SAMPLED = GenerationConfig(do_sample=True, temperature=2.0, pad_token_id=0, eos_token_id=3)


def trained(folder, seed: int = 0, **options: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The weights of a run whose noise and draws are known, and what it sampled on the way."""
    sampled = []

    def metrics(prediction):
        sampled.append(prediction.predictions.tolist())
        return {"rows": 1}

    model = gpt2(dropout=0.2, dtype=torch.float32)
    known = {"insecure_seed": 5, "seed": seed, "generation_config": SAMPLED, **options}
    trainer(folder, model, given={"compute_metrics": metrics}, **known).train()
    return [parameter.detach().clone() for parameter in model.parameters()], sampled


@pytest.mark.usefixtures("unchecked")
def test_sampling_neither_changes_nor_shows_what_is_secret(tmp_path):
    """Weights of a run depend on its secret streams alone: not on samples drawn between its steps,
    nor on torch's public generator. And samples depend on that and on the weights alone."""
    without, _ = trained(tmp_path / "without", max_steps=2)
    sampling, sampled = trained(tmp_path / "sampling", **EACH_STEP)
    other_seed, others = trained(tmp_path / "other", seed=1, **EACH_STEP)
    for weights in (sampling, other_seed):
        assert all(torch.equal(one, other) for one, other in zip(weights, without, strict=True))
    assert len(sampled) == len(others) == 2 and sampled != others


@pytest.mark.usefixtures("unchecked")
def test_a_saved_checkpoint_generates_what_the_model_in_memory_does(tmp_path):
    tested = trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    model, rows = tested.model, texts(6, 1)
    before = model.lm_head.weight.detach().clone()
    tested.train()
    after = tested.predict(rows).predictions
    assert model.lm_head.weight is model.transformer.wte.weight  # tied
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-1")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    # What is written may stay as it was after one step of noise; weights never do.
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, before)
    assert [alone(loaded, row) for row in rows] == after.tolist()


def test_without_privacy_it_generates_alike(tmp_path):
    model, rows = causal(), texts(6, 1)
    tested = tiny.trained(trainer(tmp_path, model, privacy_mode="non_private", max_steps=1))
    assert tested.predict(rows).predictions.tolist() == [alone(model, row) for row in rows]
