"""Images in ``DPTrainer``: a transform makes pixels of them, and what it must not leave out."""

from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import tiny
import tiny_images
import torch
from peft import LoraConfig
from tiny_images import NAMES, picture
from transformers import VideoMAEConfig, VideoMAEForVideoClassification, default_data_collator

from hf_dp.errors import DataError, SelfCheckError, UnsupportedLossError
from hf_dp.run import training_data
from hf_dp.tasks.images import ToPixels, image_rows
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.frost.tuner import FrostConfig

Batch = dict[str, list[Any]]


def pixels(batch: Batch) -> list[torch.Tensor]:
    return [ToPixels(tiny_images.processor(do_resize=False)).pixels(each) for each in batch["img"]]


def trainer(
    folder: Any, train: Any = None, model: Any = None, peft: Any = None, **options: Any
) -> DPTrainer:
    if train is None:
        pixels = ToPixels(tiny_images.processor())
        train = image_rows(tiny_images.rows(range(12)), "img", "label", NAMES, pixels)
    given = {
        "model": model or tiny_images.vit(num_labels=3), "train_dataset": train, "eval_dataset": None,
        "data_collator": default_data_collator, "peft_config": peft,
    }  # fmt: skip
    options = {"remove_unused_columns": False, "max_steps": 1, **options}
    return tiny.trainer(folder, given=given, **options)


def rows(transform: Callable[[Batch], Any] | None) -> datasets.Dataset:
    plain = tiny_images.rows(range(12))
    return plain if transform is None else plain.with_transform(transform)


def odd(batch: Batch) -> Any:
    """One image of another size."""
    images = [
        picture(1, size=(8, 9)) if label == 2 else image
        for image, label in zip(batch["img"], batch["label"])
    ]
    return {"pixel_values": pixels({"img": images}), "labels": batch["label"]}


def in_words(batch: Batch) -> Any:
    return {"pixel_values": pixels(batch), "labels": [NAMES[each] for each in batch["label"]]}


def with_its_image(batch: Batch) -> Any:
    """The batch with pixels added, as many tutorials write a transform."""
    return {**batch, "pixel_values": pixels(batch)}


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other keys": (
        lambda batch: {"pixels": pixels(batch), "labels": batch["label"]}, {},
        r"no `pixel_values` .they have \['labels', 'pixels'\].*remove_unused_columns=False",
    ),
    "other keys in some rows": (
        lambda batch: {"pixels" if batch["label"] == [2] else "pixel_values": pixels(batch), "labels": batch["label"]}, {},
        r"Row 2 .* other columns than the first row: it lacks \['pixel_values'\] and it adds \['pixels'\]",
    ),
    "no labels": (lambda batch: {"pixel_values": pixels(batch)}, {}, "no `labels`"),
    "columns removed before the transform": (
        lambda batch: {"pixel_values": pixels(batch), "labels": batch["label"]}, {"remove_unused_columns": True},
        "KeyError: 'img'.*set remove_unused_columns=False",
    ),
    "no transform": (None, {}, r"images in \['img'\].*dataset.with_transform.*leave them out\.$"),
    "no transform, and columns removed": (None, {"remove_unused_columns": True}, "no `pixel_values`.*remove_unused_columns=False"),
    "unequal sizes": (odd, {}, r"`pixel_values` .float32. differs in length between rows \(8 to 9 in dimension 2.*resize them"),
    "labels in words": (
        in_words, {}, "Row 0 of the training set has the text 'cat' as `labels`.*return class ids",
    ),
    "an image that stays beside its pixels": (
        with_its_image, {}, r"Row 0 of the training set, .*images in \['img'\].*leave them out",
    ),
    "a transform that fails": (lambda batch: 1 / 0, {}, r"Row 0 of the training set cannot be read .ZeroDivisionError.*leave it out\.$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_image_for_the_model_is_refused_before_the_first_draw(case, tmp_path):
    transform, options, message = REFUSED[case]
    made = trainer(tmp_path / "run", rows(transform), **options)
    with pytest.raises(DataError, match=message):
        made.train()
    assert made.ledger.steps() == 0 and not (tmp_path / "run" / "ledger.jsonl").exists()


def shaped(mode: str, place: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], Any]:
    """A transform of its own, without the model's image processor."""

    def transform(batch: Batch) -> Any:
        arrays = [np.asarray(image.convert(mode), np.float32) / 255 for image in batch["img"]]
        made = [place(torch.from_numpy(each)) for each in arrays]
        return {"pixel_values": made, "labels": batch["label"]}

    return transform


MISSHAPEN: dict[str, tuple[Any, int, str]] = {
    "grey": (shaped("L", lambda x: x[None]), 3, r"\(1, 8, 8\)"),
    "channels last": (shaped("RGB", lambda x: x), 3, r"\(8, 8, 3\)"),
    "colors for a model of grey": (
        shaped("RGB", lambda x: x.permute(2, 0, 1)), 1, r"\(3, 8, 8\)",
    ),
    "grey for a model of grey, without channels": (shaped("L", lambda x: x), 1, r"\(8, 8\)"),
    "another size": (shaped("RGB", lambda x: x.permute(2, 0, 1)[:, :, :4]), 3, r"\(3, 8, 4\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSHAPEN)
def test_a_shape_that_the_model_does_not_take_is_named_with_its_own(case, tmp_path):
    transform, channels, size = MISSHAPEN[case]
    message = f"'pixel_values': {size}.*'num_channels': {channels}, 'image_size': 8.*own image proc"
    made = trainer(tmp_path, rows(transform), tiny_images.vit(num_labels=3, num_channels=channels))
    with pytest.raises(DataError, match=message) as refused:
        made.train()
    assert "tokens" not in str(refused.value)
    assert made.ledger.steps() == 0 and not (tmp_path / "ledger.jsonl").exists()


def test_a_model_may_take_other_channels_and_the_self_check_images_of_the_size_of_rows(tmp_path):
    """It then trains: only its forward decides."""
    model = tiny_images.vit(num_labels=3)
    first = model.vit.embeddings.patch_embeddings
    first.projection, first.num_channels = torch.nn.Conv2d(1, 16, 4, 4), 1
    made = tiny.trained(trainer(tmp_path, rows(shaped("L", lambda x: x[None])), model))
    assert made.model.config.num_channels == 3 and made.ledger.steps() == 1
    # DINOv2 interpolates its position embeddings there, and this path is what is compared.
    made = trainer(tmp_path / "dinov2", model=tiny_images.dinov2(num_labels=3))
    assert made.model.config.image_size == 12
    sizes = {tuple(example["pixel_values"].shape) for example in made.synthetic_batches()}
    assert sizes == {(1, 3, 8, 8)}
    made.train()


def test_videos_train_on_a_loss_of_ones_own(tmp_path, monkeypatch):
    """No table of transformers' losses has them, and rows alone say how many frames there are."""
    sizes = {"image_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    frames = {"patch_size": 4, "num_frames": 4, "tubelet_size": 2}
    config = VideoMAEConfig(**sizes, **frames, intermediate_size=8, num_labels=2)
    videos = torch.randn(16, 4, 3, 8, 8).tolist()
    rows = datasets.Dataset.from_dict({"pixel_values": videos, "labels": [0, 1] * 8})

    def made(cls):
        given = {
            "model": VideoMAEForVideoClassification(config), "train_dataset": rows.with_format("torch"),
            "eval_dataset": None, "data_collator": default_data_collator,
        }  # fmt: skip
        return tiny.trainer(tmp_path / cls.__name__, cls=cls, given=given, max_steps=1)

    class Own(DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            logits = model(pixel_values=inputs["pixel_values"]).logits
            return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")

    with pytest.raises(UnsupportedLossError, match="Override DPTrainer.compute_per_example_loss"):
        made(DPTrainer).train()
    assert tiny.trained(made(Own)).ledger.steps() == 1
    monkeypatch.setattr(training_data, "_of_the_size_of_rows", lambda example, layout: example)
    again = made(type("Again", (Own,), {}))
    with pytest.raises(SelfCheckError, match="expected 5, got 4"):  # planted
        again.train()


@pytest.mark.parametrize("given", [None, ["layernorm"]])
def test_lora_trains_the_head_beside_what_else_is_named(given, tmp_path):
    peft = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=given)
    made = trainer(tmp_path, peft=peft)
    used = made.model.peft_config["default"].modules_to_save
    assert sorted(used) == sorted(["classifier", *(given or [])])
    assert peft.modules_to_save == given  # the caller's own is left alone
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    head = "base_model.model.classifier.modules_to_save.default.weight"
    assert head in trained
    before = tiny.weights(made.model)
    made.train()
    moved = tiny.moved(before, made.model)
    assert moved <= trained and head in moved


def test_frost_takes_a_share_of_what_is_no_head(tmp_path):
    """The head trains beside the share, and no matrix of it is a candidate."""
    noise = {"selection_noise_multiplier": 1.0, "selection_iterations": 2}
    peft = FrostConfig(unfreeze_ratio=0.25, selection_sample_rate=0.5, **noise)
    made = tiny.trained(trainer(tmp_path, peft=peft, accountant="rdp"))
    looked_at = made.tuner.config.made[0]["noisy_magnitudes"][0]
    assert looked_at and not any("classifier" in name for name in looked_at)
    base = tiny_images.vit(num_labels=3)
    layers = {name.removesuffix(".weight") for name in looked_at}
    named = base.named_parameters()
    candidates = sum(p.numel() for name, p in named if name.rpartition(".")[0] in layers)
    trained = {name: p.numel() for name, p in made.model.named_parameters() if p.requires_grad}
    head = {name: size for name, size in trained.items() if "classifier" in name}
    assert sum(head.values()) == 3 * 16 + 3
    assert sum(trained.values()) - sum(head.values()) <= 0.25 * candidates
