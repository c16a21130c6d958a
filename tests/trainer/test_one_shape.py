"""In bfloat16, how far an example is padded depends on the example alone, so one more example
changes no other's rounding."""

from __future__ import annotations

import tiny
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from hf_dp.batches.loader import shape_of
from hf_dp.batches.structure import own


def batches(trainer):
    plan = trainer.privacy_plan
    return [batch for draw in trainer.run.draws(plan.sampler()) for batch in draw]


def mixed(trainer) -> bool:
    """Whether an example was padded because of another one."""
    return any(not bool(batch["attention_mask"].all()) for batch in batches(trainer))


def test_bf16_keeps_examples_of_one_length_together(tmp_path):
    assert not mixed(tiny.trainer(tmp_path, bf16=True, max_steps=8))


def test_float32_sorts_only(tmp_path):
    assert mixed(tiny.trainer(tmp_path, max_steps=8))


def test_what_a_collator_pads_to_anyway_is_one_length(tmp_path):
    collator = DataCollatorWithPadding(tiny.tokenizer(), pad_to_multiple_of=4)
    found = batches(
        tiny.trainer(tmp_path, given={"data_collator": collator}, bf16=True, max_steps=8)
    )
    assert {batch["input_ids"].shape[1] for batch in found} == {4, 8}
    for batch in found:
        lengths = batch["attention_mask"].sum(1)
        assert bool((-(-lengths // 4) * 4 == batch["input_ids"].shape[1]).all())
    assert any(len(set(batch["attention_mask"].sum(1).tolist())) > 1 for batch in found)


def test_texts_that_only_the_collator_tokenizes(tmp_path):
    words = tiny.tokenizer()

    def collate(features):
        labels = torch.tensor([feature["label"] for feature in features])
        return {
            **words([f["sentence"] for f in features], padding=True, return_tensors="pt"),
            "labels": labels,
        }

    def run(**options):
        given = {"train_dataset": tiny.rows(), "data_collator": collate, "eval_dataset": None}
        return tiny.trainer(
            tmp_path, given=given, max_steps=8, remove_unused_columns=False, **options
        )

    assert not mixed(run(bf16=True))
    assert mixed(run())


def test_sequence_to_sequence_rows_are_padded_alike_on_both_sides():
    rows = [
        {"input_ids": [1] * i, "attention_mask": [1] * i, "labels": [1] * j}
        for i, j in ((3, 2), (3, 7), (4, 2))
    ]
    alone, eights = (
        DataCollatorForSeq2Seq(tiny.tokenizer(), pad_to_multiple_of=multiple)
        for multiple in (None, 8)
    )
    assert len({shape_of(own(alone([dict(row)]))) for row in rows}) == 3
    assert len({shape_of(own(eights([dict(row)]))) for row in rows}) == 1
