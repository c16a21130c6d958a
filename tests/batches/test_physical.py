"""A draw is cut into physical batches: a partition, which one example changes by a batch at most."""

import dataclasses

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from hf_dp.batches.loader import Drawn, PhysicalBatches, physical_batches, shape_of
from hf_dp.batches.padding import Padding, bucket
from hf_dp.batches.structure import Layout, own
from hf_dp.errors import DataError, InvalidArgumentError


def drawn_keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**63, count).tolist()


@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 1, 12, 1000])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 7, 50])
def test_physical_batches_are_a_partition(count, size, max_tokens, one_shape):
    lengths = [1 + (7 * i) % 13 for i in range(count)]
    shapes = [(length, i % 3) for i, length in enumerate(lengths)] if one_shape else None
    groups = physical_batches(lengths, drawn_keys(count), size, max_tokens, shapes)
    assert sorted(position for group in groups for position in group) == list(range(count))
    for group in groups:
        padded = len(group) * max(lengths[position] for position in group)
        assert 1 <= len(group) <= size
        assert max_tokens is None or padded <= max_tokens or len(group) == 1
        assert shapes is None or len({shapes[position] for position in group}) == 1


def test_physical_batches_put_similar_lengths_together():
    lengths = [3, 50, 4, 49, 2, 51]
    groups = physical_batches(lengths, drawn_keys(6), 3)
    alike = [{lengths[position] for position in group} for group in groups]
    assert alike == [{51, 50, 49}, {4, 3, 2}]


def test_examples_of_one_length_are_cut_by_their_keys_alone():
    keys = [0b0011 << 60, 0b1100 << 60, 0b1000 << 60, 0b0001 << 60, 0b0010 << 60]
    assert physical_batches([7] * 5, keys, 2) == [[1, 2], [0, 4], [3]]
    assert physical_batches([7] * 5, keys, 3) == [[1, 2], [0, 4, 3]]


def test_batches_are_as_full_as_leaves_of_a_trie():
    """Leaves of a trie of random keys are filled to ln 2 (Knuth, volume 3, section 6.3), averaged
    over numbers of keys from one to its double."""
    fill = [
        count / len(physical_batches([7] * count, drawn_keys(count), 32)) / 32
        for count in (5_000, 5_946, 7_071, 8_409)
    ]
    assert np.mean(fill) == pytest.approx(np.log(2), rel=0.02)


def regrouped(lengths, keys, size, max_tokens, shapes, without):
    """How many others stand in another group once one example is left out."""

    def groups(kept):
        of_kept = [lengths[i] for i in kept], [keys[i] for i in kept]
        alike = None if shapes is None else [shapes[i] for i in kept]
        cut = physical_batches(*of_kept, size, max_tokens, alike)
        return {frozenset(kept[place] for place in group) for group in cut}

    everyone = list(range(len(lengths)))
    changed = groups([i for i in everyone if i != without]) - groups(everyone)
    return sum(map(len, changed))


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_one_example_less_regroups_at_most_a_batch(data):
    count = data.draw(st.integers(2, 40))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    keys = data.draw(st.lists(st.integers(0, 2**63), min_size=count, max_size=count, unique=True))
    size, max_tokens = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([None, 12, 60]))
    shapes = data.draw(st.sampled_from([None, [i % 2 for i in range(count)]]))
    worst = max(
        regrouped(lengths, keys, size, max_tokens, shapes, without) for without in range(count)
    )
    assert worst <= size


def test_planted_full_batches_regroup_everyone():
    """Planted: the cut with the fewest batches, which fills each before the next begins."""
    lengths = [40 - i // 4 for i in range(64)]

    def groups(first):
        kept = list(range(first, 64))
        return {frozenset(kept[i : i + 4]) for i in range(0, len(kept), 4)}

    assert sum(map(len, groups(1) - groups(0))) == 63
    assert regrouped(lengths, drawn_keys(64), 4, None, None, 0) <= 4


@pytest.mark.parametrize(
    ("name", "given"),
    [*(("size", (value,)) for value in (0, -1, 2.5, None)), *(("max_tokens", (4, value)) for value in (0, -5, 2.5))],
)  # fmt: skip
def test_bad_limits_are_named(name, given):
    with pytest.raises(InvalidArgumentError, match=f"`{name}` to be"):
        physical_batches([1, 2], [1, 2], *given)


def test_short_examples_come_in_larger_batches_than_long_ones():
    cut = physical_batches([12, 2, 2, 6, 2, 6, 2], drawn_keys(7), 100, 12)
    assert [len(group) for group in cut] == [1, 2, 4]


# -- padding changes nothing that a loss sees, and is refused where that is not known --

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
    mask = torch.ones(1, 1, 5, 5)
    rows = [{"mask": mask, "x": torch.full((1, 2, 3, 4), float(i))} for i in range(3)]
    batch = together(RIGHT, *rows)
    assert batch["x"].shape == (3, 2, 3, 4) and batch["x"][2].eq(2).all()


def test_structures_and_plain_values():
    def example(i):
        pair = torch.tensor([i]), {"deep": np.array([[i]])}
        return BatchEncoding({"pair": pair, "name": [f"row {i}"], "flag": True, "none": None})

    batch = together(RIGHT, *map(example, range(3)))
    first, second = batch["pair"]
    assert first.tolist() == [0, 1, 2] and second["deep"].tolist() == [[0], [1], [2]]
    assert batch["name"] == ["row 0", "row 1", "row 2"]
    assert batch["flag"] is True and batch["none"] is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"labels": torch.tensor([1.0])}, r"`labels` is a tensor of float32 with 1 dimensions, but a tensor of int64"),
        ({"labels": torch.tensor([[1]])}, "a tensor of int64 with 2 dimensions"),
        ({}, r"it lacks \['labels'\]"),
        ({"labels": torch.tensor([1]), "more": torch.tensor([1])}, r"adds \['more'\]"),
        ({"labels": 3}, "`labels` is 3, but a tensor of int64"),
    ],
)  # fmt: skip
def test_examples_of_another_kind_are_refused(other, message):
    """A row of another type would change the batch's type, and labels to another loss."""
    with pytest.raises(DataError, match=message):
        together(RIGHT, {"labels": torch.tensor([1])}, other)


def test_constants_that_differ_are_refused():
    with pytest.raises(DataError, match="`length` is 4, but 3 in the first row"):
        together(RIGHT, {"length": 3}, {"length": 4})


def test_the_padding_of_a_model():
    padding = Padding.of(tiny.model(), None)
    assert (padding.pad_token_id, padding.side, padding.labels_side) == (0, "right", "right")
    words = tiny.tokenizer()
    words.padding_side, words.pad_token = "left", "[SEP]"
    padding = Padding.of(tiny.model(), words, {"a": 1})
    assert (padding.pad_token_id, padding.side, padding.labels_side) == (3, "left", "left")
    assert padding.values == {"a": 1}


# -- padded by itself, a row has one of few lengths, which no other row has a part in --


def test_lengths_are_few_and_hardly_longer():
    assert [bucket(n) for n in (0, 1, 8, 9, 64, 127, 128, 129, 511, 513)] == [
        0, 8, 8, 16, 64, 128, 128, 144, 512, 576,
    ]  # fmt: skip
    for octave in (2**k for k in range(6, 15)):
        of_octave = {bucket(n) for n in range(octave + 1, 2 * octave + 1)}
        assert len(of_octave) == 8 and max(of_octave) == 2 * octave
        assert all(n <= bucket(n) < n * 9 / 8 for n in range(octave + 1, 2 * octave + 1))
    assert [bucket(n, 20) for n in (3, 17, 20, 21, 30)] == [8, 20, 20, 21, 30]


def test_every_column_of_tokens_is_padded_as_far():
    row = {name: torch.ones(1, 5, dtype=torch.long) for name in FILLS}
    row |= {"bbox": torch.ones(1, 5, 4), "weights": torch.ones(1, 5), "place": torch.ones(1)}
    for padding in (RIGHT, LEFT):
        made = dataclasses.replace(padding, values={"weights": 0.5}).alone(own(row))
        assert made["bbox"].shape == (1, 8, 4) and made["place"].shape == (1,)
        assert made["weights"].tolist()[0].count(0.5) == 3
        for name in FILLS:
            of_left = padding is LEFT and not name.startswith("decoder")
            fill = padding.pad_token_type_id if name == "token_type_ids" else FILLS[name]
            expected = [fill] * 3 + [1] * 5 if of_left else [1] * 5 + [fill] * 3
            assert made[name].tolist() == [expected], name


AS_THEY_ARE = {
    **{name: REFUSED[name][0] for name in REFUSED},
    "pictures": {"pixel_values": torch.ones(1, 3, 5, 5)},
    "an unknown column beside tokens": {**of_length("input_ids", 5), **of_length("tags", 5)},
}  # fmt: skip


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_what_may_have_a_length_of_no_known_padding_stays_as_it_is(name):
    row = own({**of_length("attention_mask", 5), **AS_THEY_ARE[name]})
    assert shape_of(RIGHT.alone(row)) == shape_of(row)


def test_labels_of_a_whole_row_and_of_a_loss_of_ones_own():
    row = own({**of_length("input_ids", 5), "labels": torch.ones(1, 3)})
    several = Padding(pad_token_id=9, pads_labels=False)  # classification by several labels
    assert dict(shape_of(several.alone(row))) == {"input_ids": (1, 8), "labels": (1, 3)}
    row = own({**of_length("input_ids", 5), **of_length("labels", 3)})
    by_user = Padding(pad_token_id=9, own_loss=True)
    assert shape_of(by_user.alone(row)) == shape_of(row)
    declared = dataclasses.replace(by_user, values={"labels": -1})
    assert dict(shape_of(declared.alone(row))) == {"input_ids": (1, 8), "labels": (1, 8)}


def cut_alone(lengths, padding=RIGHT, **options):
    """Shapes of the physical batches of rows of these lengths, and which rows are in each."""
    rows = [
        own({**of_length("input_ids", n), "place": torch.tensor([i])})
        for i, n in enumerate(lengths)
    ]
    layout = Layout()
    for row in rows:
        layout.add(row)
    keys = drawn_keys(len(rows))
    found = PhysicalBatches(padding, layout, one_shape=True, **{"size": 4} | options)(
        [Drawn(row, key) for row, key in zip(rows, keys)]
    )
    return {tuple(batch["place"].tolist()): batch["input_ids"].shape[1] for batch in found}


def test_shapes_of_a_draw_are_few_and_a_limit_on_tokens_counts_padding():
    lengths = list(range(1, 65))
    assert {*cut_alone(lengths).values()} == {8, 16, 24, 32, 40, 48, 56, 64}
    for places, width in cut_alone(lengths, max_tokens=96).items():
        assert len(places) * width <= 96 or len(places) == 1
    assert {*cut_alone(lengths, size=1).values()} == {*lengths}  # a model may take no padding


def of_each(lengths, longest_of_rows=None):
    """To which width each row is padded; planted: at most to the longest row."""
    most = None if longest_of_rows is None else max(lengths)
    found = cut_alone(lengths, dataclasses.replace(RIGHT, positions=most))
    return {place: width for places, width in found.items() for place in places}


@pytest.mark.parametrize("lengths", [(5, 5, 5, 6), (19, 20, 20, 21), (100, 100, 100, 3)])
def test_no_row_changes_the_padding_of_another(lengths):
    """Also where the row that leaves was the longest, or the only one of another length."""
    everyone, without = of_each(lengths), of_each(lengths[:-1])
    assert {place: everyone[place] for place in without} == without


def test_planted_padding_to_the_longest_row_is_seen():
    lengths = (19, 20, 20, 21)
    everyone, without = of_each(lengths, True), of_each(lengths[:-1], True)
    assert {place: everyone[place] for place in without} != without
