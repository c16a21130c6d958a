"""Evaluation sets that hold training rows are found by provenance and by content."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap import compare, encoding, hashes, origin
from hf_dp.overlap.compare import Overlap, TrainingRows, refuse_training_rows
from hf_dp.overlap.encoding import encode
from hf_dp.overlap.search import refuse_any_training_row

FORWARD = ("input_ids", "attention_mask", "labels")
ROWS = 40


def table(start: int, count: int = ROWS) -> datasets.Dataset:
    """Return rows unlike those of any other range, except for ``label`` and ``idx``."""
    numbers = range(start, start + count)
    return datasets.Dataset.from_dict(
        {
            "sentence": [f"row {i} of many" for i in numbers],
            "input_ids": [[i, *range(i % 4)] for i in numbers],
            "attention_mask": [[1] * (1 + i % 4) for i in numbers],
            "weight": [i / 7 for i in numbers],
            "label": [i % 2 for i in range(count)],
            "idx": list(range(count)),
        }
    )


class Wrapped(torch.utils.data.Dataset):
    """What people write around a data set."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {
            "input_ids": torch.tensor(row["input_ids"]),
            "sentence": row["sentence"],
            "labels": row["label"],
        }


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def on_disk(rows: datasets.Dataset, folder: Path) -> datasets.Dataset:
    rows.save_to_disk(folder / "saved")
    return datasets.load_from_disk(folder / "saved")


def through_parquet(rows: datasets.Dataset, folder: Path) -> datasets.Dataset:
    rows.to_parquet(folder / "rows.parquet")
    return datasets.Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder))


def renumbered(rows: datasets.Dataset) -> datasets.Dataset:
    return rows.map(lambda row: {"idx": row["idx"] + 1000, "label": 1 - row["label"]})


def words(batch):
    return {"pieces": [sentence.split() for sentence in batch["sentence"]]}


PROVENANCE = {
    "the same object": lambda train: train,
    "select, contiguous": lambda train: train.select(range(5, 17)),
    "select, scattered": lambda train: train.select([31, 3, 4, 30]),
    "one row": lambda train: train.select([7]),
    "select of a select": lambda train: train.select(range(5, 17)).select([3, 1]),
    "shuffle": lambda train: train.shuffle(seed=1),
    "sort": lambda train: train.sort("sentence"),
    "shard": lambda train: train.shard(num_shards=4, index=1),
    "filter": lambda train: train.filter(lambda row: row["idx"] % 5 == 0),
    "remove_columns": lambda train: train.remove_columns(
        ["idx", "label", "weight", "attention_mask"]
    ),
    "only labels and ids left": lambda train: train.select_columns(["idx", "label"]),
    "rename of the label": lambda train: train.rename_column("label", "target"),
    "rename of an input": lambda train: train.rename_column("sentence", "text"),
    "add_column": lambda train: train.add_column("more", list(range(ROWS))),
    "other labels": lambda train: train.remove_columns("label").add_column("label", [3] * ROWS),
    "with_format": lambda train: train.with_format("torch"),
    "with_transform": lambda train: train.with_transform(words),
    "concatenation": lambda train: datasets.concatenate_datasets(
        [train.select(range(5)), table(100, 200)]
    ),
    "concatenation, scattered": lambda train: datasets.concatenate_datasets(
        [table(100, 200), train.select([9, 5])]
    ),
    "Subset": lambda train: Subset(train, [3, 8]),
    "nested Subset": lambda train: Subset(Subset(train, range(10, 20)), torch.tensor([3, -1])),
    "Subset of a select": lambda train: Subset(train.select([3, 8]), [1]),
    "Subset of a formatted set": lambda train: Subset(train.with_format("torch"), np.array([1])),
    "ConcatDataset": lambda train: ConcatDataset([table(100, 200), Subset(train, [4])]),
    "Subset of a ConcatDataset": lambda train: Subset(
        ConcatDataset([table(100, 200), train]), [0, 203]
    ),
}
CONTENT = {
    "map, new column": lambda train, _: train.map(lambda row: {"length": len(row["sentence"])}),
    "map, other column changed": lambda train, _: train.map(
        lambda row: {"label": 1 - row["label"]}
    ),
    "renumbered": lambda train, _: renumbered(train),
    "map, the words only": lambda train, _: train.map(
        words, batched=True, remove_columns=["input_ids", "label"]
    ),
    "flatten_indices": lambda train, _: train.select([7, 3, 9]).flatten_indices(),
    "saved and loaded": lambda train, folder: on_disk(train, folder),
    "parquet": lambda train, folder: through_parquet(train, folder),
    "pandas": lambda train, _: datasets.Dataset.from_pandas(train.to_pandas()),
    "from_list": lambda train, _: datasets.Dataset.from_list(train.to_list()),
    "cast": lambda train, _: renumbered(
        train.cast_column("input_ids", datasets.List(datasets.Value("int16")))
    ),
    "a list of rows": lambda train, _: [train[i] for i in range(9)],
    "a list of one row": lambda train, _: [train[5]],
    "rows as tensors": lambda train, _: list(train.with_format("torch")),
    "rows as arrays": lambda train, _: list(train.with_format("numpy")),
    "set_format and a copy": lambda train, _: renumbered(train).with_format("torch"),
    "with_transform on a copy": lambda train, _: renumbered(train).with_transform(words),
    "a torch data set": lambda train, _: Wrapped(train),
    "Subset of a torch data set": lambda train, _: Subset(Wrapped(train), [4, 5]),
    "Subset of a copy": lambda train, _: Subset(renumbered(train), [4, 5]),
    "a list of a Subset": lambda train, _: list(Subset(train, [4, 5])),
    "a stream": lambda train, _: train.to_iterable_dataset(),
    "a torch stream": lambda train, _: Stream(list(train)),
    "ConcatDataset of copies": lambda train, _: ConcatDataset([renumbered(train), list(train)]),
}
HELD_OUT = {
    "other rows, same ids and labels": lambda train, _: table(100),
    "other rows, shuffled": lambda train, _: table(100).shuffle(seed=1),
    "a list of other rows": lambda train, _: list(table(100)),
    "one input column repeats": lambda train, _: [
        {**theirs, "input_ids": ours["input_ids"], "attention_mask": ours["attention_mask"]}
        for theirs, ours in zip(table(100), train)
    ],
    "one array numbers both": lambda train, _: sharing_an_array(train),
    "a Subset of other rows": lambda train, _: Subset(table(100), range(5)),
    "an empty list": lambda train, _: [],
    "an empty selection": lambda train, _: train.select([]),
    "an empty stream": lambda train, _: Stream([]),
}


def sharing_an_array(train: datasets.Dataset) -> datasets.Dataset:
    """A held-out set whose idx column is the training set's, in the same memory."""
    other = table(100).remove_columns("idx")
    return datasets.Dataset(other._data.table.append_column("idx", train._data.table.column("idx")))


def mistakes(folder: Path) -> list[str]:
    """The forms that are judged wrongly."""
    train = table(0)
    rows = TrainingRows(train, None)
    forms = {name: (make(train), True) for name, make in PROVENANCE.items()}
    forms |= {
        name: (make(train, folder), True) for name, make in CONTENT.items() if name != "parquet"
    }
    forms |= {name: (make(train, folder), False) for name, make in HELD_OUT.items()}
    wrong = [name for name, (form, bad) in forms.items() if rows.compare(form).refused is not bad]
    split = train.train_test_split(test_size=0.5, seed=0)
    halves = {"split": (split["train"], split["test"])}
    halves |= {"two ranges": (train.select(range(20)), train.select(range(20, 40)))}
    halves |= {"two Subsets": (Subset(train, range(20)), Subset(train, range(20, 40)))}
    return wrong + [
        name
        for name, (ours, theirs) in halves.items()
        if TrainingRows(ours, None).compare(theirs).refused
    ]


@pytest.mark.parametrize("name", PROVENANCE)
@pytest.mark.parametrize("select", [False, True], ids=["whole", "with indices"])
def test_rows_of_the_training_set_are_known_by_where_they_are(name, select):
    train = table(0)
    train = train.select(list(range(ROWS))[::-1]) if select else train
    found = TrainingRows(train, FORWARD).compare(PROVENANCE[name](train))
    copied = select and name in (
        "add_column",
        "other labels",
    )  # datasets flattens the indices first
    assert found.refused and found.derived is not copied


@pytest.mark.parametrize("read", [None, FORWARD], ids=["read unknown", "read known"])
@pytest.mark.parametrize("name", CONTENT)
def test_copies_of_training_rows_are_known_by_what_they_hold(name, read, tmp_path):
    train = table(0)
    found = TrainingRows(train, read).compare(CONTENT[name](train, tmp_path))
    assert not found.derived and found.comparable
    assert found.equal == found.rows > 0
    with pytest.raises(UnsupportedArgumentError, match="equal to training rows"):
        refuse_training_rows(CONTENT[name](train, tmp_path), TrainingRows(train, read))


@pytest.mark.parametrize("container", [list, Wrapped, lambda rows: Subset(rows, range(ROWS))])
@pytest.mark.parametrize(
    "name", ["a list of rows", "renumbered", "a torch data set", "saved and loaded"]
)
def test_the_training_set_may_have_any_form(name, container, tmp_path):
    train = table(0)
    assert TrainingRows(container(train), FORWARD).compare(CONTENT[name](train, tmp_path)).refused
    assert not TrainingRows(container(train), FORWARD).compare(table(100)).refused


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_sets_are_accepted(name, tmp_path):
    train = table(0)
    found = TrainingRows(train, None).compare(HELD_OUT[name](train, tmp_path))
    assert (found.derived, found.equal, found.comparable) == (False, 0, True)
    assert refuse_training_rows(HELD_OUT[name](train, tmp_path), TrainingRows(train, None))


def places(rows: datasets.Dataset) -> list[tuple[int, int]]:
    return [origin._slot(chunk) for chunk in rows._data.table.column("sentence").chunks]


@pytest.mark.parametrize("take", [lambda half: half, list, lambda half: Subset(half, range(5))])
def test_the_other_half_of_a_split_is_accepted(take):
    split = table(0).train_test_split(test_size=0.5, seed=0)
    assert places(split["train"]) == places(split["test"])
    assert TrainingRows(split["train"], FORWARD).compare(take(split["test"])) == Overlap(
        derived=False, equal=0, rows=len(take(split["test"])), comparable=True
    )
    whole = table(0)
    assert (
        not TrainingRows(Subset(whole, range(20)), FORWARD)
        .compare(Subset(whole, range(20, 40)))
        .refused
    )
    assert (
        TrainingRows(Subset(whole, range(20)), FORWARD)
        .compare(Subset(whole, range(19, 40)))
        .derived
    )


# Ways to get it wrong


def first_column_only(monkeypatch):
    original = compare.hash_rows
    part = lambda columns: hashes.Columns(columns.names[:1], columns.pictures, columns.served)  # noqa: E731
    monkeypatch.setattr(
        compare, "hash_rows", lambda parts, columns, key: original(parts, part(columns), key)
    )


def ignore_indices(monkeypatch):
    monkeypatch.setattr(origin.Part, "table_rows", lambda part: None)


def ignore_offsets(monkeypatch):
    monkeypatch.setattr(
        origin,
        "_slot",
        lambda array: (8 * array.buffers()[1].address, 32) if len(array.buffers()) > 1 else (-1, 0),
    )


def compare_ids(monkeypatch):
    monkeypatch.setattr(compare, "is_id", lambda name: False)


def hash_labels(monkeypatch):
    original = compare.TrainingRows.__init__
    monkeypatch.setattr(
        TrainingRows, "__init__", lambda rows, data, read: original(rows, data, read, ())
    )


def tell_objects_only(monkeypatch):
    monkeypatch.setattr(
        compare, "hash_rows", lambda parts, columns, key: np.array([id(parts)], np.uint64)
    )


def test_every_form_is_judged_rightly(tmp_path):
    assert mistakes(tmp_path) == []


@pytest.mark.parametrize(
    ("bug", "noticed"),
    [
        (first_column_only, "one input column repeats"),
        (ignore_indices, "split"),
        (ignore_offsets, "two ranges"),
        (compare_ids, "renumbered"),
        (hash_labels, "map, other column changed"),
        (tell_objects_only, "a list of rows"),
    ],
)
def test_planted_bugs_are_noticed(bug, noticed, tmp_path, monkeypatch):
    bug(monkeypatch)
    assert noticed in mistakes(tmp_path)


# Thresholds, names, words


@pytest.fixture
def warnings(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compare.logger, "warning", said.append)
    return said


def mixed(training_rows: int) -> list[dict]:
    return [*table(0, training_rows), *table(100, 20 - training_rows)]


def test_up_to_a_tenth_is_warned_of_once_and_more_is_refused(warnings):
    rows, evaluation = TrainingRows(table(0), FORWARD), mixed(2)
    assert refuse_training_rows(evaluation, rows) and refuse_training_rows(evaluation, rows)
    assert len(warnings) == 1 and "epsilon" in warnings[0]
    assert refuse_training_rows(mixed(0), rows) and len(warnings) == 1
    with pytest.raises(UnsupportedArgumentError, match="equal to training rows"):
        refuse_training_rows(mixed(3), rows)


def test_words_tell_neither_counts_nor_content(warnings):
    rows = TrainingRows(table(0), FORWARD)
    refuse_training_rows(mixed(2), rows)
    with pytest.raises(UnsupportedArgumentError) as by_content:
        refuse_training_rows(mixed(3), rows)
    with pytest.raises(UnsupportedArgumentError) as by_place:
        refuse_training_rows(rows.parts[0].base.select([3]), rows)
    for message in (*warnings, str(by_content.value), str(by_place.value)):
        assert not any(character.isdigit() for character in message)
        assert "row 3" not in message and "epsilon" in message
    for message in (str(by_content.value), str(by_place.value)):
        assert "held-out" in message and "evaluate_on_training_rows=True" in message
    assert "equal=" not in repr(rows.compare(mixed(2)))
    assert "row" not in repr(rows).replace("TrainingRows", "").replace("hf_dp.overlap.compare", "")


def test_a_private_search_refuses_a_single_equal_row_and_sets_that_it_cannot_compare(warnings):
    rows, only_labels = TrainingRows(table(0), FORWARD), [{"label": 0}]
    for evaluation in (None, mixed(0), {"first": mixed(0), "second": None}):
        refuse_any_training_row(evaluation, rows)
    for evaluation, found in (
        (mixed(1), "holds rows equal to training rows. Remove"),
        (rows.parts[0].base.select([3]), "is made from rows of the training set"),
        (only_labels, "cannot be compared with the training rows"),
    ):
        refuse = partial(refuse_any_training_row, training=rows)
        with pytest.raises(UnsupportedArgumentError, match=f"the evaluation set {found}") as error:
            refuse(evaluation)
        with pytest.raises(UnsupportedArgumentError, match=f"the evaluation set 'bad' {found}"):
            refuse({"good": mixed(0), "bad": evaluation})
        assert "With private_selection_mean_runs" in str(error.value)
        assert not any(character.isdigit() for character in str(error.value))
    assert not warnings


def test_each_named_set_is_judged_by_itself():
    train = table(0)
    rows = TrainingRows(train, FORWARD)
    assert refuse_training_rows(None, rows)
    assert refuse_training_rows({"first": table(100), "second": None}, rows)
    assert refuse_training_rows(datasets.DatasetDict({"first": table(100)}), rows)
    with pytest.raises(UnsupportedArgumentError, match="'bad'"):
        refuse_training_rows({"large and good": table(100, 1000), "bad": train.select([3])}, rows)


@pytest.mark.parametrize(
    "evaluation",
    [
        table(0).select_columns(["idx", "label"]).map(lambda row: row),
        [{"text": "row 3 of many"}],
        TensorDataset(torch.arange(3)),
        [{"label": 0}],
    ],
)
def test_sets_without_a_common_input_are_not_comparable(evaluation):
    rows = TrainingRows(table(0), FORWARD)
    found = rows.compare(evaluation)
    assert not found.comparable and not found.refused
    assert not refuse_training_rows(evaluation, rows)
    assert not refuse_training_rows({"first": evaluation, "second": table(100)}, rows)


def test_an_object_seen_before_costs_nothing(monkeypatch):
    rows, evaluation = TrainingRows(table(0), FORWARD), table(100)
    first = rows.compare(evaluation)
    monkeypatch.setattr(compare, "hash_rows", lambda *_: pytest.fail("hashed again"))
    monkeypatch.setattr(compare, "share_memory", lambda *_: pytest.fail("compared again"))
    assert rows.compare(evaluation) is first


def test_the_training_set_is_hashed_once_and_only_when_needed(monkeypatch):
    calls = []
    original = compare.hash_rows
    monkeypatch.setattr(
        compare, "hash_rows", lambda *given: calls.append(given[0]) or original(*given)
    )
    train = table(0)
    rows = TrainingRows(train, FORWARD)
    rows.compare(train.select([3]))
    assert calls == []
    rows.compare(table(100))
    rows.compare(table(200))
    assert calls.count(rows.parts) == 1 and len(calls) == 3


def test_hashes_stay_in_the_process_and_keys_differ():
    one, two = TrainingRows(table(0), FORWARD), TrainingRows(table(0), FORWARD)
    for rows in (one, two):
        rows.compare(table(100))
    (first,), (second,) = one._hashes.values(), two._hashes.values()
    assert len(first) == ROWS == len(set(first.tolist())) and not np.isin(first, second).any()
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copied(one)


# What is compared


@pytest.mark.parametrize(
    "name", ["id", "idx", "Index", "guid", "uid", "question_id", "row_idx", "pair_guid"]
)
def test_ids_are_not_compared_unless_the_model_reads_them(name):
    train, other = [{"text": "a", name: 3}], [{"text": "b", name: 3}]
    assert not TrainingRows(train, None).compare(other).refused
    assert TrainingRows(train, None).compare([{"text": "a", name: 4}]).refused
    assert TrainingRows(train, (name,)).compare(other).refused


def test_labels_are_what_the_caller_says():
    train, other = [{"text": "a", "target": "x"}], [{"text": "a", "target": "y"}]
    assert not TrainingRows(train, None).compare(other).refused
    assert TrainingRows(train, None, labels=("target",)).compare(other).refused


def test_without_an_input_that_the_model_reads_all_columns_count_together():
    train = table(0).remove_columns(["input_ids", "attention_mask"])
    assert TrainingRows(train, FORWARD).compare(train.map(lambda row: {"idx": 0})).refused
    assert not TrainingRows(train, FORWARD).compare(train.map(lambda row: {"weight": 0.5})).refused


def test_a_transform_is_run_where_only_its_columns_are_common():
    train = table(0).remove_columns(["input_ids", "attention_mask", "weight"]).with_transform(words)
    rows = TrainingRows(train, ("pieces",))
    assert rows.compare([train[3]]).refused
    assert rows.compare(table(0).map(words, batched=True, remove_columns=["sentence"])).refused
    assert not rows.compare(
        table(100).map(words, batched=True, remove_columns=["sentence"])
    ).refused


def tensors(start: int) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + 40).reshape(10, 4) / 3, torch.arange(10) % 2)


def test_rows_that_are_tuples_are_compared_by_position_without_scalars():
    rows = TrainingRows(tensors(0), FORWARD)
    flipped = TensorDataset(tensors(0).tensors[0], 1 - tensors(0).tensors[1])
    for evaluation in (
        tensors(0),
        flipped,
        list(flipped),
        [list(row) for row in flipped],
        Subset(flipped, [3]),
    ):
        assert rows.compare(evaluation).refused
    assert not rows.compare(tensors(100)).refused
    assert not rows.compare(TensorDataset(torch.arange(3))).comparable
    assert TrainingRows([("a", 0), ("b", 1)], None).compare([("b", 0)]).refused
    assert TrainingRows(["a", "b"], None).compare(["b"]).refused


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "form", [lambda rows: rows, list, lambda rows: list(rows.with_format("torch"))]
)
def test_padding_is_not_compared(side, form):
    def pad(row):
        nothing = [0] * (9 - len(row["input_ids"]))
        return {
            name: row[name] + nothing if side == "right" else nothing + row[name]
            for name in ("input_ids", "attention_mask")
        }

    train = table(0)
    rows, padded = TrainingRows(train, FORWARD), TrainingRows(train.map(pad), FORWARD)
    assert rows.compare(form(train.map(pad))).equal == ROWS
    assert padded.compare(form(renumbered(train))).equal == ROWS
    assert padded.compare(form(table(100).map(pad))).equal == 0


def test_only_lists_as_long_as_the_mask_are_cut():
    row = {
        "input_ids": [5, 6, 0],
        "attention_mask": [1, 1, 0],
        "more": [1, 2],
        "words": ["a", "b", "c"],
    }
    cut = {"input_ids": [5, 6], "attention_mask": [1, 1], "more": [1, 2], "words": ["a", "b", "c"]}
    other, hole = {**cut, "more": [1, 3]}, {**row, "more": [1, None]}
    for train in ([row, hole], datasets.Dataset.from_list([row, hole])):
        rows = TrainingRows(train, None)
        assert (
            rows.compare([cut]).equal == rows.compare(datasets.Dataset.from_list([cut])).equal == 1
        )
        assert (
            rows.compare([other]).equal
            == rows.compare(datasets.Dataset.from_list([other])).equal
            == 0
        )
        assert (
            rows.compare([hole]).equal
            == rows.compare(datasets.Dataset.from_list([hole])).equal
            == 1
        )


def picture(seed: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    )


def png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def pictures(seeds: range, folder: Path | None = None) -> datasets.Dataset:
    """A data set of images, stored as bytes or, with a folder, as paths."""
    stored: list[dict] = []
    for seed in seeds:
        content = png(picture(seed))
        if folder is not None:
            (folder / f"{seed}.png").write_bytes(content)
        stored.append(
            {"bytes": content, "path": "x.png"} if folder is None else str(folder / f"{seed}.png")
        )
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(
        {"img": stored, "label": [0] * len(stored)}, features=features
    )


def test_pictures_are_compared_by_file_or_by_pixels(tmp_path):
    train, held_out = pictures(range(6)), pictures(range(50, 56))
    rows = TrainingRows(train, ("pixel_values",))
    copies = [
        pictures(range(2, 5)),
        list(train),
        [train[1]],
        pictures(range(3), tmp_path),
        [{"img": picture(3)}],
    ]
    for evaluation in [*copies, list(train.cast_column("img", datasets.Image(decode=False)))]:
        assert rows.compare(evaluation).equal == len(evaluation)
    for evaluation in (held_out, list(held_out), held_out.select([0])):
        assert rows.compare(evaluation).equal == 0 and rows.compare(evaluation).comparable
    assert TrainingRows(list(train), None).compare(pictures(range(2, 5))).equal == 3
    assert rows.compare(Subset(train, [1])).derived
    assert not rows.compare([{"img": picture(3).convert("L")}]).refused


# The encoding


ARRAYS = [
    pa.array([1, None, -3, 2**62]),
    pa.array([0, 1, 255], pa.uint8()),
    pa.array([1, 2**63 + 1, None], pa.uint64()),
    pa.array([True, None, False]),
    pa.array([0.1, None, -0.0, 2.0]),
    pa.array([0.5, None, 3.0], pa.float32()),
    pa.array([np.float16(0.5), None], pa.float16()),
    pa.array(["a", None, "", "äöü", "abc"]),
    pa.array(["a", None, "bc"], pa.large_string()),
    pa.array(["a", None, "bc"], pa.string_view()),
    pa.array([b"a", None, b"\0"]),
    pa.array([b"ab", b"cd"], pa.binary(2)),
    pa.array(["a", "b", None, "a"]).dictionary_encode(),
    pa.array([None, None]),
    pa.array([[1, 2], None, [], [3], [4, 5, 6]]),
    pa.array([[1, None], [2, 3], [], None]),
    pa.array([[1, 2], [3]], pa.large_list(pa.int8())),
    pa.array([[1, 2], [2**63]], pa.list_(pa.uint64())),
    pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    pa.array([[0.1, 2.0], [], [3.5]]),
    pa.array([[True], [False, True]]),
    pa.array([["a", None], [], None, ["b", "cd"]]),
    pa.array([[[1, 2], []], None, [], [[3], None]]),
    pa.array([[None], []]),
    pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}]),
    pa.array([[{"role": "user", "content": "hi"}], []]),
    pa.array([{"bytes": b"abc", "path": "x"}, {"bytes": None, "path": "nowhere"}, None]),
    pa.array([0, None, 86400], pa.timestamp("s")),
    pa.array([[1, 2]], pa.list_(pa.decimal128(5, 2))),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.type)[:40])
def test_arrow_and_python_give_the_same_bytes(array):
    for some in (array, array[1:], array[1:2], array[:0], pa.concat_arrays([array[1:], array])):
        assert list(encoding.cells(some)) == [encode(value) for value in some.to_pylist()]


def test_string_views_are_read_through_indices():
    views = datasets.Dataset(
        table(0)._data.table.set_column(
            0, "sentence", pa.array(list(table(0)["sentence"]), pa.string_view())
        )
    )
    assert TrainingRows(views.shuffle(seed=1), None).compare(table(0)).equal == ROWS


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.type)[:40])
def test_a_slice_has_the_places_of_what_it_is_cut_from(array):
    places, width = origin._addresses(array), origin._slot(array)[1]
    assert len(places) == len(array) and (width == 0) == (places == -1).all()
    np.testing.assert_array_equal(origin._addresses(array[1:]), places[1:])
    assert width == 0 or len(set(places.tolist())) == len(array)


@pytest.mark.parametrize(
    "same",
    [
        [
            [1, 2],
            (1, 2),
            np.array([1, 2], np.int16),
            torch.tensor([1, 2]),
            [np.int64(1), torch.tensor(2)],
        ],
        [
            [1.5, 2],
            torch.tensor([1.5, 2.0]),
            torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
            np.array([1.5, 2.0]),
        ],
        [0.1, np.float32(0.1), torch.tensor(0.1, requires_grad=True), np.array(0.1)],
        [
            [[1, 2], [3, 4]],
            torch.tensor([[1, 2], [3, 4]]),
            [torch.tensor([1, 2]), np.array([3, 4])],
        ],
        [[], (), torch.zeros(0), np.array([], np.int64)],
        ["a", np.str_("a")],
        [["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object)],
        [{"a": 1}, {"a": True, "b": None}],
    ],
    ids=str,
)
def test_one_value_in_many_containers_has_one_encoding(same):
    assert len(set(map(encode, same))) == 1


def test_different_values_have_different_encodings():
    different = [
        None,
        0,
        1,
        2**70,
        0.5,
        "",
        "a",
        b"a",
        "0",
        [],
        [[]],
        [None],
        [0],
        [0, 0],
        [0.5],
        ["a"],
        ["a", "b"],
        ["ab"],
    ]
    different += [
        [[1], [2]],
        [[1, 2]],
        [[1, 2], []],
        {},
        {"a": 1},
        {"b": 1},
        {"a": {"b": 1}},
        picture(0),
        picture(1),
    ]
    different += [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6)]
    assert len(set(map(encode, different))) == len(different)


class Augmented(torch.utils.data.Dataset):
    """The same pictures, with or without noise of their own at each reading."""

    def __init__(self, noise: float):
        self.noise, self.pixels = noise, torch.arange(40 * 12.0).view(40, 3, 2, 2)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {
            "pixel_values": self.pixels[index] + self.noise * torch.rand(3, 2, 2),
            "labels": index % 2,
        }


@pytest.mark.parametrize(("of_training", "of_evaluation"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_rows_that_differ_at_each_reading_are_not_comparable(of_training, of_evaluation):
    assert (
        not TrainingRows(Augmented(of_training), None).compare(Augmented(of_evaluation)).comparable
    )
    assert TrainingRows(Augmented(0.0), None).compare(Augmented(0.0)).refused


def test_a_list_that_grew_is_compared_again():
    training = TrainingRows([{"x": [float(i)]} for i in range(20)], None)
    evaluation = [{"x": [float(i)]} for i in range(100, 120)]
    assert not training.compare(evaluation).refused
    evaluation[:] = [{"x": [float(i)]} for i in range(20)]
    assert training.compare(evaluation).refused
