"""Rows with an image as a model reads them, decoded when they are read, in RGB, as pixels; and the
models that classify them.

An image stays encoded, in the file or folder that it came in, until its row is read. Each is
treated by itself; what is random in it comes from PyTorch's global generator, which is secret and
each row's own in a private run (:mod:`hf_dp.batches.examples`).
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from hf_dp._validate import invalid, one_of
from hf_dp.errors import ConfigError, DataError, UnsupportedModelError
from hf_dp.tasks.classification import label_ids
from hf_dp.tasks.models import ImageModelArguments, classifier, failure
from hf_dp.tasks.sources import loading, require_columns, resolve_model

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from transformers import BaseImageProcessor, PreTrainedModel

COLORS = 3
IMAGE, LABEL, PIXELS = "image", "label", "pixel_values"
# Those of PIL's modes whose channels have 8 bits, or one, and that mean colors as RGB does. Others
# ("I", "F", "I;16") would be cut at 255 when they are converted, and so be nearly all white.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
# Formats that have 8 bits a channel, or of which PIL says how many before it keeps the high 8.
_FORMATS = ("BMP", "GIF", "JPEG", "MPO", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def flip(pixels: Tensor) -> Tensor:
    """Return an image (3, H, W), mirrored left to right with probability 1/2."""
    return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels


def crop(pixels: Tensor) -> Tensor:
    """Return a random window of the image's own size (3, H, W), after a border of an eighth of the
    size was added on each side by reflection (4 pixels of 32)."""
    high, wide = pixels.shape[-2] // 8, pixels.shape[-1] // 8
    bordered = F.pad(pixels[None], (wide, wide, high, high), mode="reflect")[0]
    top, left = (int(torch.randint(2 * border + 1, ())) for border in (high, wide))
    return bordered[:, top : top + pixels.shape[-2], left : left + pixels.shape[-1]]


AUGMENTATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"crop": crop, "flip": flip}


class ToPixels:
    """A transform of a ``datasets.Dataset``: images to ``pixel_values`` (3, H, W), of size, mean
    and deviation that the model's processor says, and ``labels``."""

    def __init__(self, processor: BaseImageProcessor, augmentations: Sequence[str] = ()):
        self.processor = processor
        self.augmentations = [
            AUGMENTATIONS[one_of("augmentation", name, AUGMENTATIONS)] for name in augmentations
        ]

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, object]:
        images = map(decoded, batch[IMAGE])
        return {PIXELS: [self.pixels(each) for each in images], "labels": batch[LABEL]}

    def pixels(self, image: Image) -> Tensor:
        """Return the pixels of a PIL image."""
        pixels = self.processor(in_rgb(image), return_tensors="pt")[PIXELS][0]
        for change in self.augmentations:
            pixels = change(pixels)
        return pixels


class Stored(TypedDict):
    """An image of a row as ``datasets`` keeps it: encoded, or where it is."""

    bytes: bytes | None
    path: str | None


def decoded(stored: Stored | None) -> Image:
    """Return the PIL image of a row, upright, as ``datasets`` reads it; no file is fetched. Unlike
    there, what has more than 8 bits a channel is known: PIL forgets it when it decodes."""
    from PIL import Image, ImageOps

    content = stored and stored["bytes"]
    if content is None and stored and stored["path"] is not None:
        content = Path(stored["path"]).read_bytes()
    if content is None:
        raise DataError("it has no image. Leave the row out.")
    image = Image.open(io.BytesIO(content))
    if image.format not in _FORMATS:
        raise DataError(
            f"its image is of the format {image.format}, for which hf_dp cannot tell whether a "
            "channel has more than 8 bits. Save it as PNG, with 8 bits a channel."
        )
    if _is_deep(image):
        raise DataError(
            f"its image ({image.format}, mode {image.mode!r}) has more than 8 bits a channel. "
            "Scale it to 8 bits first, by public bounds: hf_dp does not know which part of its "
            "range matters."
        )
    return ImageOps.exif_transpose(image)


def _is_deep(image: ImageFile) -> bool:
    """Return whether a PIL image that is not decoded yet has more than 8 bits a channel."""
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, 8)
    found = [args for *_, args in image.tile]  # a tile has names from Pillow 11 on
    layout = [args if isinstance(args, tuple) else (args,) for args in found]
    largest = [args[1] for args in layout if image.format == "PPM" and len(args) == 2]
    return (
        image.mode.startswith(("I", "F"))
        or max(bits if isinstance(bits, tuple) else (bits,)) > 8
        or any(";16" in str(args[0]) for args in layout if args)
        or any(value > 255 for value in largest)
    )


def in_rgb(image: Image) -> Image:
    """Return a PIL image in RGB, as transformers' pipelines make it: grey is repeated in all three
    channels, and transparency is dropped, whatever color lies below it."""
    if image.mode not in _MODES:
        raise DataError(
            f"its image has the mode {image.mode!r}, which hf_dp does not convert to RGB. Scale it "
            "to 8 bits a channel by public bounds, and save it in RGB."
        )
    return image.convert("RGB")


def image_rows(
    rows: Dataset,
    image_column: str,
    label_column: str,
    names: Sequence[str],
    to_pixels: ToPixels,
    keep: str | None = None,
) -> Dataset:
    """Return the rows of images, or of paths of their files, with ``to_pixels`` as their transform:
    nothing is decoded yet, and all labels are checked. A column ``keep`` stays."""
    import datasets

    require_columns(rows, [image_column], "image_column")
    labels = label_ids(rows, label_column, names)
    if keep == LABEL or (keep == IMAGE != image_column):
        expected = f"to be another name than {IMAGE!r} and {LABEL!r}"
        advice = "The rows of a run have their images and labels there. Rename the column of users."
        raise invalid("privacy_unit_column", keep, expected, advice)
    feature = rows.features[image_column]
    stored = isinstance(feature, Mapping) and set(feature) == {"bytes", "path"}
    kind = str(getattr(feature, "dtype", ""))
    if not (isinstance(feature, datasets.Image) or stored or "string" in kind or "binary" in kind):
        raise DataError(
            f"Expected `image_column` to hold images, or paths of image files, but "
            f"{image_column!r} holds {feature}. Name a column of images; the data has "
            f"{rows.column_names}."
        )
    rows = rows.cast_column(image_column, datasets.Image(decode=False))
    _refuse_addresses(rows, image_column)
    kept = [image_column] + [keep] * (keep in rows.column_names and keep != image_column)
    rows = rows.select_columns(kept)
    if image_column != IMAGE:
        rows = rows.rename_column(image_column, IMAGE)
    return rows.add_column(LABEL, labels).with_transform(to_pixels)


def _refuse_addresses(rows: Dataset, column: str) -> None:
    """Raise DataError for an image that would be fetched when its row is drawn. Who serves it would
    see which rows each secret draw holds, and epsilon does not cover that."""
    row = 0
    for batch in rows.select_columns([column]).with_format("arrow").iter(1000):
        held_here, paths = (pc.struct_field(batch[column], name) for name in ("bytes", "path"))
        inside = held_here.is_valid().to_pylist()
        for held, path in zip(inside, paths.to_pylist(), strict=True):
            if not held and path is not None and ("://" in path or "::" in path):
                raise DataError(
                    f"Row {row}, image_column {column!r}, names a URL, {path!r}: fetching it in "
                    "training would tell its server which rows are drawn. Download the files "
                    "first, and name their paths."
                )
            row += 1


def check_images(
    rows: Dataset, which: str, column: str, quiet: bool | None = False
) -> tuple[int, ...]:
    """Read every image of :func:`image_rows` once, and return the shape of their pixels."""
    shape: tuple[int, ...] = ()
    for index in tqdm(range(len(rows)), f"Reading the {which}", disable=quiet, leave=False):
        try:
            found = tuple(rows[index][PIXELS].shape)
        except Exception as problem:  # whatever PIL, a codec or the file system raises
            raise DataError(
                f"Row {index} of the {which}, image_column {column!r}, cannot be read "
                f"({type(problem).__name__}: {problem}). Repair it or leave it out, or name "
                "another image_column."
            ) from problem
        if shape and found != shape:
            sizes = " and ".join(f"{each[-2]} x {each[-1]}" for each in (shape, found))
            raise DataError(
                f"Row {index} of the {which}: images differ in size ({sizes} pixels, after the "
                "image processor), but a model takes one size. Let the processor resize them: in "
                "preprocessor_config.json, do_resize: true and a size of height and width."
            )
        shape = found
    return shape


# -- the model --


def load_image_classifier(
    arguments: ImageModelArguments, names: Sequence[str]
) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Return model and image processor. The head is new, unless the base has these classes."""
    from transformers import AutoModelForImageClassification

    from hf_dp.run.synthetic import image_config

    require_pillow()
    name = arguments.model_name_or_path
    advice = "Give a Hub name, or a folder with config.json, weights and preprocessor_config.json."
    with loading(f"The image classifier {name!r}", advice):
        path = resolve_model(name)
        processor = load_processor(path)
        model = classifier(
            AutoModelForImageClassification,
            path,
            names,
            from_scratch=arguments.from_scratch,
            new_head=arguments.new_head,
        )
    channels = getattr(image_config(model), "num_channels", COLORS)
    if channels != COLORS:
        raise UnsupportedModelError(
            f"Expected a model that takes images in RGB, but {name!r} has num_channels {channels}. "
            "Choose another model."
        )
    return model, processor


def require_pillow() -> None:
    """Raise ConfigError where images cannot be decoded."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "Images are decoded with Pillow, which is not installed. Install it with: pip install "
            "'hf-dp[images]'"
        )


def load_processor(path: str) -> BaseImageProcessor:
    """Return the image processor of a model; the same one whether or not torchvision is here."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def check_pixels(model: PreTrainedModel, shape: Sequence[int]) -> None:
    """Raise DataError if a model does not take images of this shape, (3, H, W); a synthetic one is
    used."""
    if cause := failure(model, {"pixel_values": torch.zeros(1, *shape, dtype=model.dtype)}):
        raise DataError(
            f"The image processor makes images of {' x '.join(map(str, shape))}, on which the "
            f"model fails: {cause} Set `size` in preprocessor_config.json to the model's "
            "image_size."
        )
