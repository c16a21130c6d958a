"""Image classification from the command line: train, evaluate, the sources of images, adapters,
and what is refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_images
import torch
import transformers as hf
from recipe import Recipe
from safetensors.torch import load_file
from tiny_images import NAMES, by_class, picture, png

from hf_dp.cli.main import main
from hf_dp.cli.tasks.classification import IMAGES

TRAIN, DEV = range(40), range(100, 112)
CLASSES = {
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: i for i, name in enumerate(NAMES)},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a model, and rows to train on and to evaluate."""
    folder = tmp_path_factory.mktemp("files")
    tiny_images.save(folder / "model", tiny_images.vit())
    tiny_images.rows(TRAIN).to_parquet(folder / "train.parquet")
    tiny_images.rows(DEV).to_parquet(folder / "dev.parquet")
    return folder


@pytest.fixture
def task(files, tmp_path, capsys) -> Recipe:
    """A recipe, with these files in the same folder."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return Recipe(
        tmp_path, capsys, task="image_classification", model_name_or_path=str(tmp_path / "model"),
        train_file=str(tmp_path / "train.parquet"), validation_file=str(tmp_path / "dev.parquet"),
        image_column="img", data_name="tiny pictures", target_epsilon=8, accountant="rdp",
        expected_batch_size=8, max_steps=2, learning_rate="1e-2",
    )  # fmt: skip


def trainer(task: Recipe, **values: Any) -> Any:
    task.change(**values)
    return IMAGES.trainer_of(task.values, [])


def other(task: Recipe, model: Any) -> dict[str, str]:
    """Another base than the recipe's."""
    return {"model_name_or_path": tiny_images.save(task.folder / "other", model)}


def accuracy(printed: str) -> str:
    return re.search(r"accuracy on the \d+ evaluation rows: [\d.]+", printed)[0]


def test_train_then_evaluate(task):
    task.refused("Train it first", "eval")
    task.refused("--zero-shot", "eval", "--zero-shot")
    printed = task.run()
    assert printed.strip().splitlines()[-1] == str(task.out)
    files = {path.name for path in task.out.iterdir()}
    assert {"README.md", "privacy.json", "model.safetensors", "preprocessor_config.json"} <= files
    card = (task.out / "README.md").read_text()
    assert "| Training data | tiny pictures |" in card
    assert "# Image classification on tiny pictures, trained with differential privacy" in card
    assert str(task.folder) not in card
    assert list(task.saved("config.json")["id2label"].values()) == NAMES
    assert accuracy(task.run("eval", "--use_cpu", "True")) == accuracy(printed)
    assert main(["verify", str(task.out)]) == 0


def test_it_learns(task):
    """Enough steps and little noise: the classes differ in brightness."""
    little = {"target_epsilon": None, "noise_multiplier": 0.3, "expected_batch_size": 40}
    made = trainer(task, max_steps=16, learning_rate="3e-2", **little)
    made.train()
    assert made.evaluate()["eval_accuracy"] > 0.6


@pytest.mark.parametrize("model", ["vit", "deit", "dinov2", "clip", "siglip"])
def test_all_but_the_head_keeps_its_pretrained_weights_and_it_trains(task, model):
    base = getattr(tiny_images, model)()
    made = trainer(task, **other(task, base), max_steps=1)
    changed = {
        name.split(".")[0]
        for name, parameter in base.named_parameters()
        if parameter.shape != (found := made.model.get_parameter(name)).shape
        or not torch.equal(parameter, found)
    }
    assert changed == {"classifier"}
    if model != "vit":  # which trains elsewhere here
        made.train()
        assert made.evaluate()["eval_accuracy"] >= 0 and made.epsilon().value > 0


def test_of_clip_an_adapter_trains_the_head_alone(task):
    made = trainer(task, **other(task, tiny_images.clip()), peft=ADAPTERS["lora"]).model
    assert made.peft_config["default"].modules_to_save == ["classifier"]
    whole = [n for n, p in made.named_parameters() if p.requires_grad and "lora" not in n]
    assert whole and all("classifier" in name for name in whole)


def test_models_that_are_refused(task):
    """One of transformers' whose parts are all called otherwise, and those of grey images."""
    config = hf.PPLCNetConfig(scale=0.1, class_expand=8)
    named = other(task, hf.PPLCNetForImageClassification(config))
    task.refused("not known which part of PPLCNetForImageClassification", **named)
    for model in ("clip", "vit"):
        grey = other(task, getattr(tiny_images, model)(num_channels=1))
        task.refused("num_channels 1", **grey)


ADAPTERS = {
    "lora": {"peft_type": "lora", "r": 2, "target_modules": ["q_proj", "fc1"]},
    "frost": {
        "peft_type": "frost",
        "selection_sample_rate": 0.2,
        "selection_noise_multiplier": 1.0,
    },
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_under_an_adapter_the_new_head_trains_and_is_saved_and_loads(task, name):
    fresh = trainer(task).model.state_dict()
    start = next(v for k, v in fresh.items() if "classifier" in k and k.endswith(".weight"))
    assert start.shape[0] == 3  # the base has two classes
    given = {"target_epsilon": None, "noise_multiplier": 1.0}  # nothing is searched for
    trained = accuracy(task.run(peft=ADAPTERS[name], **given))
    saved = load_file(task.out / "adapter_model.safetensors")
    (head,) = (v for k, v in saved.items() if "classifier" in k and k.endswith(".weight"))
    assert (head - start).abs().max() > 1e-3
    assert accuracy(task.run("eval", "--use_cpu", "True")) == trained
    # As the card says.
    card = (task.out / "README.md").read_text()
    *_, program = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    program = program.replace("path/to/this/folder", str(task.out))
    base = rf"\1'{task.folder / 'model'}'"  # which has only a name on the card
    program = re.sub(r"(ViTForImageClassification.from_pretrained\()'[^']*'", base, program)
    space: dict[str, Any] = {}
    exec(program, space)
    answers = [space["model"](picture(i))[0] for i in DEV]
    assert {answer["label"] for answer in answers} <= set(NAMES)
    right = sum(answer["label"] == NAMES[i % 3] for i, answer in zip(DEV, answers))
    assert f"{right / len(DEV):.4f}" == trained.split()[-1]


def head_of(model: Any) -> torch.Tensor:
    return model.classifier.weight.detach().clone()


def test_a_head_is_kept_only_where_the_classes_are_the_same(task):
    base = tiny_images.vit(**CLASSES)
    task.change(**other(task, base))
    assert torch.equal(head_of(trainer(task).model), head_of(base))
    for change in ({"new_head": True}, {"new_head": None, "class_names": ["dog", "cat", "owl"]}):
        model = trainer(task, **change).model
        assert not torch.equal(head_of(model), head_of(base))
        name = "vit.layers.0.mlp.fc1.weight"
        assert torch.equal(model.get_parameter(name), base.get_parameter(name))
    again = [head_of(trainer(task, new_head=True, class_names=None).model) for _ in range(2)]
    assert torch.equal(*again)  # `seed` makes it


def test_from_scratch(task):
    model = trainer(task, from_scratch=True).model
    assert model.config.name_or_path == ""  # which would stand on the card
    task.refused("`from_scratch` cannot be combined with `peft`", peft=ADAPTERS["lora"])


# -- classes that a file declares in another order ---


def reorder(file: Path, names: list[str]) -> None:
    """Write a file's rows again, with the same classes numbered in another order."""
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train")
    labels = [names.index(NAMES[label]) for label in rows["label"]]
    rows = rows.remove_columns("label").add_column("label", labels)
    rows.cast_column("label", datasets.ClassLabel(names=names)).to_parquet(file)


def test_validation_and_given_names_are_matched_by_name(task):
    expected = [row["labels"] for row in trainer(task).eval_dataset]
    reorder(task.folder / "dev.parquet", ["owl", "dog", "cat"])
    assert [row["labels"] for row in trainer(task).eval_dataset] == expected
    train = trainer(task, class_names=["dog", "owl", "cat"]).train_dataset
    assert [row["labels"] for row in train] == [[2, 0, 1][i % 3] for i in TRAIN]


@pytest.mark.parametrize("peft", [None, ADAPTERS["lora"]], ids=["whole", "adapter"])
def test_a_classifier_is_evaluated_by_the_classes_of_its_training(task, peft):
    trained = accuracy(task.run(peft=peft))
    message = r"has the classes \['cat', 'dog', 'owl'\], and the data \['owl'"
    task.refused(message, "eval", class_names=["owl", "dog", "cat"])
    reorder(task.folder / "dev.parquet", ["owl", "dog", "cat"])
    task.refused(message, "eval", class_names=None)
    if peft is not None:  # one that does not say its classes
        tiny_images.processor().save_pretrained(task.out)
        task.refused("'out' does not say which classes it was trained with", "eval")
    assert accuracy(task.run("eval", class_names=NAMES)) == trained


# -- where images come from ---


def write_paths(task: Recipe, name: str, numbers: range) -> str:
    folder = Path(by_class(task.folder / f"{name} files", numbers))
    labels = {i: NAMES[i % 3] for i in numbers}
    rows = [{"img": str(folder / one / f"{i}.png"), "label": one} for i, one in labels.items()]
    return task.lines(f"{name}.jsonl", rows)


def pixels_and_labels(rows: Any) -> list[tuple[torch.Tensor, int]]:
    found = [(row["pixel_values"], int(row["labels"])) for row in rows]
    return sorted(found, key=lambda row: row[0].tolist())


def test_images_from_folders_and_paths_are_those_of_a_parquet_file(task):
    expected = pixels_and_labels(trainer(task).train_dataset)
    paths = {name: write_paths(task, name, numbers) for name, numbers in (("t", TRAIN), ("d", DEV))}
    of_paths = trainer(task, train_file=paths["t"], validation_file=paths["d"], class_names=NAMES)
    train, dev = by_class(task.folder / "a", TRAIN), by_class(task.folder / "b", DEV)
    of_folders = trainer(task, train_file=train, validation_file=dev, image_column="image")
    for made in (of_paths, of_folders):
        found = pixels_and_labels(made.train_dataset)
        for (pixels, label), (same, equal) in zip(found, expected, strict=True):
            assert torch.equal(pixels, same) and label == equal


def test_the_classes_of_a_folder_are_named_and_not_read_off_it(task):
    """Another order of names, and an evaluation folder that lacks a class, which shifts the
    numbers that datasets gives."""
    train = by_class(task.folder / "a", TRAIN)
    lacks = by_class(task.folder / "b", range(100, 102))  # a dog and an owl
    task.change(train_file=train, validation_file=lacks, image_column="image")
    task.refused("declares no class names")
    made = trainer(task, class_names=["owl", "dog", "cat"])
    assert sorted(row["labels"] for row in made.eval_dataset) == [0, 1]
    by_label = {row["labels"]: row["pixel_values"].mean() for row in made.train_dataset}
    assert by_label[2] < by_label[1] < by_label[0]  # cats are dark, owls are bright
    task.refused("`class_names`", class_names=["cat", "dog"])


def test_a_class_called_as_a_split_is_one(task):
    names = ["test", "train", "validation"]
    train, dev = (by_class(task.folder / n, rows, names) for n, rows in (("a", TRAIN), ("b", DEV)))
    files = {"train_file": train, "validation_file": dev}
    made = trainer(task, **files, image_column="image", class_names=names)
    assert (len(made.train_dataset), len(made.eval_dataset)) == (len(TRAIN), len(DEV))


def test_a_part_of_a_file(task):
    whole = list(trainer(task).train_dataset)
    made = trainer(task, train_split="train[30:]")
    assert (made.privacy_plan.num_examples, made.privacy_plan.delta) == (10, 1 / 20)
    for one, same in zip(made.train_dataset, whole[30:], strict=True):
        assert torch.equal(one["pixel_values"], same["pixel_values"])
    assert "10 " in task.run("plan")


def test_several_evaluation_sets_and_users(task):
    rows = tiny_images.rows(TRAIN).add_column("patient", [i % 20 for i in TRAIN])
    rows.to_parquet(task.folder / "train.parquet")
    tiny_images.rows(range(200, 206)).to_parquet(task.folder / "validation_night.parquet")
    files = [str(task.folder / name) for name in ("dev.parquet", "validation_night.parquet")]
    users = {"privacy_unit": "user", "privacy_unit_column": "patient", "max_rows_per_unit": 2}
    printed = task.run(validation_file=files, **users)
    assert "accuracy on the 6 night evaluation rows" in printed
    assert task.saved()["plan"]["num_examples"] == 20


def test_what_is_trained_without_privacy_names_its_data(task):
    out = str(task.folder / "public")
    task.run(**PUBLIC, output_dir=out)
    config = json.loads(Path(out, "config.json").read_text())
    assert config["pretraining_sources"] == ["tiny pictures"]
    budget = {"privacy_mode": None, "noise_multiplier": 1.0, "expected_batch_size": 8}
    base = {"model_name_or_path": out, "other_training": "public_rows"}
    task.run(**budget, **base, output_dir=str(task.out))
    assert "pretrained on tiny pictures" in (task.out / "README.md").read_text()


def test_another_label_does_not_hide_an_image_that_is_trained_on(task):
    """Labels are left out of the comparison, whatever their column is called."""
    rows = tiny_images.rows(TRAIN).rename_column("label", "fine")
    relabeled = [(i + 1) % 3 for i in TRAIN]
    rows.to_parquet(task.folder / "train.parquet")
    others = rows.remove_columns("fine").add_column("fine", relabeled)
    others.to_parquet(task.folder / "dev.parquet")
    message = "holds rows equal to training rows"
    task.refused(message, label_column="fine", class_names=NAMES)


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
    "a split of an evaluation file": ({"validation_split": ["test[5:]"]}, r"`validation_split` to be unset with `validation_file`, got .*Remove it"),
    "an evaluation part that trains": ({"validation_split": ["train[:10%]"], "validation_file": []}, "rows that `train_split` leaves out, got 'train"),
    "a configuration of a file": ({"dataset_config": "plain"}, "`dataset_config` to be unset without `dataset_name`, got 'plain'"),
    "an unknown model": ({"model_name_or_path": "no/such"}, "image classifier 'no/such' could not be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED_KEYS)
def test_bad_keys_are_one_line_and_nothing_is_written(task, case):
    change, message = CHANGED_KEYS[case]
    assert "Traceback" not in task.refused(message, **change) and not task.out.exists()


PUBLIC = {
    "privacy_mode": "non_private",
    **dict.fromkeys(("target_epsilon", "expected_batch_size", "accountant")),
}


@pytest.mark.parametrize("mode", [{}, PUBLIC], ids=["private", "not private"])
def test_an_image_that_cannot_be_read_is_named_before_anything_is_spent(task, mode):
    """What cannot be: tests/tasks/test_images.py."""
    stored(TRAIN, {7: png(picture(7))[:60]}).to_parquet(task.folder / "train.parquet")
    why = "OSError|SyntaxError|UnidentifiedImageError"
    task.refused(f"Row 7 of the training set.* cannot be read.*({why})", **mode)
    assert not (task.out / "ledger.jsonl").exists()


def test_an_evaluation_image_that_cannot_be_read_is_named_before_training(task):
    stored(DEV, {105: b"a text"}).to_parquet(task.folder / "dev.parquet")
    message = "Row 5 of the evaluation set 'dev', image_column 'img', cannot be read .Unid"
    task.refused(message)
    assert not task.out.exists()
    trained = other(task, tiny_images.vit(**CLASSES))["model_name_or_path"]
    task.refused(message, "eval", "--trained", trained)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("image", "`privacy_unit_column` to be another name than 'image'"),
        ("label", "`privacy_unit_column` to be a column other than the label"),
    ],
)
def test_users_in_a_column_that_the_rows_need_are_refused(task, column, message):
    for name, numbers in (("train", TRAIN), ("dev", DEV)):
        rows = tiny_images.rows(numbers).rename_column("label", "fine")
        rows = rows.add_column(column, [i % 20 for i in numbers])
        rows.to_parquet(task.folder / f"{name}.parquet")
    users = {"privacy_unit": "user", "privacy_unit_column": column, "max_rows_per_unit": 2}
    task.refused(message, label_column="fine", **users)


def test_another_column_called_image_does_not_matter(task):
    for name, numbers in (("train", TRAIN), ("dev", DEV)):
        rows = tiny_images.rows(numbers).add_column("image", [f"{i}" for i in numbers])
        rows.to_parquet(task.folder / f"{name}.parquet")
    assert set(trainer(task).train_dataset[0]) == {"pixel_values", "labels"}


def test_images_of_unequal_size_are_resized_or_refused(task):
    """Of training rows the trainer says it: tests/trainer/test_images.py."""
    odd = {DEV[3]: png(picture(DEV[3], size=(12, 10)))}
    stored(DEV, odd).to_parquet(task.folder / "dev.parquet")
    assert trainer(task).eval_dataset[3]["pixel_values"].shape == (3, 8, 8)
    tiny_images.processor(do_resize=False).save_pretrained(task.folder / "model")
    task.refused("do_resize: true")
    assert not (task.out / "ledger.jsonl").exists()


def test_a_processor_that_does_not_fit_the_model(task):
    larger = tiny_images.processor(size={"height": 12, "width": 12})
    larger.save_pretrained(task.folder / "model")
    task.refused("makes images of 3 x 12 x 12, on which the model fails.*`size`")
    (task.folder / "model" / "preprocessor_config.json").unlink()
    task.refused("preprocessor_config.json")


def test_without_pillow(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    task.refused(r"pip install 'hf-dp\[images\]'")
