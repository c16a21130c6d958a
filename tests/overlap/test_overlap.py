"""Evaluation sets that hold training rows are known by what they hold, and by their index."""

import functools
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_images import picture, png
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from hf_dp import overlap
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap import TrainingRows, encode

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
        ids = torch.tensor(row["input_ids"])
        return {"input_ids": ids, "sentence": row["sentence"], "labels": row["label"]}


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


def padded(rows: datasets.Dataset, left: bool = False) -> datasets.Dataset:
    def pad(row):
        nothing = [0] * (9 - len(row["input_ids"]))
        columns = {name: row[name] for name in ("input_ids", "attention_mask")}
        return {name: nothing + ids if left else ids + nothing for name, ids in columns.items()}

    return rows.select_columns(["input_ids", "attention_mask"]).map(pad)


def words(batch):
    return {"pieces": [sentence.split() for sentence in batch["sentence"]]}


OF_THE_SET = {
    "the same object": lambda train: train,
    "select, contiguous": lambda train: train.select(range(5, 17)),
    "select, scattered": lambda train: train.select([31, 3, 4, 30]),
    "one row": lambda train: train.select([7]),
    "shuffle": lambda train: train.shuffle(seed=1),
    "filter": lambda train: train.filter(lambda row: row["idx"] % 5 == 0),
    "rename of an input": lambda train: train.rename_column("sentence", "text"),
    "other labels": lambda train: train.remove_columns("label").add_column("label", [3] * ROWS),
    "with_format": lambda train: train.with_format("torch"),
    "with_transform": lambda train: train.with_transform(words),
    "concatenation": lambda train: datasets.concatenate_datasets([train.select(range(5)), table(100, 20)]),
    "Subset": lambda train: Subset(train, [3, 8]),
    "nested Subset": lambda train: Subset(Subset(train, range(10, 20)), torch.tensor([3, -1])),
    "Subset of a select": lambda train: Subset(train.select([3, 8]), [1]),
    "ConcatDataset": lambda train: ConcatDataset([table(100, 5), Subset(train, [4])]),
    "Subset of a ConcatDataset": lambda train: Subset(ConcatDataset([table(100, 200), train]), [0, 203]),
}  # fmt: skip
COPIES = {
    "padded": lambda train, _: padded(train),
    "padded on the left": lambda train, _: padded(train, left=True),
    "padded, a list": lambda train, _: list(padded(train)),
    "padded, as tensors": lambda train, _: list(padded(train, left=True).with_format("torch")),
    "map, other column changed": lambda train, _: train.map(lambda row: {"label": 1 - row["label"]}),
    "renumbered": lambda train, _: renumbered(train),
    "map, the words only": lambda train, _: train.map(words, batched=True, remove_columns=["input_ids", "label"]),
    "saved and loaded": lambda train, folder: on_disk(train, folder),
    "parquet": lambda train, folder: through_parquet(train, folder),
    "cast": lambda train, _: renumbered(train.cast_column("input_ids", datasets.List(datasets.Value("int16")))),
    "a list of rows": lambda train, _: [train[i] for i in range(9)],
    "rows as tensors": lambda train, _: list(train.with_format("torch")),
    "with_transform on a copy": lambda train, _: renumbered(train).with_transform(words),
    "a torch data set": lambda train, _: Wrapped(train),
    "Subset of a torch data set": lambda train, _: Subset(Wrapped(train), [4, 5]),
    "Subset of a copy": lambda train, _: Subset(renumbered(train), [4, 5]),
    "a list of a Subset": lambda train, _: list(Subset(train, [4, 5])),
    "a stream": lambda train, _: train.to_iterable_dataset(),
    "a torch stream": lambda train, _: Stream(list(train)),
    "ConcatDataset of copies": lambda train, _: ConcatDataset([renumbered(train), list(train)]),
}  # fmt: skip
HELD_OUT = {
    "other rows, same ids and labels": lambda train, _: table(100),
    "other rows, shuffled": lambda train, _: table(100).shuffle(seed=1),
    "a list of other rows": lambda train, _: list(table(100)),
    "one array numbers both": lambda train, _: sharing_an_array(train),
    "a Subset of other rows": lambda train, _: Subset(table(100), range(5)),
    "an empty list": lambda train, _: [],
    "an empty selection": lambda train, _: train.select([]),
}


def sharing_an_array(train: datasets.Dataset) -> datasets.Dataset:
    """A held-out set whose idx column is the training set's, in the same memory."""
    other = table(100).remove_columns("idx")
    return datasets.Dataset(other._data.table.append_column("idx", train._data.table.column("idx")))


def encoded(rows: datasets.Dataset, length: int = 99, before: int = 0, special: int = 1):
    """Rows whose texts are encoded in another way: cut, after a prompt, or without special tokens."""

    def of(row):
        ids = [7] * before + [900] * special + [ord(letter) for letter in row["sentence"]]
        return {"input_ids": ids[:length], "attention_mask": [1] * len(ids[:length])}

    return rows.map(of)


ENCODINGS = {
    "another max_length": {"length": 12},
    "a prompt before the text": {"before": 3},
    "no special tokens": {"special": 0},
}


def questions(start: int, count: int, shared: int) -> list[dict]:
    """Rows like those of QQP: of pairs of questions, ``shared`` have one of another set's."""

    def row(i: int) -> dict:
        first = i if i - start >= shared else i - start
        return {"question1": f"what is {first}?", "question2": f"why is {i}?", "label": i % 2}

    return [row(i) for i in range(start, start + count)]


def repeating(rows: list[dict], column: str, share: float) -> list[dict]:
    """Rows of which the last ones have the first one's value in a column."""
    same = round(share * len(rows))
    return rows[:-same] + [{**row, column: rows[0][column]} for row in rows[-same:]]


def restaurants(start: int, count: int, references: int = 4) -> list[dict]:
    """Rows like those of E2E: several references to each meaning, which all sets have."""
    return [
        {
            "meaning_representation": f"name[{i % (count // references)}]",
            "human_reference": f"place {i}",
            "input_ids": [i % (count // references)],
            "labels": [i // 100, 1],
            "label": i % 2,
        }
        for i in range(start, start + count)
    ]


def phrases(numbers: range, prompt: str = "") -> list[dict]:
    """Rows like those of SST-2: a few occur twice, and positions count on from 0."""
    return [
        {
            "sentence": f"phrase {i}",
            "prompted": f"{prompt} phrase {i}",
            "input_ids": [*prompt.encode(), i],
            "position_ids": [*range(i % 190)],
        }
        for i in [*numbers, *numbers[:4]]
    ]


def structured(name: str) -> tuple[list[dict], list[dict], list[dict]]:
    """A training set, an honest evaluation set, and training rows in disguise."""
    if name == "QQP":
        train = repeating(questions(0, 600, 0), "question1", 0.06)
        return train, questions(1000, 500, 51), [{**row, "idx": 5, "label": 3} for row in train]
    if name == "E2E":
        train = restaurants(0, 400)
        other = [{**row, "input_ids": [1, 2, 3, i]} for i, row in enumerate(train)]
        return train, restaurants(1000, 400), other
    if name == "E2E, without texts":
        *sets, _ = structured("E2E")
        kept = ("input_ids", "labels", "label")
        train, held_out = ([{k: row[k] for k in kept} for row in each] for each in sets)
        return train, held_out, [{**row, "label": 7} for row in train]
    train = phrases(range(190))
    return train, phrases(range(190, 290)), phrases(range(190), "Classify:")


STRUCTURES = ["SST-2", "QQP", "E2E", "E2E, without texts"]


@functools.cache
def forty() -> datasets.Dataset:
    return table(0)


@functools.cache
def noisy() -> torch.utils.data.Dataset:
    return Augmented(1.0)


def backwards() -> datasets.Dataset:
    return table(0).select(list(range(ROWS))[::-1])


def of_structure(name: str, place: int, copies: int = 1):
    return lambda *_: structured(name)[place] * copies


def on(indices):
    """The other rows of the same object."""
    return lambda train, _: type(train)(train.dataset, indices)


# What makes a training set; what makes an evaluation set, of it and a folder; which rows of the
# latter are training rows: all, some, none, or none as the two cannot be compared.
FORMS = {
    **{name: (forty, lambda train, _, make=make: make(train), "some") for name, make in OF_THE_SET.items()},
    **{f"{name}, of a selection": (backwards, lambda train, _, make=make: make(train), "some") for name, make in OF_THE_SET.items()},
    **{name: (forty, make, "all") for name, make in COPIES.items()},
    **{name: (forty, make, "none") for name, make in HELD_OUT.items()},
    **{name: (of_structure(name, 0), of_structure(name, 1), "none") for name in STRUCTURES},
    **{f"{name}, own": (of_structure(name, 0), of_structure(name, 2), "all") for name in STRUCTURES},
    **{f"{name}, thrice": (of_structure(name, 0, 3), of_structure(name, 1), "none") for name in STRUCTURES},
    **{f"{name}, own of thrice": (of_structure(name, 0, 3), of_structure(name, 2), "all") for name in STRUCTURES},
    "two ranges": (lambda: forty().select(range(20)), lambda train, _: forty().select(range(20, 40)), "none"),
    "two scattered parts": (lambda: forty().select([9, 0, 5]), lambda train, _: forty().select([30, 1, 7]), "none"),
    "two Subsets": (lambda: Subset(forty(), range(20)), on(range(20, 40)), "none"),
    "two objects": (noisy, lambda train, _: Augmented(1.0), "unknown"),
    "one index of one object": (lambda: Subset(noisy(), range(20)), on([-21, 30]), "some"),
}  # fmt: skip


def is_judged_rightly(name: str, folder: Path) -> bool:
    of, make, which = FORMS[name]
    found = TrainingRows(train := of()).compare(make(train, folder))
    if which in ("none", "unknown"):
        right = found.equal.tolist() == [] and found.comparable is (which == "none")
    else:
        right = found.rows >= len(found.equal) > 0 and (which == "some" or found.comparable)
        right &= which == "some" or len(found.equal) == found.rows
    return right and found.refused is (which in ("all", "some"))


@pytest.mark.parametrize("name", FORMS)
def test_evaluation_sets_of_every_form_are_judged_rightly(name, tmp_path):
    assert is_judged_rightly(name, tmp_path)


CONTAINERS = {
    "list": list, "wrapped": Wrapped, "Subset": lambda rows: Subset(rows, range(ROWS)), "padded": padded,
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    "name", ["a list of rows", "renumbered", "a torch data set", "saved and loaded"]
)
def test_the_training_set_may_have_any_form(name, container, tmp_path):
    train = table(0)
    rows = TrainingRows(CONTAINERS[container](train))
    assert rows.compare(COPIES[name](train, tmp_path)).refused
    assert not rows.compare(table(100)).refused


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", ENCODINGS)
def test_training_rows_in_another_tokenization_are_known_by_their_text(name, search):
    train = encoded(table(0))
    other = encoded(table(0), **ENCODINGS[name])
    assert not set(map(tuple, train["input_ids"])) & set(map(tuple, other["input_ids"]))
    with pytest.raises(UnsupportedArgumentError, match="40 of 40, by `sentence`: 0, 1, 2"):
        TrainingRows(train).refuse(other, search=search)
    assert TrainingRows(train).refuse(encoded(table(100), **ENCODINGS[name]), search=search)


@pytest.mark.parametrize("repeats", ["the training set", "the evaluation set", "neither"])
def test_a_column_tells_rows_apart_where_95_percent_of_it_are_distinct_in_both_sets(repeats):
    train, own = questions(0, 600, 0), questions(5000, 600, 600)
    train = repeating(train, "question1", 0.06 if repeats == "the training set" else 0.04)
    own = repeating(own, "question1", 0.06 if repeats == "the evaluation set" else 0.04)
    found = TrainingRows(train).compare(own)
    assert found.refused is (repeats == "neither")
    assert found.refused is (len(found.equal) > 0)


# Ways to get it wrong


def plant(name: str, planted):
    return lambda monkeypatch: monkeypatch.setattr(overlap, name, planted)


def first_column_only(monkeypatch):
    together = overlap._together
    monkeypatch.setattr(overlap, "_together", lambda of, names: together(of, [*names][:1]))


NEVER = re.compile("$^")
PLANTED = {
    "what repeats tells rows apart": (plant("MOST_DISTINCT", 0.0), "QQP"),
    "nothing tells rows apart": (plant("MOST_DISTINCT", 1.1), "SST-2, own"),
    "positions are content": (plant("_BESIDE_CONTENT", NEVER), "SST-2"),
    "labels are content": (plant("_LABELS", NEVER), "E2E, without texts, own"),
    "a column by its beginning": (first_column_only, "E2E, without texts"),
    "no index": (plant("_places", lambda *_: np.zeros(0, int)), "one index of one object"),
    "an index of any object": (plant("_places", lambda of, _: np.arange(len(of))), "two ranges"),
    "padding is content": (plant("_unpad", lambda chunk: None), "padded"),
    "content unread": (plant("encode", lambda value: os.urandom(8)), "a list of rows"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_noticed(bug, tmp_path, monkeypatch):
    plant_it, noticed = PLANTED[bug]
    plant_it(monkeypatch)
    assert not is_judged_rightly(noticed, tmp_path)


# Thresholds, names, words


@pytest.fixture
def warnings(warnings_of):
    return warnings_of("overlap")


def mixed(training_rows: int) -> list[dict]:
    return [*table(100, 20 - training_rows), *table(0, training_rows)]


def test_up_to_a_tenth_is_warned_of_once_and_more_is_refused(warnings):
    rows, evaluation = TrainingRows(table(0)), mixed(2)
    assert rows.refuse(evaluation) and rows.refuse(evaluation)
    assert len(warnings) == 1 and "2 of 20" in warnings[0] and ": 18, 19)" in warnings[0]
    assert "Epsilon" in warnings[0]
    assert rows.refuse(mixed(0)) and len(warnings) == 1
    with pytest.raises(UnsupportedArgumentError, match="3 of 20, by .*: 17, 18, 19"):
        rows.refuse(mixed(3))


def test_words_say_how_many_rows_which_and_what_to_do():
    rows = TrainingRows(table(0))
    with pytest.raises(UnsupportedArgumentError) as error:
        rows.refuse({"dev": table(25, 30)})
    message = str(error.value)
    assert "the evaluation set 'dev' holds rows equal to training rows (15 of 30" in message
    assert ": 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 5 more)" in message
    assert "held-out" in message and "evaluate_on_training_rows=True" in message
    assert "row 25" not in message and "of many" not in message


def test_a_private_search_refuses_a_single_equal_row_and_sets_that_it_cannot_compare(warnings):
    rows, only_labels = TrainingRows(table(0)), [{"label": 0}]
    for evaluation in (None, mixed(0), {"first": mixed(0), "second": None}):
        assert rows.refuse(evaluation, search=True)
    for evaluation, found in (
        (mixed(1), r"holds rows equal to training rows \(1 of 20, by .*: 19\)\. Pass a held-out"),
        (rows.dataset.select([3]), "holds rows equal to training rows"),
        (only_labels, "cannot be compared with the training rows.*Give both sets the same columns"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=f"the evaluation set {found}") as error:
            rows.refuse(evaluation, search=True)
        with pytest.raises(UnsupportedArgumentError, match=f"the evaluation set 'bad' {found}"):
            rows.refuse({"good": mixed(0), "bad": evaluation}, search=True)
        assert "With private_selection_mean_runs" in str(error.value)
    assert not warnings


def test_each_named_set_is_judged_by_itself():
    train = table(0)
    rows = TrainingRows(train)
    assert rows.refuse(None)
    assert rows.refuse({"first": table(100), "second": None})
    assert rows.refuse(datasets.DatasetDict({"first": table(100)}))
    with pytest.raises(UnsupportedArgumentError, match="'bad'"):
        rows.refuse({"large and good": table(100, 1000), "bad": train.select([3])})


@pytest.mark.parametrize(
    "evaluation",
    [
        table(0).select_columns(["idx", "label"]),
        [{"text": "row 3 of many"}],
        TensorDataset(torch.arange(3)),
        [{"label": 0}],
        Stream([{"label": 0}]),
    ],
)
def test_sets_without_a_common_input_are_not_comparable(evaluation):
    rows = TrainingRows(table(0))
    found = rows.compare(evaluation)
    assert not found.comparable and not found.refused
    assert not rows.refuse(evaluation)
    assert not rows.refuse({"first": evaluation, "second": table(100)})


def test_each_set_is_read_once_and_only_when_needed(monkeypatch):
    read = []
    digests = overlap.digests
    monkeypatch.setattr(overlap, "digests", lambda *given: read.append(given[0]) or digests(*given))
    train, first, second = table(0), table(100), table(200)
    rows = TrainingRows(train)
    assert read == []
    for evaluation in (first, second, first):
        rows.compare(evaluation)
    assert len(read) == 3 and all(a is b for a, b in zip(read, (train, first, second)))


def test_reading_leaves_the_generators_as_they_were():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    TrainingRows(Augmented(1.0)).compare(Augmented(0.0))
    assert torch.equal(torch.rand(3), expected)


def test_digests_under_two_keys_have_nothing_in_common():
    one, two = TrainingRows(table(0)), TrainingRows(table(0))
    for rows in (one, two):
        rows.compare(table(100))
    (first,), (second,) = one._read.values(), two._read.values()
    assert len(set(first["sentence"].tolist())) == ROWS
    assert not np.isin(first["sentence"], second["sentence"]).any()


# What is compared


@pytest.mark.parametrize(
    "name",
    [
        *("id", "idx", "Index", "guid", "uid", "question_id", "row_idx", "pair_guid"),
        *("token_type_ids", "position_ids", "special_tokens_mask", "label", "fine_label"),
    ],
)
def test_ids_masks_types_positions_and_labels_are_not_compared(name):
    train, other = [{"text": "a", name: 3}], [{"text": "b", name: 3}]
    assert not TrainingRows(train).compare(other).refused
    assert TrainingRows(train).compare([{"text": "a", name: 4}]).refused


@pytest.mark.parametrize("name", ["composition", "disposition", "exposition", "propositions"])
def test_what_only_sounds_like_a_position_is_compared(name):
    assert TrainingRows([{name: "a"}, {name: "b"}]).compare([{name: "b"}]).refused


def tensors(start: int) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + 40).reshape(10, 4) / 3, torch.arange(10) % 2)


def test_rows_that_are_tuples_are_compared_by_position_without_scalars():
    rows = TrainingRows(tensors(0))
    flipped = TensorDataset(tensors(0).tensors[0], 1 - tensors(0).tensors[1])
    lists = [list(row) for row in flipped]
    for evaluation in (tensors(0), flipped, list(flipped), lists, Subset(flipped, [3])):
        assert rows.compare(evaluation).refused
    assert not rows.compare(tensors(100)).refused
    assert not rows.compare(TensorDataset(torch.arange(3))).comparable
    assert TrainingRows([("a", 0), ("b", 1)]).compare([("b", 0)]).refused
    assert TrainingRows(["a", "b"]).compare(["b"]).refused


def test_only_lists_as_long_as_the_mask_are_cut():
    others = {"more": [1, 2], "words": ["a", "b", "c"]}
    row = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], **others}
    cut = {"input_ids": [5, 6], "attention_mask": [1, 1], **others}
    other, hole = {**cut, "more": [1, 3]}, {**row, "more": [1, None]}
    for train in ([row, hole], datasets.Dataset.from_list([row, hole])):
        rows = TrainingRows(train)
        for row, equal in ((cut, [0]), (other, []), (hole, [0])):
            for form in ([row], datasets.Dataset.from_list([row])):
                assert rows.compare(form).equal.tolist() == equal


def pictures(seeds: range, folder: Path | None = None) -> datasets.Dataset:
    """A data set of images, stored as bytes or, with a folder, as paths."""
    stored: list[Any] = [{"bytes": png(picture(seed)), "path": "x.png"} for seed in seeds]
    if folder is not None:
        paths = [folder / f"{seed}.png" for seed in seeds]
        for path, image in zip(paths, stored):
            path.write_bytes(image["bytes"])
        stored = list(map(str, paths))
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"img": stored, "label": [0] * len(stored)}
    return datasets.Dataset.from_dict(columns, features=features)


def test_pictures_are_compared_by_file_or_by_pixels(tmp_path):
    train, held_out = pictures(range(6)), pictures(range(50, 56))
    rows = TrainingRows(train)
    copies = [pictures(range(2, 5)), list(train), [train[1]], [{"img": picture(3)}]]
    copies.append(pictures(range(3), tmp_path))
    for evaluation in [*copies, list(train.cast_column("img", datasets.Image(decode=False)))]:
        assert len(rows.compare(evaluation).equal) == len(evaluation)
    for evaluation in (held_out, list(held_out), held_out.select([0])):
        assert not len(rows.compare(evaluation).equal) and rows.compare(evaluation).comparable
    assert len(TrainingRows(list(train)).compare(pictures(range(2, 5))).equal) == 3
    assert rows.compare(Subset(train, [1])).refused
    assert not rows.compare([{"img": picture(3).convert("L")}]).refused


# The encoding


ARRAYS = [
    pa.array([1, None, -3, 2**62]), pa.array([1, 2**63 + 1, None], pa.uint64()),
    pa.array([True, None, False]), pa.array([0.1, None, -0.0, 2.0]),
    pa.array([np.float16(0.5), None], pa.float16()), pa.array(["a", None, "", "äöü", "abc"]),
    pa.array(["a", None, "bc"], pa.string_view()), pa.array([b"a", None, b"\0"]),
    pa.array(["a", "b", None, "a"]).dictionary_encode(), pa.array([None, None]),
    pa.array([[1, 2], None, [], [3], [4, 5, 6]]), pa.array([[1, None], [2, 3], [], None]),
    pa.array([[1, 2], [2**63]], pa.list_(pa.uint64())),
    pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), pa.array([[0.1, 2.0], [], [3.5]]),
    pa.array([[True], [False, True]]), pa.array([["a", None], [], None, ["b", "cd"]]),
    pa.array([[[1, 2], []], None, [], [[3], None]]),
    pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}]),
    pa.array([{"bytes": b"abc", "path": "x"}, {"bytes": None, "path": "nowhere"}, None]),
    pa.array([0, None, 86400], pa.timestamp("s")),
    pa.array([[1, 2]], pa.list_(pa.decimal128(5, 2))),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.type)[:40])
def test_arrow_and_python_give_the_same_bytes(array):
    for some in (array, array[1:], array[1:2], array[:0], pa.concat_arrays([array[1:], array])):
        assert list(map(encode, overlap._values(some))) == list(map(encode, some.to_pylist()))


SAME = [
    [[1, 2], (1, 2), np.array([1, 2], np.int16), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)]],
    [[1.5, 2], torch.tensor([1.5, 2.0]), torch.tensor([1.5, 2.0], dtype=torch.bfloat16), np.array([1.5, 2.0])],
    [0.1, np.float32(0.1), torch.tensor(0.1, requires_grad=True), np.array(0.1)],
    [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]]), [torch.tensor([1, 2]), np.array([3, 4])]],
    [[], (), torch.zeros(0), np.array([], np.int64)],
    ["a", np.str_("a")],
    [["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object)],
    [{"a": 1}, {"a": True, "b": None}],
]  # fmt: skip
DIFFERENT = [
    None, 0, 1, 2**70, 0.5, "", "a", b"a", "0", [], [[]], [None], [0], [0, 0], [0.5], ["a"], ["a", "b"], ["ab"],
    [[1], [2]], [[1, 2]], [[1, 2], []], {}, {"a": 1}, {"b": 1}, {"a": {"b": 1}}, picture(0), picture(1),
    torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6),
]  # fmt: skip


@pytest.mark.parametrize("same", SAME, ids=str)
def test_one_value_in_many_containers_has_one_encoding(same):
    assert len(set(map(encode, same))) == 1


def test_different_values_have_different_encodings():
    assert len(set(map(encode, DIFFERENT))) == len(DIFFERENT)


class Augmented(torch.utils.data.Dataset):
    """The same pictures, with or without noise of their own at each reading."""

    def __init__(self, noise: float):
        self.noise, self.pixels = noise, torch.arange(40 * 12.0).view(40, 3, 2, 2)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        pixels = self.pixels[index] + self.noise * torch.rand(3, 2, 2)
        return {"pixel_values": pixels, "labels": index % 2}


@pytest.mark.parametrize(("of_training", "of_evaluation"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_rows_that_differ_at_each_reading_are_not_comparable(of_training, of_evaluation):
    assert not TrainingRows(Augmented(of_training)).compare(Augmented(of_evaluation)).comparable
    assert TrainingRows(Augmented(0.0)).compare(Augmented(0.0)).refused


def test_a_list_that_grew_is_compared_again():
    training = TrainingRows([{"x": [float(i)]} for i in range(20)])
    evaluation = [{"x": [float(i)]} for i in range(100, 120)]
    assert not training.compare(evaluation).refused
    evaluation[:] = [{"x": [float(i)]} for i in range(20)]
    assert training.compare(evaluation).refused
