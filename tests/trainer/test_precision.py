"""Guard, self-check, card and physical batches go by the precision that runs, whoever asked for it."""

from functools import partial

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from data_paths import PATHS, trainer_of
from short_products import precision_restored
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from hf_dp.batches.loader import shape_of
from hf_dp.batches.structure import own
from hf_dp.errors import SelfCheckError, UnsupportedArgumentError
from hf_dp.run.precision import Precision
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


def mixed(trainer) -> bool:
    """Whether an example was padded because of another one."""
    return any(not bool(batch["attention_mask"].all()) for batch in batches(trainer))


def test_bf16_keeps_examples_of_one_length_together_and_float32_sorts_only(tmp_path):
    assert not mixed(tiny.trainer(tmp_path, bf16=True, max_steps=8))
    assert mixed(tiny.trainer(tmp_path, max_steps=8))


def test_what_a_collator_pads_to_anyway_is_one_length(tmp_path):
    given = {"data_collator": DataCollatorWithPadding(tiny.tokenizer(), pad_to_multiple_of=4)}
    found = batches(tiny.trainer(tmp_path, given=given, bf16=True, max_steps=8))
    assert {batch["input_ids"].shape[1] for batch in found} == {4, 8}
    for batch in found:
        lengths = batch["attention_mask"].sum(1)
        assert bool((-(-lengths // 4) * 4 == batch["input_ids"].shape[1]).all())
    assert any(len(set(batch["attention_mask"].sum(1).tolist())) > 1 for batch in found)


def test_texts_that_only_the_collator_tokenizes(tmp_path):
    path = PATHS["texts that the collator tokenizes"]
    assert not mixed(trainer_of(tmp_path, path, bf16=True, max_steps=8))
    assert mixed(trainer_of(tmp_path, path, max_steps=8))


def test_sequence_to_sequence_rows_are_padded_alike_on_both_sides():
    rows = [
        {"input_ids": [1] * i, "attention_mask": [1] * i, "labels": [1] * j}
        for i, j in ((3, 2), (3, 7), (4, 2))
    ]
    pad = partial(DataCollatorForSeq2Seq, tiny.tokenizer())
    alone, eights = pad(), pad(pad_to_multiple_of=8)
    assert len({shape_of(own(alone([dict(row)]))) for row in rows}) == 3
    assert len({shape_of(own(eights([dict(row)]))) for row in rows}) == 1
