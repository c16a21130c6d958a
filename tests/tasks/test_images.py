"""Images as a model reads them: read when asked for, in RGB, and changed at random by themselves."""

import io
import random
import struct
import zlib
from collections.abc import Sequence

import datasets
import numpy as np
import pytest
import tiny_images
import torch
from tiny_images import NAMES, picture
from transformers import default_data_collator

from hf_dp.batches.examples import Examples
from hf_dp.errors import DataError
from hf_dp.noise import SecretRandomness
from hf_dp.tasks import images
from hf_dp.tasks.images import ToPixels, check_images, crop, decoded, flip, image_rows, in_rgb

COUNT = 12


class OfItsOwn(SecretRandomness):
    """For each row the same randomness in every object, whichever rows were read before it."""

    def example_seed(self, index: int | None) -> int:
        return zlib.crc32(b"%d" % (-1 if index is None else index))


def examples(
    numbers: Sequence[int], augmentation: Sequence[str], randomness: SecretRandomness
) -> Examples:
    """The pictures of these numbers, as a private run reads them."""
    made = datasets.concatenate_datasets([tiny_images.rows(range(i, i + 1)) for i in numbers])
    return Examples(as_images(made, augmentation), default_data_collator, randomness)


def rows(images: Sequence[object]) -> datasets.Dataset:
    """Rows with these values in their column of images, all of the first class."""
    return datasets.Dataset.from_dict({"img": images, "label": [0] * len(images)})


def as_images(
    made: datasets.Dataset, augmentation: Sequence[str] = (), keep: str | None = None
) -> datasets.Dataset:
    """The rows as a model reads them."""
    to_pixels = ToPixels(tiny_images.processor(), augmentation)
    return image_rows(made, "img", "label", NAMES, to_pixels, keep)


def pixels(found: Examples, indices: Sequence[int]) -> list[torch.Tensor]:
    return [example["pixel_values"] for example in found.__getitems__(list(indices))]


BOTH = ["crop", "flip"]


def test_one_image_moves_nothing_of_another_rows_input():
    """Another image in the place of the first one, or none: all else stays, bit by bit."""
    others = range(1, COUNT)
    before = pixels(examples(range(COUNT), BOTH, OfItsOwn(1)), range(COUNT))
    after = pixels(examples([77, *others], BOTH, OfItsOwn(1)), range(COUNT))
    without = pixels(examples(range(COUNT), BOTH, OfItsOwn(1)), others)
    assert not torch.equal(before[0], after[0])
    assert all(map(torch.equal, before[1:], after[1:]))
    assert all(map(torch.equal, before[1:], without))


@pytest.mark.parametrize("name", BOTH)
def test_augmentation_is_fresh_secret_and_each_rows_own(name):
    """It does not follow the seeds that a user sets, and equal images are changed differently."""
    found = examples([3] * 40, [name], SecretRandomness())
    drawn = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        drawn.append(torch.stack(pixels(found, range(40))))
    assert not torch.equal(*drawn)
    assert len({image.numpy().tobytes() for image in drawn[0]}) > 1


def test_without_augmentation_nothing_is_random():
    found = examples(range(COUNT), [], SecretRandomness())
    assert all(map(torch.equal, pixels(found, range(COUNT)), pixels(found, range(COUNT))))


def test_the_augmentations_move_pixels_and_make_none_up():
    image = torch.arange(3 * 16 * 16.0).reshape(3, 16, 16)
    flipped = {flip(image).numpy().tobytes() for _ in range(40)}
    assert flipped == {image.numpy().tobytes(), image.flip(-1).numpy().tobytes()}
    windows = [crop(image) for _ in range(800)]  # one is missing once in 10^12
    assert all(window.shape == image.shape for window in windows)
    assert set(torch.stack(windows).unique().tolist()) <= set(image.flatten().tolist())
    # A border of 2 on each side: 5 x 5 windows, of which one is the image itself.
    assert len({window.numpy().tobytes() for window in windows}) == 25
    assert any(torch.equal(window, image) for window in windows)
    inner = {tuple((window[0] == image[0, 8, 8]).nonzero()[0].tolist()) for window in windows}
    assert inner == {(8 + down, 8 + right) for down in range(-2, 3) for right in range(-2, 3)}


def test_nothing_is_decoded_before_a_row_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(images, "decoded", lambda stored: read.append(1) or decoded(stored))
    made = as_images(tiny_images.rows(range(COUNT)), keep="img")
    assert not read
    assert set(made[4]) == {"pixel_values", "labels"} and len(read) == 1
    assert check_images(made, "rows", "img", quiet=True) == (3, 8, 8) and len(read) == 1 + COUNT


def test_the_processor_says_size_mean_and_deviation():
    image = picture(5, size=(20, 10))
    colors = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 2.0]}
    made = tiny_images.processor(do_resize=False, **colors)
    expected = (np.asarray(image) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 2.0]
    np.testing.assert_allclose(ToPixels(made).pixels(image).permute(1, 2, 0), expected, atol=1e-6)
    assert ToPixels(tiny_images.processor()).pixels(image).shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"])
def test_every_image_of_8_bits_becomes_rgb(mode):
    image = picture(4).convert(mode)
    assert in_rgb(image).mode == "RGB" and in_rgb(image).size == image.size


def test_grey_is_repeated_and_transparency_dropped():
    grey = in_rgb(picture(4, "L"))
    assert all(np.array_equal(grey.getchannel(0), grey.getchannel(i)) for i in (1, 2))
    clear = picture(4).convert("RGBA")
    clear.putalpha(0)
    assert in_rgb(clear).tobytes() == picture(4).tobytes()


@pytest.mark.parametrize("mode", ["I;16", "I", "F", "LAB", "La"])
def test_other_modes_are_refused(mode):
    with pytest.raises(DataError, match=f"the mode '{mode}', which hf_dp does not convert to RGB"):
        in_rgb(tiny_images.Image.new(mode, (4, 4)))


def deep_png(channels: int) -> bytes:
    """A PNG of 4 x 4 pixels with 16 bits a channel, which PIL cannot write: 2 channels are grey
    and transparent, 3 are RGB, 4 RGBA."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", 4, 4, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\1\2" * channels * 4) * 4)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def deep_tiff() -> bytes:
    """An uncompressed TIFF of 1 x 1 pixel, RGB with 16 bits a channel."""
    tags = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2),
            (273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 1, 6)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    start = b"II*\0" + struct.pack("<I", 8) + directory
    return start + struct.pack("<3H", 16, 16, 16).rjust(128 - len(start), b"\0") + b"\1\2" * 3


DEEP = {
    "PNG, grey and transparent": deep_png(2),
    "PNG, RGB": deep_png(3),
    "PNG, RGBA": deep_png(4),
    "PNG, grey": tiny_images.png(tiny_images.Image.new("I;16", (4, 4))),
    "TIFF, RGB": deep_tiff(),
    "PPM, RGB": b"P6 1 1 65535 " + b"\1\2" * 3,
    "PPM, plain": b"P3 1 1 1023 1000 5 6",
}


@pytest.mark.parametrize("case", DEEP)
@pytest.mark.parametrize("where", ["bytes", "a file"])
def test_more_than_8_bits_are_refused_also_where_pil_keeps_the_high_ones(case, where, tmp_path):
    stored = {"bytes": DEEP[case], "path": None}
    if where == "a file":
        (tmp_path / "1.image").write_bytes(DEEP[case])
        stored = {"bytes": None, "path": str(tmp_path / "1.image")}
    with tiny_images.Image.open(io.BytesIO(DEEP[case])) as image:
        image.load()  # PIL reads it
    with pytest.raises(DataError, match=f"{case[:3]}.*has more than 8 bits a channel. Scale it"):
        decoded(stored)


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm", "tga", "pcx"])
def test_images_of_8_bits_are_what_datasets_reads(kind):
    file = io.BytesIO()
    picture(3).save(file, kind)
    stored = {"bytes": file.getvalue(), "path": None}
    expected = datasets.Image().decode_example(stored)
    assert in_rgb(decoded(stored)).tobytes() == expected.convert("RGB").tobytes()


def test_an_image_is_turned_upright():
    file, exif = io.BytesIO(), tiny_images.Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture(3, size=(12, 8)).save(file, "png", exif=exif)
    stored = {"bytes": file.getvalue(), "path": None}
    assert decoded(stored).size == (8, 12)
    assert decoded(stored).tobytes() == datasets.Image().decode_example(stored).tobytes()


def test_a_format_whose_depth_is_not_known_is_refused():
    file = io.BytesIO()
    picture(3).save(file, "jpeg2000")
    with pytest.raises(DataError, match="the format JPEG2000, .* cannot tell .* Save it as PNG"):
        decoded({"bytes": file.getvalue(), "path": None})


@pytest.mark.parametrize("stored", [None, {"bytes": None, "path": None}])
def test_a_missing_image_is_refused(stored):
    with pytest.raises(DataError, match="no image. Leave the row out"):
        decoded(stored)


@pytest.mark.parametrize(
    ("values", "holds"), [([[1, 2], [3, 4]], "List"), ([0.5, 1.0], "float64"), ([1, 2], "int64")]
)
def test_columns_that_hold_no_images(values, holds):
    with pytest.raises(DataError, match=rf"`image_column` to hold images.*'img' holds .*{holds}"):
        as_images(rows(values))


def test_a_column_of_texts_that_are_no_paths():
    made = as_images(rows(["a film", "no film"]))
    said = "Row 0 of the rows, image_column 'img', .*FileNotFound.*'a film'"
    with pytest.raises(DataError, match=said):
        check_images(made, "rows", "img", quiet=True)


# An address, how many rows stand before it (they are read by thousands), and whether it is stored
# as an image without its bytes.
FETCHED = [
    ("http://host/3.png", 1199, False),
    ("hf://datasets/a/b/3.png", 3, True),
    ("s3://c/3.png", 1199, True),
    ("zip://3.png::a.zip", 3, False),
]


@pytest.mark.parametrize(("address", "before", "stored"), FETCHED)
def test_an_image_that_would_be_fetched_is_refused_unread(address, before, stored, monkeypatch):
    """In the last row, behind an index, and without a connection."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("connected"))
    paths = ["1.png", address, *(f"{i}.png" for i in range(2, before + 1))]
    images = [{"bytes": None, "path": path} if stored else path for path in paths]
    made = rows(images).select([*range(2, before + 1), 0, 1])
    said = f"Row {before}, image_column 'img'.*{address}.*Download the"
    with pytest.raises(DataError, match=said):
        as_images(made)


def test_where_the_bytes_of_an_image_once_came_from_does_not_matter():
    """It is never fetched: the bytes are there."""
    image = {"bytes": tiny_images.png(picture(1)), "path": "http://host/1.png"}
    assert as_images(rows([image, None]))[0]["pixel_values"].shape == (3, 8, 8)
