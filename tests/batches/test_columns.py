"""The look at columns finds what the look at single rows finds, or leaves it to that."""

import dataclasses
import random
from collections.abc import Callable

import datasets
import pytest
import tiny
from data_paths import bert, gpt2, t5
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)
from watch import watch

from hf_dp.batches import columns
from hf_dp.batches.columns import Columns
from hf_dp.batches.examples import Examples
from hf_dp.batches.limits import Limits
from hf_dp.batches.look_over import look_over
from hf_dp.batches.padding import Padding
from hf_dp.errors import DataError
from hf_dp.noise import SecretRandomness

TOKENIZER = tiny.tokenizer()
COLLATORS = {
    "padding": (DataCollatorWithPadding(TOKENIZER), bert),
    "to eights": (DataCollatorWithPadding(TOKENIZER, pad_to_multiple_of=8), bert),
    "default": (default_data_collator, bert),
    "causal": (DataCollatorForSeq2Seq(TOKENIZER, pad_to_multiple_of=8), gpt2),
    "causal, default": (DefaultDataCollator(), gpt2),
    "seq2seq": (DataCollatorForSeq2Seq(TOKENIZER), t5),
}


def made_up(name: str, count: int = 60, seed: int = 0) -> dict[str, list]:
    """Return columns of rows of unequal lengths, some with nothing to predict."""
    draw = random.Random(seed)
    ids = [[draw.randrange(4, 19) for _ in range(draw.randint(1, 20))] for _ in range(count)]
    made = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    if COLLATORS[name][1] is bert:
        types = {} if name == "default" else {"token_type_ids": [[0] * len(row) for row in ids]}
        return {**made, "label": [draw.randrange(2) for _ in ids], **types}
    sizes = [len(row) if name.startswith("causal") else draw.randint(1, 9) for row in ids]
    label = lambda: draw.choice([-100, 5, 6]) if draw.random() < 0.5 else -100  # noqa: E731
    return {**made, "labels": [[label() for _ in range(size)] for size in sizes]}


def looked_over(name: str, rows: datasets.Dataset):
    collator, model = COLLATORS[name]
    examples = Examples(rows, collator, SecretRandomness())
    made = model()
    return look_over(examples, Padding.of(made, TOKENIZER), Limits.of(made))


def is_plain(name: str, rows: datasets.Dataset) -> bool:
    return Columns(rows, COLLATORS[name][0], Limits.of(COLLATORS[name][1]())).plain


@pytest.mark.parametrize("at_once", [7, 2**16])
@pytest.mark.parametrize("name", COLLATORS)
def test_it_is_what_the_look_at_single_rows_finds(name, at_once, monkeypatch):
    monkeypatch.setattr(columns, "_AT_ONCE", at_once)
    rows = datasets.Dataset.from_dict(made_up(name))
    for data in (rows, rows.select(range(50, 5, -1)), rows.shuffle(seed=1)):
        assert is_plain(name, data)
        found = looked_over(name, data)
        with monkeypatch.context() as patch:
            patch.setattr(columns, "_is_known", lambda collator: False)
            assert looked_over(name, data) == found
    assert name == "seq2seq" or found.layout.varies


def test_rows_are_not_collated_one_by_one(monkeypatch):
    seen = watch(monkeypatch, Examples, "_collated")
    looked_over("padding", datasets.Dataset.from_dict(made_up("padding", 500)))
    assert 0 < len(seen) <= 7


def change(rows: dict, column: str, value: Callable[[int], object]) -> datasets.Dataset:
    """Return rows of which one has another value, by how many tokens it has."""
    values = list(rows[column])
    values[7] = value(len(rows["input_ids"][7]))
    return datasets.Dataset.from_dict({**rows, column: values})


# Each is wrong in one thing alone.
NOT_PLAIN = {
    "a token out of range": ("padding", "input_ids", lambda n: [19] * n),
    "a negative token": ("causal", "input_ids", lambda n: [-1] * n),
    "no token": ("padding", "input_ids", lambda n: []),
    "a missing token": ("padding", "input_ids", lambda n: [None] * n),
    "a missing row": ("padding", "attention_mask", lambda n: None),
    "a mask of another length": ("padding", "attention_mask", lambda n: [1] * (n + 1)),
    "a token that is not attended to": ("padding", "attention_mask", lambda n: [1] * (n - 1) + [0]),
    "types of another length": ("to eights", "token_type_ids", lambda n: [0] * (n + 1)),
    "a type out of range": ("padding", "token_type_ids", lambda n: [9] * n),
    "a class out of range": ("padding", "label", lambda n: 2),
    "a class that is not predicted": ("padding", "label", lambda n: -100),
    "labels of another length": ("causal", "labels", lambda n: [5] * (n + 1)),
    "a label out of range": ("seq2seq", "labels", lambda n: [5, 99]),
    "no label": ("seq2seq", "labels", lambda n: []),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_looks_wrong_is_left_to_the_look_at_single_rows(case, monkeypatch):
    name, column, value = NOT_PLAIN[case]
    rows = change(made_up(name), column, value)
    assert not is_plain(name, rows)
    outcomes = []
    for known in (columns._is_known, lambda collator: False):
        monkeypatch.setattr(columns, "_is_known", known)
        try:
            outcomes.append(looked_over(name, rows))
        except DataError as problem:
            outcomes.append(str(problem))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("refused", [3, 21])
def test_tokens_that_the_model_refuses_are_left_to_the_look_at_single_rows(refused):
    """A text without the place for its label word is such a row."""
    seen = []

    def check(tokens):
        seen.append(tokens.tolist())
        if len(tokens) == refused:
            raise DataError("not these")

    rows = datasets.Dataset.from_dict(made_up("padding"))
    limits = dataclasses.replace(Limits.of(bert()), check_tokens=check)
    found = Columns(rows.select(range(50, 5, -1)), COLLATORS["padding"][0], limits)
    expected = rows["input_ids"][50:5:-1]
    assert found.plain == (refused == 21) and seen == expected[: len(seen)]
    assert (len(seen) == len(expected)) == found.plain


def test_other_collators_rows_and_columns_are_looked_at_row_by_row():
    class Own(DataCollatorWithPadding):
        pass

    rows = datasets.Dataset.from_dict(made_up("padding"))
    assert is_plain("padding", rows)
    assert not Columns(rows, Own(TOKENIZER), Limits.of(bert())).plain
    others = [rows.with_format("torch"), rows.with_transform(lambda batch: batch), [*rows]]
    others.append(rows.remove_columns("attention_mask"))
    two = ["input_ids", "attention_mask"]
    others.append(rows.with_format(columns=two, output_all_columns=True))
    for name, value in {"text": "a", "weight": 0.5, "labels": 0}.items():
        others.append(rows.add_column(name, [value] * len(rows)))
    assert [is_plain("padding", other) for other in others] == [False] * 8
