"""An image task small enough for a test: 8 x 8 pixels, and vision transformers of one layer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers as hf
from PIL import Image

NAMES = ["cat", "dog", "owl"]
SIZE = 8
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": SIZE, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def picture(number: int, mode: str = "RGB", size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """A picture of noise of its own, around a brightness of its class, ``number % 3``."""
    width, height = size
    noise = np.random.default_rng(number).integers(0, 60, (height, width, 3))
    return Image.fromarray((noise + 90 * (number % 3)).astype(np.uint8)).convert(mode)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def rows(numbers: range) -> datasets.Dataset:
    """Rows whose classes are declared, with the columns of CIFAR-10 on the Hub."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    return datasets.Dataset.from_dict(
        {"img": [picture(i) for i in numbers], "label": [i % 3 for i in numbers]}, features=features
    )


def by_class(folder: Path, numbers: range, names: list[str] = NAMES) -> str:
    """Write pictures into a folder for each class; return the folder of all."""
    for i in numbers:
        path = folder / names[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(picture(i)))
    return str(folder)


def processor(**options: Any) -> Any:
    return hf.ViTImageProcessorPil(**{"size": {"height": SIZE, "width": SIZE}, **options})


def _classifier(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**options)
    return getattr(hf, f"{kind}ForImageClassification")(config)


def vit(**options: Any) -> hf.ViTForImageClassification:
    return _classifier("ViT", **{**_SMALL, **options})


def deit(**options: Any) -> hf.DeiTForImageClassification:
    return _classifier("DeiT", **{**_SMALL, **options})


def dinov2(**options: Any) -> hf.Dinov2ForImageClassification:
    """One whose position embeddings are interpolated: it was made for larger images."""
    small = {name: value for name, value in _SMALL.items() if name != "intermediate_size"}
    return _classifier("Dinov2", **{**small, "image_size": 12, "mlp_ratio": 2, **options})


def _of_text_and_images(kind: str, **options: Any) -> Any:
    """A classifier by the half of CLIP or SigLIP that reads images."""
    small = {name: value for name, value in _SMALL.items() if not name.endswith("dropout_prob")}
    texts = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
             "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    halves = {"vision_config": {**small, **options}, "text_config": texts}
    return _classifier(kind, **halves, projection_dim=16)


def clip(**options: Any) -> hf.CLIPForImageClassification:
    return _of_text_and_images("CLIP", **options)


def siglip(**options: Any) -> hf.SiglipForImageClassification:
    return _of_text_and_images("Siglip", **options)


def save(folder: Path, model: Any, **options: Any) -> str:
    """Save a model and its image processor; return the folder."""
    model.save_pretrained(folder)
    processor(**options).save_pretrained(folder)
    return str(folder)
