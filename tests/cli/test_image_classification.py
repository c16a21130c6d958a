"""Image classification from the command line: train, evaluate, the sources of images, adapters,
and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_images
import torch
import transformers as hf
import yaml
from safetensors.torch import load_file
from tiny_images import NAMES, picture, png

from hf_dp.cli.main import main
from hf_dp.cli.tasks.classification import IMAGES

TRAIN, DEV = range(40), range(100, 112)


@pytest.fixture
def task(tmp_path) -> Path:
    """A configuration file, with a model folder and two Parquet files beside it."""
    tiny_images.save(tmp_path / "model", tiny_images.vit())
    tiny_images.rows(TRAIN).to_parquet(tmp_path / "train.parquet")
    tiny_images.rows(DEV).to_parquet(tmp_path / "dev.parquet")
    values = {
        "task": "image_classification", "model_name_or_path": str(tmp_path / "model"),
        "train_file": str(tmp_path / "train.parquet"), "validation_file": str(tmp_path / "dev.parquet"),
        "image_column": "img", "data_name": "tiny pictures", "output_dir": str(tmp_path / "out"), "target_epsilon": 8,
        "expected_batch_size": 8, "max_steps": 2, "learning_rate": "1e-2", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none",
    }  # fmt: skip
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    return config


def changed(task: Path, **values: Any) -> str:
    """Change the configuration file, and return its name; None removes a key."""
    merged = yaml.safe_load(task.read_text()) | values
    task.write_text(yaml.safe_dump({k: v for k, v in merged.items() if v is not None}))
    return str(task)


def run(task: Path, **values: Any) -> int:
    return main(["train", "--config", changed(task, **values)])


@pytest.fixture
def refused(task, capsys) -> Callable[..., str]:
    """Run what is refused, by a command; return what is said."""

    def error(message: str, command: str = "train", *words: str, **values: Any) -> str:
        capsys.readouterr()
        assert main([command, "--config", changed(task, **values), *words]) == 2
        found = capsys.readouterr().err
        assert re.search(message, found), found
        return found

    return error


def trainer(task: Path, **values: Any) -> Any:
    return IMAGES.trainer_of(yaml.safe_load(Path(changed(task, **values)).read_text()), [])


def accuracy(printed: str) -> str:
    return re.search(r"accuracy on the \d+ evaluation rows: [\d.]+", printed)[0]


def test_train_then_evaluate(task, capsys):
    assert run(task) == 0
    printed = capsys.readouterr().out
    out = task.parent / "out"
    assert printed.strip().splitlines()[-1] == str(out)
    assert {"README.md", "privacy.json", "model.safetensors", "preprocessor_config.json"} <= {
        path.name for path in out.iterdir()
    }
    card = (out / "README.md").read_text()
    assert "| Training data | tiny pictures |" in card
    assert "# out: image classification on tiny pictures, epsilon 8.000" in card
    assert str(task.parent) not in card
    config = json.loads((out / "config.json").read_text())
    assert list(config["id2label"].values()) == NAMES
    assert main(["eval", "--config", str(task), "--use_cpu", "True"]) == 0
    assert accuracy(capsys.readouterr().out) == accuracy(printed)
    assert main(["verify", str(out)]) == 0


def test_it_learns(task, capsys):
    """Enough steps and little noise: the classes differ in brightness."""
    little = {"target_epsilon": None, "noise_multiplier": 0.3, "expected_batch_size": 40}
    assert run(task, max_steps=40, **little) == 0
    assert float(accuracy(capsys.readouterr().out).split()[-1]) > 0.6


@pytest.mark.parametrize("model", ["deit", "dinov2", "clip", "siglip"])
def test_other_transformers(task, model):
    tiny_images.save(task.parent / "other", getattr(tiny_images, model)())
    assert run(task, model_name_or_path=str(task.parent / "other"), max_steps=1) == 0


@pytest.mark.parametrize("model", ["vit", "clip", "siglip"])
def test_all_but_the_head_keeps_its_pretrained_weights(task, model):
    base = getattr(tiny_images, model)()
    tiny_images.save(task.parent / "other", base)
    made = trainer(task, model_name_or_path=str(task.parent / "other")).model
    changed_ones = {
        name.split(".")[0]
        for name, parameter in base.named_parameters()
        if parameter.shape != (found := made.get_parameter(name)).shape
        or not torch.equal(parameter, found)
    }
    assert changed_ones == {"classifier"}


def test_of_clip_an_adapter_trains_the_head_alone(task):
    tiny_images.save(task.parent / "other", tiny_images.clip())
    made = trainer(task, model_name_or_path=str(task.parent / "other"), peft=ADAPTERS["lora"]).model
    assert made.peft_config["default"].modules_to_save == ["classifier"]
    whole = [n for n, p in made.named_parameters() if p.requires_grad and "lora" not in n]
    assert whole and all("classifier" in name for name in whole)


def test_a_model_whose_head_is_not_known_is_refused(task, refused):
    """One of transformers' whose parts are all called otherwise."""
    config = hf.PPLCNetConfig(scale=0.1, class_expand=8)
    other = tiny_images.save(task.parent / "other", hf.PPLCNetForImageClassification(config))
    refused("not known which part of PPLCNetForImageClassification", model_name_or_path=other)


@pytest.mark.parametrize("model", ["clip", "vit"])
def test_a_model_of_grey_images_is_refused(task, model, refused):
    grey = tiny_images.save(task.parent / "grey", getattr(tiny_images, model)(num_channels=1))
    refused("num_channels 1", model_name_or_path=grey)


ADAPTERS = {
    "lora": {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "fc1"]},
    "frost": {"peft_type": "frost", "selection_sample_rate": 0.2},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_under_an_adapter_the_new_head_trains_and_is_saved_and_loads(task, name, capsys):
    config = changed(task, peft=ADAPTERS[name], accountant="rdp")
    fresh = trainer(task).model.state_dict()
    start = next(v for k, v in fresh.items() if "classifier" in k and k.endswith(".weight"))
    assert start.shape[0] == 3  # the base has two classes
    assert main(["train", "--config", config]) == 0
    trained = accuracy(capsys.readouterr().out)
    saved = load_file(task.parent / "out" / "adapter_model.safetensors")
    (head,) = (v for k, v in saved.items() if "classifier" in k and k.endswith(".weight"))
    assert (head - start).abs().max() > 1e-3
    assert main(["eval", "--config", config, "--use_cpu", "True"]) == 0
    assert accuracy(capsys.readouterr().out) == trained
    # As the card says.
    *_, program = re.findall(
        r"```python\n(.*?)```", (task.parent / "out/README.md").read_text(), flags=re.S
    )
    program = program.replace("path/to/this/folder", str(task.parent / "out"))
    base = rf"\1'{task.parent / 'model'}'"  # which has only a name on the card
    program = re.sub(r"(ViTForImageClassification.from_pretrained\()'[^']*'", base, program)
    space: dict[str, Any] = {}
    exec(program, space)
    answers = [space["model"](picture(i))[0] for i in DEV]
    assert {answer["label"] for answer in answers} <= set(NAMES)
    right = sum(answer["label"] == NAMES[i % 3] for i, answer in zip(DEV, answers))
    assert f"{right / len(DEV):.4f}" == trained.split()[-1]


def test_the_head_of_an_image_classifier_is_no_candidate_of_a_selection(task):
    made = trainer(task, peft={"peft_type": "random", "unfreeze_ratio": 1.0})
    config = made.model.peft_config["default"]
    assert config.modules_to_save == ["classifier"]
    assert config.parameters and not any("classifier" in name for name in config.parameters)


def head_of(model: Any) -> torch.Tensor:
    return model.classifier.weight.detach().clone()


def test_a_head_is_kept_only_where_the_classes_are_the_same(task):
    classes = dict(enumerate(NAMES))
    base = tiny_images.vit(id2label=classes, label2id={name: i for i, name in classes.items()})
    tiny_images.save(task.parent / "base", base)
    known = {"model_name_or_path": str(task.parent / "base")}
    assert torch.equal(head_of(trainer(task, **known).model), head_of(base))
    for other in ({"new_head": True}, {"new_head": None, "class_names": ["dog", "cat", "owl"]}):
        model = trainer(task, **known, **other).model
        assert not torch.equal(head_of(model), head_of(base))
        name = "vit.layers.0.mlp.fc1.weight"
        assert torch.equal(model.get_parameter(name), base.get_parameter(name))
    again = trainer(task, **known, new_head=True, class_names=None).model
    assert torch.equal(head_of(again), head_of(trainer(task).model))  # `seed` makes it


def test_from_scratch(task, refused):
    assert run(task, from_scratch=True) == 0
    assert str(task.parent) not in (task.parent / "out" / "README.md").read_text()
    refused("`from_scratch` does not go with `peft`", peft=ADAPTERS["lora"])


# -- classes that a file declares in another order ---


def reorder(file: Path, names: list[str]) -> None:
    """Write a file's rows again, with the same classes numbered in another order."""
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train")
    labels = [names.index(NAMES[label]) for label in rows["label"]]
    rows = rows.remove_columns("label").add_column("label", labels)
    rows.cast_column("label", datasets.ClassLabel(names=names)).to_parquet(file)


def test_validation_and_given_names_are_matched_by_name(task):
    expected = [row["labels"] for row in trainer(task).eval_dataset]
    reorder(task.parent / "dev.parquet", ["owl", "dog", "cat"])
    assert [row["labels"] for row in trainer(task).eval_dataset] == expected
    train = trainer(task, class_names=["dog", "owl", "cat"]).train_dataset
    assert [row["labels"] for row in train] == [[2, 0, 1][i % 3] for i in TRAIN]


@pytest.mark.parametrize("peft", [None, ADAPTERS["lora"]], ids=["whole", "adapter"])
def test_a_classifier_is_evaluated_by_the_classes_of_its_training(task, peft, capsys, refused):
    assert run(task, peft=peft) == 0
    trained = accuracy(capsys.readouterr().out)
    reorder(task.parent / "dev.parquet", ["owl", "dog", "cat"])
    refused(r"has the classes \['cat', 'dog', 'owl'\], and the data \['owl'", "eval")
    if peft is not None:  # one that does not say its classes
        tiny_images.processor().save_pretrained(task.parent / "out")
        refused("'out' does not say which classes it was trained with", "eval")
    assert main(["eval", "--config", changed(task, class_names=NAMES)]) == 0
    assert accuracy(capsys.readouterr().out) == trained


# -- where images come from ---


def write_folder(folder: Path, numbers: range, names: list[str] = NAMES) -> str:
    for i in numbers:
        path = folder / names[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(picture(i)))
    return str(folder)


def write_paths(task: Path, name: str, numbers: range) -> str:
    folder = Path(write_folder(task.parent / f"{name} files", numbers))
    lines = [
        {"img": str(folder / NAMES[i % 3] / f"{i}.png"), "label": NAMES[i % 3]} for i in numbers
    ]
    file = task.parent / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def pixels_and_labels(rows: Any) -> list[tuple[torch.Tensor, int]]:
    return [(row["pixel_values"], int(row["labels"])) for row in rows]


def test_images_from_folders_and_paths_are_those_of_a_parquet_file(task):
    expected = sorted(
        pixels_and_labels(trainer(task).train_dataset), key=lambda row: row[0].tolist()
    )
    paths = {name: write_paths(task, name, numbers) for name, numbers in (("t", TRAIN), ("d", DEV))}
    of_paths = trainer(task, train_file=paths["t"], validation_file=paths["d"], class_names=NAMES)
    folders = [
        write_folder(task.parent / name, numbers) for name, numbers in (("a", TRAIN), ("b", DEV))
    ]
    of_folders = trainer(
        task, train_file=folders[0], validation_file=folders[1], image_column="image"
    )
    for made in (of_paths, of_folders):
        found = sorted(pixels_and_labels(made.train_dataset), key=lambda row: row[0].tolist())
        for (pixels, label), (same, equal) in zip(found, expected, strict=True):
            assert torch.equal(pixels, same) and label == equal


def test_the_classes_of_a_folder_are_named_and_not_read_off_it(task, refused):
    """Another order of names, and an evaluation folder that lacks a class, which shifts the
    numbers that datasets gives."""
    train = write_folder(task.parent / "a", TRAIN)
    lacks = write_folder(task.parent / "b", range(100, 102))  # a dog and an owl
    named = {"train_file": train, "validation_file": lacks, "image_column": "image"}
    refused("declares no class names", **named)
    made = trainer(task, class_names=["owl", "dog", "cat"])
    assert sorted(row["labels"] for row in made.eval_dataset) == [0, 1]
    by_label = {row["labels"]: row["pixel_values"].mean() for row in made.train_dataset}
    assert by_label[2] < by_label[1] < by_label[0]  # cats are dark, owls are bright
    refused("`class_names`", class_names=["cat", "dog"])


def test_a_class_called_as_a_split_is_one(task):
    names = ["test", "train", "validation"]
    train = write_folder(task.parent / "a", TRAIN, names)
    dev = write_folder(task.parent / "b", DEV, names)
    made = trainer(
        task, train_file=train, validation_file=dev, image_column="image", class_names=names
    )
    assert (len(made.train_dataset), len(made.eval_dataset)) == (len(TRAIN), len(DEV))


def test_a_part_of_a_file(task, capsys):
    config = changed(task, train_split="train[30:]")
    assert main(["train", "--config", config]) == 0
    record = json.loads((task.parent / "out" / "privacy.json").read_text())
    assert (record["plan"]["num_examples"], record["plan"]["delta"]) == (10, 1 / 20)
    made = trainer(task, output_dir=str(task.parent / "other"))
    whole = trainer(task, train_split=None)
    for one, other in zip(made.train_dataset, list(whole.train_dataset)[30:], strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    capsys.readouterr()
    assert main(["plan", "--config", changed(task, train_split="train[30:]")]) == 0
    assert "10 " in capsys.readouterr().out


def test_several_evaluation_sets_and_users(task, capsys):
    rows = tiny_images.rows(TRAIN).add_column("patient", [i % 20 for i in TRAIN])
    rows.to_parquet(task.parent / "train.parquet")
    tiny_images.rows(range(200, 206)).to_parquet(task.parent / "validation_night.parquet")
    files = [str(task.parent / name) for name in ("dev.parquet", "validation_night.parquet")]
    users = {"privacy_unit": "user", "privacy_unit_column": "patient", "max_rows_per_unit": 2}
    assert run(task, validation_file=files, **users) == 0
    printed = capsys.readouterr().out
    assert "accuracy on the 6 night evaluation rows" in printed
    plan = json.loads((task.parent / "out" / "privacy.json").read_text())["plan"]
    assert plan["num_examples"] == 20


def test_what_is_trained_without_privacy_names_its_data(task):
    out, private = str(task.parent / "public"), str(task.parent / "out")
    assert run(task, **PUBLIC, output_dir=out) == 0
    config = json.loads(Path(out, "config.json").read_text())
    assert config["pretraining_sources"] == ["tiny pictures"]
    budget = {"privacy_mode": None, "target_epsilon": 8, "expected_batch_size": 8}
    base = {"model_name_or_path": out, "other_training": "public_rows"}
    assert run(task, **budget, **base, output_dir=private) == 0
    assert "pretrained on tiny pictures" in Path(private, "README.md").read_text()


# -- evaluation images that are training images ---


@pytest.mark.parametrize("source", ["the same file", "files in a folder"])
def test_evaluation_images_that_are_training_images_are_refused(task, source, refused):
    train = {
        "train_file": write_folder(task.parent / "a", TRAIN),
        "image_column": "image",
        "class_names": NAMES,
    }
    dev = str(task.parent / "train.parquet")
    if source == "the same file":
        train = {"train_split": "train[:20]"}
    else:  # other columns of both are called the same
        rows = datasets.load_dataset("parquet", data_files=dev, split="train")
        rows.rename_column("img", "image").to_parquet(dev)
    refused("holds rows equal to training rows", **train, validation_file=dev)


def test_another_label_does_not_hide_an_image(task, refused):
    """Labels are left out of the comparison, whatever their column is called."""
    other = tiny_images.rows(TRAIN).rename_column("label", "fine")
    relabeled = [(i + 1) % 3 for i in TRAIN]
    other.to_parquet(task.parent / "train.parquet")
    other.remove_columns("fine").add_column("fine", relabeled).to_parquet(
        task.parent / "dev.parquet"
    )
    refused("holds rows equal to training rows", label_column="fine", class_names=NAMES)


# -- bad input ---


def stored(numbers: range, contents: dict[int, bytes], **columns: Any) -> datasets.Dataset:
    """Rows as a Parquet file holds them, some with other bytes in the place of their image."""
    images = [{"bytes": contents.get(i, png(picture(i))), "path": None} for i in numbers]
    rows = datasets.Dataset.from_dict(
        {"img": images, "label": [i % 3 for i in numbers], **columns}
    ).cast_column("label", datasets.ClassLabel(names=NAMES))
    return rows.cast_column("img", datasets.Image(decode=False))


CHANGED_KEYS = {
    "a column that is not there": ({"image_column": "photo"}, r"`image_column` names \['photo'\], but the data has the columns \['img', 'label'\]"),
    "a column that holds no images": ({"image_column": "label"}, r"Expected `image_column` to hold images.*'label' holds ClassLabel.*the data has .'img', 'label'"),
    "fewer classes than ids": ({"class_names": ["cat", "dog"]}, "value outside the classes"),
    "an unknown augmentation": ({"augmentation": ["rotate"]}, "`augmentation` to be one of .'crop', 'flip'., got 'rotate'"),
    "the demonstration rows": ({"dataset_name": "demo", "train_file": None, "validation_file": None, "data_name": None}, "hf_dp has no images"),
    "a split that is not there": ({"train_split": "training[5:]"}, r"'train.parquet' \(its split 'training\[5:\]'\) could not be read.*Unknown split"),
    "no rows left": ({"train_split": "train[40:]"}, "no data"),
    "a split of an evaluation file": ({"validation_split": ["test[5:]"]}, r"`validation_split` to be unset without `dataset_name`, got .*Remove it"),
    "an evaluation part that trains": ({"validation_split": ["train[:10%]"], "validation_file": []}, "rows that `train_split` leaves out, got 'train"),
    "a configuration of a file": ({"dataset_config": "plain"}, "`dataset_config` to be unset without `dataset_name`, got 'plain'"),
    "an unknown model": ({"model_name_or_path": "no/such"}, "image classifier 'no/such' could not be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED_KEYS)
def test_bad_keys_are_one_line_and_nothing_is_written(task, case, refused):
    change, message = CHANGED_KEYS[case]
    assert "Traceback" not in refused(message, **change) and not (task.parent / "out").exists()


PUBLIC = {"privacy_mode": "non_private", "target_epsilon": None, "expected_batch_size": None}


@pytest.mark.parametrize("mode", [{}, PUBLIC], ids=["private", "not private"])
def test_an_image_that_cannot_be_read_is_named_before_anything_is_spent(task, mode, refused):
    """What cannot be: tests/tasks/test_images.py."""
    stored(TRAIN, {7: png(picture(7))[:60]}).to_parquet(task.parent / "train.parquet")
    why = "OSError|SyntaxError|UnidentifiedImageError"
    refused(f"Row 7 of the training set.* cannot be read.*({why})", **mode)
    assert not (task.parent / "out" / "ledger.jsonl").exists()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_evaluation_image_that_cannot_be_read_is_named_before_training(task, command, refused):
    if command == "eval":
        assert run(task) == 0
    stored(DEV, {105: b"a text"}).to_parquet(task.parent / "dev.parquet")
    before = sorted(task.parent.glob("out/*"))
    where = "Row 5 of the evaluation set 'dev', image_column 'img'"
    refused(f"{where}, cannot be read .Unid", command)
    assert sorted(task.parent.glob("out/*")) == before


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("image", "`privacy_unit_column` to be another name than 'image'"),
        ("label", "`privacy_unit_column` to be another column than the label"),
    ],
)
def test_users_in_a_column_that_the_rows_need_are_refused(task, column, message, refused):
    for name, numbers in (("train", TRAIN), ("dev", DEV)):
        rows = tiny_images.rows(numbers).rename_column("label", "fine")
        rows = rows.add_column(column, [i % 20 for i in numbers])
        rows.to_parquet(task.parent / f"{name}.parquet")
    users = {"privacy_unit": "user", "privacy_unit_column": column, "max_rows_per_unit": 2}
    refused(message, label_column="fine", **users)


def test_another_column_called_image_does_not_matter(task):
    for name, numbers in (("train", TRAIN), ("dev", DEV)):
        rows = tiny_images.rows(numbers).add_column("image", [f"{i}" for i in numbers])
        rows.to_parquet(task.parent / f"{name}.parquet")
    assert set(trainer(task).train_dataset[0]) == {"pixel_values", "labels"}


@pytest.mark.parametrize(
    ("where", "message"), [("train", "images: resize them"), ("dev", "do_resize: true")]
)
def test_images_of_unequal_size_are_resized_or_refused(task, where, message, refused):
    numbers = {"train": TRAIN, "dev": DEV}[where]
    odd = {numbers[3]: png(picture(numbers[3], size=(12, 10)))}
    stored(numbers, odd).to_parquet(task.parent / f"{where}.parquet")
    assert trainer(task).train_dataset[3]["pixel_values"].shape == (3, 8, 8)
    tiny_images.processor(do_resize=False).save_pretrained(task.parent / "model")
    refused(message)
    assert not (task.parent / "out" / "ledger.jsonl").exists()


def test_a_processor_that_does_not_fit_the_model(task, refused):
    tiny_images.processor(size={"height": 12, "width": 12}).save_pretrained(task.parent / "model")
    refused("makes images of 3 x 12 x 12, on which the model fails.*`size`")
    (task.parent / "model" / "preprocessor_config.json").unlink()
    refused("preprocessor_config.json")


def test_without_pillow(refused, monkeypatch):
    monkeypatch.setattr("hf_dp.tasks.models.importlib.util.find_spec", lambda name: None)
    refused(r"pip install 'hf-dp\[images\]'")


def test_evaluation_needs_a_trained_model_of_the_same_classes(task, refused):
    refused("--zero-shot", "eval", "--zero-shot")
    refused("Train it first", "eval")
    assert run(task) == 0
    refused(r"has the classes \['cat', 'dog', 'owl'\]", "eval", class_names=["dog", "cat", "owl"])
