"""In bfloat16, how far an example is padded depends on the example alone, so one more example changes no other's rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from hf_dp.errors import DataError
from hf_dp.trainer.dataloader import padded_shape


def batches(trainer):
    plan, _ = trainer.private_run()
    return [batch for draw in trainer.private_batches(plan.sampler()) for batch in draw]


def mixed(trainer) -> bool:
    """Whether an example was padded because of another one."""
    return any(not bool(batch["attention_mask"].all()) for batch in batches(trainer))


def test_bf16_keeps_examples_of_one_length_together(tmp_path):
    assert not mixed(tiny.trainer(tmp_path, bf16=True, max_steps=8))


def test_float32_sorts_only(tmp_path):
    assert mixed(tiny.trainer(tmp_path, max_steps=8))


def test_frozen_weights_below_float32_do_too(tmp_path):
    model = tiny.model()
    model.bert.embeddings.requires_grad_(False).bfloat16()
    assert not mixed(tiny.trainer(tmp_path, given={"model": model}, max_steps=8))


def test_what_a_collator_pads_to_anyway_is_one_length(tmp_path):
    collator = DataCollatorWithPadding(tiny.tokenizer(), pad_to_multiple_of=4)
    found = batches(tiny.trainer(tmp_path, given={"data_collator": collator}, bf16=True, max_steps=8))
    assert {batch["input_ids"].shape[1] for batch in found} == {4, 8}
    for batch in found:
        lengths = batch["attention_mask"].sum(1)
        assert bool((-(-lengths // 4) * 4 == batch["input_ids"].shape[1]).all())
    assert any(len(set(batch["attention_mask"].sum(1).tolist())) > 1 for batch in found)


def test_a_collator_that_pads_otherwise_than_it_says_is_refused(tmp_path):
    class Another(DataCollatorWithPadding):
        def __call__(self, features):
            return DataCollatorWithPadding(self.tokenizer)(features)

    collator = Another(tiny.tokenizer(), pad_to_multiple_of=4)
    with pytest.raises(DataError, match="how far this data collator pads.*pad_to_multiple_of"):
        batches(tiny.trainer(tmp_path, given={"data_collator": collator}, bf16=True, max_steps=30))


def test_texts_that_only_the_collator_tokenizes_are_refused(tmp_path):
    words = tiny.tokenizer()

    def collate(features):
        labels = torch.tensor([feature["label"] for feature in features])
        return {**words([f["sentence"] for f in features], padding=True, return_tensors="pt"), "labels": labels}

    def run(**options):
        given = {"train_dataset": Rows(), "data_collator": collate}
        return batches(tiny.trainer(tmp_path, given=given, max_steps=8, **options))

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return tiny.rows()[index]

    with pytest.raises(DataError, match="Tokenize the rows beforehand"):
        run(bf16=True, remove_unused_columns=False)
    assert run(remove_unused_columns=False)


def test_the_shape_of_an_example():
    example = {
        "input_ids": [1, 2, 3],
        "labels": np.zeros(5),
        "pixel_values": torch.zeros(3, 8, 9),
        "label": 1,
        "text": "a",
    }
    expected = (("input_ids", 3), ("labels", 5), ("pixel_values", 3, 8, 9))
    assert padded_shape(example) == expected
    assert padded_shape(example, 4) == (("input_ids", 4), ("labels", 8), ("pixel_values", 4, 8, 9))
    assert padded_shape({"label": torch.tensor(1)}) == (("label",),)
    assert padded_shape("text") == ()


def test_sequence_to_sequence_rows_are_padded_alike_on_both_sides():
    rows = [{"input_ids": [1] * i, "attention_mask": [1] * i, "labels": [1] * j} for i, j in ((3, 2), (3, 7), (4, 2))]
    assert len({padded_shape(row) for row in rows}) == 3
    collator = DataCollatorForSeq2Seq(tiny.tokenizer(), pad_to_multiple_of=8)
    assert {padded_shape(row, 8) for row in rows} == {(("attention_mask", 8), ("input_ids", 8), ("labels", 8))}
    assert collator([dict(row) for row in rows])["labels"].shape == (3, 8)
