"""Guard, self-check, card and physical batches go by the precision that runs, whoever asked for it."""

from functools import partial

import datasets
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from data_paths import PATHS, trainer_of
from short_products import precision_restored

from hf_dp.batches.padding import Padding, bucket
from hf_dp.errors import DataError, SelfCheckError, UnsupportedArgumentError
from hf_dp.run.precision import Precision
from hf_dp.statement.evidence import read
from hf_dp.trainer.trainer import DPTrainer


@pytest.fixture
def from_environment(monkeypatch):
    """The mixed precision of ``accelerate launch``, which no argument names."""

    def set_to(value):
        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)

    yield set_to
    AcceleratorState._reset_state()


@pytest.fixture
def shortened_products():
    """Set what products of float32 matrices may be rounded to, on CPUs that can."""
    with precision_restored():
        yield lambda: torch.set_float32_matmul_precision("medium")


def one_shape(trainer) -> bool:
    return trainer.run.draws(trainer.privacy_plan.sampler()).collate_fn.one_shape


def test_bf16_from_the_environment_is_seen(tmp_path, from_environment):
    from_environment("bf16")
    trainer = tiny.trainer(tmp_path, max_steps=1)
    assert not trainer.args.bf16 and trainer.accelerator.mixed_precision == "bf16"
    assert one_shape(trainer)
    trainer.train()
    said = trainer.privacy_statement().facts.precision
    assert said.startswith("forward and backward bfloat16 autocast over float32 weights")
    assert "bfloat16 autocast" in (tmp_path / "README.md").read_text()


def test_planted_precision_by_the_argument_is_seen(tmp_path, from_environment, monkeypatch):
    monkeypatch.setattr(Precision, "of", classmethod(lambda cls, *given: cls(None, ("float32",))))
    from_environment("bf16")
    assert not one_shape(tiny.trainer(tmp_path))


def test_float32_and_autocast_around_the_training(tmp_path):
    trainer = tiny.trainer(tmp_path)
    assert not one_shape(trainer)
    said = trainer.privacy_statement().facts.precision
    assert said.startswith("forward and backward float32; norms")
    trainer = tiny.trainer(tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert one_shape(trainer)
        assert "bfloat16 autocast" in trainer.privacy_statement().facts.precision
    message = "`torch.autocast` to be"
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(UnsupportedArgumentError, match=message),
    ):
        trainer.train()


def test_each_precision_of_a_run_that_is_resumed_is_said(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    tiny.trained(tiny.trainer(tmp_path, max_steps=1, bf16=True, **saving))
    for steps in (2, 3):  # the second in the same precision as the first
        tiny.resumed(tiny.trainer(tmp_path, max_steps=3, **saving), steps - 1)
    first, second = read(tmp_path).facts.precision.split("; and, after a resume, ")
    assert first.startswith("forward and backward bfloat16 autocast over float32 weights; norms")
    assert second.startswith("forward and backward float32; norms")
    assert f"{first}; and, after a resume, {second}" in (tmp_path / "README.md").read_text()
    assert "after a resume" not in read(tmp_path).facts.noise_generator


class CastingLoss(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return super().compute_per_example_loss(model, inputs)


class CastingContext(DPTrainer):
    def compute_loss_context_manager(self):
        return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("cls", [CastingLoss, CastingContext])
def test_autocast_inside_the_loss_is_seen(cls, tmp_path):
    trainer = tiny.trainer(tmp_path, cls=cls, max_steps=1)
    assert one_shape(trainer)
    trainer.train()
    assert "float32 and, within, bfloat16" in trainer.privacy_statement().facts.precision


def test_planted_no_look_inside_the_loss_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_dp.run.training_data.Watched.__torch_dispatch__",
        lambda self, f, t, a=(), k=None: f(*a, **(k or {})),
    )
    assert not one_shape(tiny.trainer(tmp_path, cls=CastingLoss))


def test_shortened_products_are_said_and_need_one_shape(tmp_path, shortened_products):
    trainer = tiny.trainer(tmp_path, max_steps=1)
    assert not one_shape(trainer)
    shortened_products()
    assert one_shape(trainer)
    trainer.train()
    said = trainer.privacy_statement().facts.precision
    assert said.startswith("forward and backward float32 with products in ")
    assert "norms, clipped sums and noise float32" in said


def test_frozen_weights_of_16_bits_are_named_and_need_one_shape(tmp_path):
    model = tiny.model()
    model.bert.embeddings.word_embeddings.requires_grad_(False).bfloat16()
    trainer = tiny.trainer(tmp_path, given={"model": model})
    assert one_shape(trainer)
    said = trainer.privacy_statement().facts.precision
    assert said.startswith("forward and backward bfloat16 and float32")


def test_float16_by_the_accelerator_is_refused(tmp_path, monkeypatch):
    trainer = tiny.trainer(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", property(lambda self: "fp16"))
    message = "`mixed_precision` to be .no. or .bf16.*got 'fp16'"
    with pytest.raises(UnsupportedArgumentError, match=message):
        trainer.train()
    assert not (tmp_path / "ledger.jsonl").exists()


class ComparesWithTheMean(DPTrainer):
    """A coupling of 3 %, which no gradient shows: below the tolerance in 16 bits."""

    def compute_per_example_loss(self, model, inputs):
        losses = super().compute_per_example_loss(model, inputs)
        return losses * (0.97 + 0.03 * (losses > losses.mean()).detach())


@pytest.mark.parametrize("bf16", [False, True])
def test_a_small_coupling_is_seen_in_16_bits_too(tmp_path, bf16):
    trainer = tiny.trainer(tmp_path, cls=ComparesWithTheMean, bf16=bf16)
    with pytest.raises(SelfCheckError, match="depends on its neighbors"):
        trainer.train()
    assert len(trainer.ledger) == 0


def test_the_comparison_in_float32_leaves_autocast_as_it_was(tmp_path):
    trainer = tiny.trained(tiny.trainer(tmp_path, bf16=True, max_steps=1))
    forward, products = trainer.model.forward, torch.get_float32_matmul_precision()
    trainer.run.check_engine()
    assert trainer.model.forward == forward and trainer.run.precision().autocast == "bfloat16"
    assert torch.get_float32_matmul_precision() == products


# -- in 16 bits, how far an example is padded depends on it alone, so one more changes no other ---


def batches(trainer):
    plan = trainer.privacy_plan
    return [batch for draw in trainer.run.draws(plan.sampler()) for batch in draw]


def alone(trainer) -> bool:
    """Whether each example of a draw, some of which have one length and some another, is padded as
    far as its own length says."""
    masks = [batch["attention_mask"] for batch in batches(trainer)]
    assert len({int(length) for mask in masks for length in mask.sum(1)}) > 1
    return all(bucket(int(row.sum())) == len(row) for mask in masks for row in mask)


def test_bf16_pads_each_example_alone_and_float32_sorts_only(tmp_path):
    assert alone(tiny.trainer(tmp_path, bf16=True, max_steps=8))
    assert not alone(tiny.trainer(tmp_path, max_steps=8))


def test_texts_that_only_the_collator_tokenizes(tmp_path):
    path = PATHS["texts that the collator tokenizes"]
    assert alone(trainer_of(tmp_path, path, bf16=True, max_steps=8))
    assert not alone(trainer_of(tmp_path, path, max_steps=8))


@pytest.mark.parametrize("size", [1, 8])
def test_rows_are_padded_as_far_as_positions_reach(tmp_path, size, monkeypatch):
    """Planted: a configuration that does not say how far. With one example at a time none is."""
    given = {"model": tiny.model(max_position_embeddings=20), "train_dataset": of_length(18)}
    made = partial(tiny.trainer, tmp_path, bf16=True, max_steps=1, per_device_train_batch_size=size)
    trainer = made(given=given)
    assert {batch["input_ids"].shape[1] for batch in batches(trainer)} == {18 if size == 1 else 20}
    monkeypatch.setattr("hf_dp.batches.padding.positions_of", lambda model: None)
    if size == 1:
        assert batches(made(given=given))
    else:
        with pytest.raises(DataError, match=r"'input_ids': \(1, 24\).*max_position_embeddings"):
            batches(made(given=given))


def of_length(tokens):
    rows = {
        "input_ids": [[2] * tokens] * 40,
        "attention_mask": [[1] * tokens] * 40,
        "labels": [0, 1] * 20,
    }
    return datasets.Dataset.from_dict(rows)


class CountsPadding(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        inputs = {name: each for name, each in inputs.items() if name != "labels"}
        return model(**inputs, output_hidden_states=True).hidden_states[-1].mean((1, 2))

    def synthetic_batches(self):
        tokens = torch.tensor([[2, 5, 6, 7, 3]])
        row = {"input_ids": tokens, "attention_mask": tokens * 0 + 1, "labels": torch.tensor([0])}
        return [row, {**row, "input_ids": tokens.flip(1)}]


def test_the_self_check_pads_made_up_examples_of_one_length_too(tmp_path, monkeypatch):
    """Planted: one that does not."""
    run = tiny.trainer(tmp_path, cls=CountsPadding, bf16=True).run
    with pytest.raises(SelfCheckError):
        run.check_engine()
    monkeypatch.setattr(Padding, "alone", lambda self, example: example)
    run.check_engine()
