"""What to say when model and loss fail on a made-up row, before the first draw."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dp.batches.layout import Layout
from hf_dp.batches.look_over import LookedOver
from hf_dp.losses import base_model
from hf_dp.run.synthetic import image_config

_PIXELS = "pixel_values"
_MODES = {1: "L", 3: "RGB"}  # PIL's, by number of channels


def why_a_row_fails(model: nn.Module, found: LookedOver, problem: Exception) -> str:
    """Return the message for a model that fails on a row as large as the largest of each column.

    What the rows have wrong is known after the failure only: a model whose first layer was replaced
    takes other images than its configuration says.
    """
    layout, said = found.layout, f"({type(problem).__name__}: {problem})"
    of_images = _of_images(model, layout)
    if of_images is not None and "input_ids" not in layout.leaves:
        return f"Model and loss fail on a made-up row of the size of the images {said}. {of_images}"
    lengths = {name: leaf.most[-1] for name, leaf in layout.leaves.items() if leaf.varying}
    return (
        f"Model and loss fail on a made-up row as long as the longest {said}. "
        f"{f'{of_images} ' if of_images else ''}It has the columns {sorted(layout.leaves)}"
        f"{f', of lengths up to {lengths}' if lengths else ''}. If a column is missing, set "
        "remove_unused_columns=False. If rows are too long, truncate them; row "
        f"{found.longest} has the most tokens."
    )


def _of_images(model: nn.Module, layout: Layout) -> str | None:
    """Return how the rows' images compare with those of the configuration; None without images."""
    leaf = layout.leaves.get(_PIXELS)
    if leaf is None or not leaf.is_tensor:
        return None
    base: Any = base_model(model)
    config = image_config(base) if hasattr(base, "config") else None
    channels, size = (getattr(config, name, None) for name in ("num_channels", "image_size"))
    shape = leaf.most[1:]
    return (
        f"`{_PIXELS}` of a row has the shape {shape}, and {type(base).__name__} has num_channels "
        f"{channels} and image_size {size}. {_next_move(shape, channels, sorted(layout.leaves))}"
    )


def _next_move(shape: tuple[int, ...], channels: int | None, columns: list[str]) -> str:
    expected = f"Expected the shape ({channels}, height, width)"
    if len(shape) == 3 and shape[0] != channels == shape[-1]:
        return f"{expected}. Put the channels first in the transform: pixels.permute(2, 0, 1)."
    if len(shape) == 2 and channels == 1:
        return f"{expected}. Add the dimension of channels in the transform: pixels[None]."
    if channels in _MODES and (len(shape) == 2 or (len(shape) == 3 and shape[0] != channels)):
        return (
            f'{expected}. Convert each image in the transform, image.convert("{_MODES[channels]}"),'
            " before the model's image processor makes pixels of it."
        )
    return (
        "Let the transform make pixels with the model's own image processor. If a column is missing"
        f" (there are {columns}), set remove_unused_columns=False."
    )
