"""Files, folders and splits mean what they are called, and a part held out is held out."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_images import by_class, picture, png
from transformers import BartConfig, BartForConditionalGeneration

from hf_dp.cli.recipes import rows_of
from hf_dp.errors import ConfigError, DataError, InvalidArgumentError
from hf_dp.tasks import sources
from hf_dp.tasks.classification import DataArguments
from hf_dp.tasks.models import check_positions
from hf_dp.tasks.sources import load_evaluation, load_file, load_hub, load_train, read_texts


def write_csv(path: Path, number: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"number\n{number}\n")
    return str(path)


PATTERNS = [("p[1].csv", "p1.csv"), ("p*.csv", "p2.csv"), ("p?.csv", "p3.csv")]


@pytest.mark.parametrize(("name", "other"), PATTERNS)
def test_a_file_is_read_by_its_name_and_not_by_a_pattern(tmp_path, name, other):
    write_csv(tmp_path / other, 1)
    assert load_file(write_csv(tmp_path / name, 2))["number"][:] == [2]


@pytest.mark.parametrize("other", ["p1", "p"])
def test_a_folder_is_read_by_its_name_and_not_by_a_pattern(tmp_path, other):
    by_class(tmp_path / other, range(3))
    rows = load_file(by_class(tmp_path / "p[1]", range(3, 9)))
    assert len(rows) == 6


def test_the_working_directory_is_no_pattern(tmp_path, monkeypatch):
    write_csv(tmp_path / "w1" / "rows.csv", 1)
    write_csv(tmp_path / "w[1]" / "rows.csv", 2)
    monkeypatch.chdir(tmp_path / "w[1]")
    assert load_file("rows.csv")["number"][:] == [2]


def test_a_name_that_datasets_would_take_apart_is_refused(tmp_path):
    with pytest.raises(DataError, match="without '::' and '://', got .*a.csv::b.csv"):
        load_file(write_csv(tmp_path / "a.csv::b.csv", 1))


def test_a_local_data_set_is_read_by_its_name_and_not_by_a_pattern(tmp_path):
    write_csv(tmp_path / "p1" / "train.csv", 1)
    write_csv(tmp_path / "p[1]" / "train.csv", 2)
    assert load_hub(str(tmp_path / "p1"), None, "train")["number"][:] == [1]
    with pytest.raises(DataError, match=r"`dataset_name`.*p\[1\]'. Rename it"):
        load_hub(str(tmp_path / "p[1]"), None, "train")


@pytest.mark.parametrize("split", ["train+train", "train[:50%]+train[25%:75%]"])
@pytest.mark.parametrize("source", ["a file", "the Hub", "of hf-dp plan"])
def test_a_split_that_may_hold_a_row_twice_is_refused(tmp_path, split, source):
    file = write_csv(tmp_path / "train.csv", 1)
    of = {"train_file": file} if source == "a file" else {"dataset_name": str(tmp_path)}
    load = partial(load_train, DataArguments(**of, train_split=split))
    if source == "of hf-dp plan":
        load = partial(rows_of, {"train_file": file, "train_split": split}, None, None)
    with pytest.raises(ConfigError, match="`train_split` to be one split .*half as well"):
        load()


def test_what_evaluates_may_be_joined_and_the_demo_has_no_parts(tmp_path):
    (tmp_path / "rows.csv").write_text("number\n1\n2\n3\n")
    assert load_file(str(tmp_path / "rows.csv"), "train[:1]+train[2:]")["number"][:] == [1, 3]
    for name, value in {"train_split": "train[:9]", "validation_split": ["train[:9]"]}.items():
        with pytest.raises(ConfigError, match=f"`{name}` to be unset with dataset_name='demo'"):
            load_train(DataArguments(dataset_name="demo", **{name: value}))


@pytest.mark.parametrize(
    ("longest", "name"), [((32, 100), "max_target_length"), ((100, 32), "max_length")]
)
def test_a_text_beyond_the_positions_is_blamed_on_its_own_argument(longest, name):
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1,
             "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}  # fmt: skip
    config = BartConfig(vocab_size=20, max_position_embeddings=64, **sizes)
    model = BartForConditionalGeneration(config)
    check_positions(model, 32, 32)
    with pytest.raises(InvalidArgumentError, match=f"`{name}` to be no more tokens .* got 100"):
        check_positions(model, *longest)


def test_a_folder_of_one_class_has_labels(tmp_path):
    rows = load_file(by_class(tmp_path / "a", range(0, 6, 3)))
    assert rows.features["label"].names == ["cat"] and rows["label"][:] == [0, 0]


def folder_with(path: Path, *more: str) -> str:
    """A folder of 9 images by class, and one more file under each of these names."""
    folder = Path(by_class(path / "a", range(9)))
    for name in more:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(png(picture(8)))
    return str(folder)


MORE = ["8.png", "cat/old/8.PNG", "metadata.csv", "cat/metadata.jsonl", "more.zip"]


@pytest.mark.parametrize("extra", MORE)
def test_a_folder_that_is_more_than_images_by_class_is_refused(tmp_path, extra):
    expected = rf"one subfolder for each class, got '{extra}' as well. Remove it \(unpack"
    with pytest.raises(DataError, match=expected):
        load_file(folder_with(tmp_path, extra))


def test_what_is_no_image_or_hidden_in_a_folder_is_left_out(tmp_path):
    others = ("notes.txt", ".DS_Store", ".cache/deep/8.png", "__MACOSX/8.png")
    assert len(load_file(folder_with(tmp_path, *others))) == 9


def test_texts_are_read_from_nested_columns_and_lists(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": {"text": ["one", "two"]}, "b": "three"}\n{"a": {"text": []}, "b": ""}\n')
    assert [*read_texts([str(file)], ["a.text", "b", "c"])] == ["one", "two", "three"]
    with pytest.raises(DataError, match="none of .'c'"):
        list(read_texts([str(file)], ["c"]))


def held_out(folder: Any, **given: Any) -> DataArguments:
    lines = [f"film {i},{i % 2}" for i in range(20)]
    (folder / "rows.csv").write_text("\n".join(["sentence,label", *lines]))
    return DataArguments(train_file=str(folder / "rows.csv"), **given)


def test_a_part_of_one_file_is_held_out(tmp_path):
    data = held_out(tmp_path, train_split="train[10%:]", validation_split=["train[:10%]"])
    (rows,) = load_evaluation(data).values()
    assert rows["sentence"][:] == ["film 0", "film 1"]
    assert load_train(data)["sentence"][:] == [f"film {i}" for i in range(2, 20)]


@pytest.mark.parametrize("train", ["train", "train[1:]", "train[:50%]"])
def test_rows_that_are_trained_on_are_not_held_out(train, tmp_path):
    data = held_out(tmp_path, train_split=train, validation_split=["train[:10%]"])
    said = "that `train_split` leaves out, got .*train_split: train"
    with pytest.raises(ConfigError, match=said):
        load_evaluation(data)


def test_planted_parts_that_are_not_compared_share_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "max", lambda *values: 10**9, raising=False)
    data = held_out(tmp_path, validation_split=["train[:10%]"])
    (rows,) = load_evaluation(data).values()
    assert set(rows["sentence"]) <= set(load_train(data)["sentence"])


def test_a_part_beside_a_file_of_its_own_is_refused(tmp_path):
    data = held_out(tmp_path, validation_split=["train[:10%]"], validation_file=["dev.csv"])
    with pytest.raises(ConfigError, match="`validation_split` to be unset .*To hold out"):
        load_evaluation(data)


def test_two_evaluation_files_of_one_name_are_refused(tmp_path):
    files = [write_csv(tmp_path / name, 1) for name in ("dev.csv", "validation_dev.csv", "b.csv")]
    with pytest.raises(ConfigError, match="different names, got .*without validation_"):
        load_evaluation(DataArguments(train_file="train.csv", validation_file=files))
    found = load_evaluation(DataArguments(train_file="train.csv", validation_file=files[1:]))
    assert [*found] == ["dev", "b"]


def test_what_was_trained_on_joined_parts_is_not_evaluated(tmp_path):
    joined = {"train_split": "train[:5]+train[6:10]", "validation_split": ["train[10:]"]}
    with pytest.raises(ConfigError, match="`train_split` to be one split"):
        load_evaluation(held_out(tmp_path, **joined))


def test_max_train_rows_leaves_out_the_rows_behind_them(tmp_path):
    held = {"validation_split": ["train[15:]"]}
    data = held_out(tmp_path, max_train_rows=15, **held)
    (rows,) = load_evaluation(data).values()
    assert not set(rows["sentence"]) & set(load_train(data)["sentence"])
    with pytest.raises(ConfigError, match="that `train_split` leaves out"):
        load_evaluation(held_out(tmp_path, max_train_rows=16, **held))
    later = {"train_split": "train[5:]", "max_train_rows": 10}
    assert len(load_evaluation(held_out(tmp_path, **later, **held))) == 1
    with pytest.raises(ConfigError, match="that `train_split` leaves out"):
        load_evaluation(held_out(tmp_path, **later, validation_split=["train[14:]"]))


def test_words_of_a_csv_are_themselves_and_only_an_empty_field_is_missing(tmp_path):
    (tmp_path / "a.csv").write_text('text,label,age\nN/A,None,1\nnan,NA,\n,null,3\n"",n/a,4\n')
    rows = load_file(str(tmp_path / "a.csv"))
    assert rows["text"][:] == ["N/A", "nan", None, None]
    assert rows["label"][:] == ["None", "NA", "null", "n/a"]
    assert rows["age"][:] == [1.0, None, 3.0, 4.0]


def test_a_column_that_becomes_text_after_10000_rows_is_named(tmp_path):
    lines = [f"film {i},{i if i < 10_500 else f'A{i}'}" for i in range(10_600)]
    (tmp_path / "a.csv").write_text("\n".join(["sentence,number", *lines]))
    with pytest.raises(DataError, match=r"It is in \['number'\], and only numbers .*save the rows"):
        load_file(str(tmp_path / "a.csv"))
