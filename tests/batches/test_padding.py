"""Padding changes nothing that a loss sees, and is refused where that is not known."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from transformers import BatchEncoding

from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Layout, own
from hf_dp.errors import DataError

RIGHT = Padding(pad_token_id=9, decoder_pad_token_id=8, pad_token_type_id=3)
LEFT = Padding(pad_token_id=9, decoder_pad_token_id=8, side="left", labels_side="left")


def together(padding, *examples):
    examples, layout = [own(example) for example in examples], Layout()
    for example in examples:
        layout.add(example)
    padding.check(layout)
    return padding.together(examples, layout)


def of_length(name, length, **kind):
    return {name: torch.ones(1, length, **{"dtype": torch.long, **kind})}


FILLS = {
    "input_ids": 9, "attention_mask": 0, "token_type_ids": 3, "special_tokens_mask": 1, "labels": -100, "label_ids": -100,
    "position_ids": 0, "decoder_input_ids": 8, "decoder_attention_mask": 0, "global_attention_mask": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
def test_fill_values_go_by_name(name):
    batch = together(RIGHT, of_length(name, 2), of_length(name, 4))
    assert batch[name].tolist() == [[1, 1, FILLS[name], FILLS[name]], [1, 1, 1, 1]]


@pytest.mark.parametrize("name", FILLS)
def test_the_tokenizers_side(name):
    batch = together(LEFT, of_length(name, 1), of_length(name, 3))
    fill = FILLS[name] if name != "token_type_ids" else 0
    expected = [1, fill, fill] if name.startswith("decoder") else [fill, fill, 1]
    assert batch[name][0].tolist() == expected


def test_the_labels_of_a_decoder_of_its_own_are_padded_on_the_right():
    padding = Padding(pad_token_id=9, side="left", labels_side="right")
    batch = together(
        padding, *({**of_length("input_ids", n), **of_length("labels", n)} for n in (1, 2))
    )
    assert batch["input_ids"][0].tolist() == [9, 1] and batch["labels"][0].tolist() == [1, -100]


REFUSED = {
    "an unknown column": [of_length("weights", 1), of_length("weights", 2)],
    "an additive mask": [of_length("attention_mask", n, dtype=torch.float32) for n in (1, 2)],
    "float labels": [of_length("labels", n, dtype=torch.float32) for n in (1, 2)],
    "two dimensions": [{"attention_mask": torch.ones(1, n, n, dtype=torch.long)} for n in (1, 2)],
    "choices": [{"input_ids": torch.ones(1, n, 3, dtype=torch.long)} for n in (1, 2)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name):
    column = next(iter(REFUSED[name][0]))
    with pytest.raises(DataError, match=f"`{column}`.*padding_values={{'{column}'"):
        together(RIGHT, *REFUSED[name])


def test_a_declared_value_is_used():
    padding = Padding(values={"weights": 0.5})
    batch = together(padding, {"weights": torch.ones(1, 1)}, {"weights": torch.ones(1, 2)})
    assert batch["weights"].tolist() == [[1.0, 0.5], [1.0, 1.0]]


def test_of_any_rank_where_shapes_are_equal():
    batch = together(
        RIGHT,
        *(
            {"mask": torch.ones(1, 1, 5, 5), "x": torch.full((1, 2, 3, 4), float(i))}
            for i in range(3)
        ),
    )
    assert batch["x"].shape == (3, 2, 3, 4) and batch["x"][2].eq(2).all()


def test_structures_and_plain_values():
    def example(i):
        return BatchEncoding(
            {
                "pair": (torch.tensor([i]), {"deep": np.array([[i]])}),
                "name": [f"row {i}"],
                "flag": True,
                "none": None,
            }
        )

    batch = together(RIGHT, *map(example, range(3)))
    assert batch["pair"][0].tolist() == [0, 1, 2] and batch["pair"][1]["deep"].tolist() == [
        [0],
        [1],
        [2],
    ]
    assert (
        batch["name"] == ["row 0", "row 1", "row 2"]
        and batch["flag"] is True
        and batch["none"] is None
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"labels": torch.tensor([1.0])}, r"`labels` is a float32 tensor with 1 dimensions, and a int64 tensor"),
        ({"labels": torch.tensor([[1]])}, "a int64 tensor with 2 dimensions"),
        ({}, r"it lacks \['labels'\]"),
        ({"labels": torch.tensor([1]), "more": torch.tensor([1])}, r"adds \['more'\]"),
        ({"labels": 3}, "`labels` is 3, and a int64 tensor"),
    ],
)  # fmt: skip
def test_examples_of_another_kind_are_refused(other, message):
    """A row of another type would change the batch's type, and labels to another loss."""
    with pytest.raises(DataError, match=message):
        together(RIGHT, {"labels": torch.tensor([1])}, other)


def test_constants_that_differ_are_refused():
    with pytest.raises(DataError, match="`length` is 4, and 3 in the first row"):
        together(RIGHT, {"length": 3}, {"length": 4})


def test_the_padding_of_a_model():
    padding = Padding.of(tiny.model(), None)
    assert (padding.pad_token_id, padding.side, padding.labels_side) == (0, "right", "right")
    words = tiny.tokenizer()
    words.padding_side, words.pad_token = "left", "[SEP]"
    padding = Padding.of(tiny.model(), words, {"a": 1})
    assert (padding.pad_token_id, padding.side, padding.labels_side, padding.values) == (
        3,
        "left",
        "left",
        {"a": 1},
    )
