"""Show what DP-FROST chose: a table to read, or a picture by block and kind of matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_dp.tuners.frost.chosen import Chosen, Part, in_order


def unit(chosen: Chosen) -> str:
    """Return what the magnitude of a partition P is (DP-FROST, definition 8)."""
    summed = (
        "sum of |clipped gradients|" if chosen.magnitude == "mgna" else "|sum of clipped gradients|"
    )
    return f"{summed} / |P|" if chosen.norm_order == 1 else f"2-norm of {summed} / sqrt |P|"


def table(selections: Sequence[Chosen]) -> str:
    """Return a line for each partition, in the model's order."""
    from hf_dp.benchmarks.tables import aligned

    blocks = []
    for number, one in enumerate(selections, 1):
        rows = [
            [
                part.name,
                part.block or "-",
                part.kind if part.block else "-",
                f"{part.magnitude:.4g}",
                "-" if part.order is None else str(part.order),
            ]
            for part in one.parts
        ]
        title = f"selection {number} of {len(selections)}\n" if len(selections) > 1 else ""
        header = ["partition", "block", "kind", "magnitude", "chosen"]
        taken = sum(part.order is not None for part in one.parts)
        how = "estimated from noisy releases" if one.noised else "not noised"
        blocks.append(
            f"{title}{aligned(header, rows)}\n{taken} of {len(one.parts)} partitions; magnitude: "
            f"{one.magnitude}, {unit(one)}, {how}; chosen: in which order"
        )
    return "\n\n".join(blocks)


def draw(selections: Sequence[Chosen], path: str) -> None:
    """Write the picture: a row of two panels for each selection.

    Left is what lies outside the blocks, right a cell for each block and kind of matrix. The shade
    is the magnitude, on a logarithmic scale; what was chosen is framed, with its place in the
    order.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    grids = [_Grid(one) for one in selections]
    height = max(max(len(grid.blocks), len(grid.outside)) for grid in grids)
    width = max(len(grid.kinds) for grid in grids)
    figure = Figure(
        figsize=(3.6 + 0.72 * width, len(grids) * (2.2 + 0.32 * height)), layout="constrained"
    )
    panels = figure.subplots(
        len(grids), 2, squeeze=False, gridspec_kw={"width_ratios": [1, max(2, width)]}
    )
    for (left, right), grid, number in zip(panels, grids, range(1, len(grids) + 1), strict=True):
        positive = [part.magnitude for part in grid.parts if part.magnitude > 0]
        low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
        norm = LogNorm(low, high if high > low else 2 * low)
        _panel(left, [[part] for part in grid.outside], norm)
        left.set_yticks(range(len(grid.outside)), [part.kind for part in grid.outside])
        left.set_xticks([])
        left.set_title("outside the blocks", fontsize=9)
        image = _panel(right, grid.rows, norm)
        right.set_yticks(range(len(grid.blocks)), grid.blocks)
        right.set_xticks(range(len(grid.kinds)), grid.kinds, rotation=40, ha="right")
        right.set_ylabel("transformer block")
        which = f"selection {number} of {len(grids)}: " if len(grids) > 1 else ""
        right.set_title(f"{which}{grid.taken} of {len(grid.parts)} partitions chosen", fontsize=9)
        said = "noisy magnitude" if grid.chosen.noised else "magnitude, not noised"
        bar = figure.colorbar(image, ax=right, fraction=0.05, pad=0.02)
        bar.set_label(f"{said} ({grid.chosen.magnitude}):\n{unit(grid.chosen)}", fontsize=8)
    figure.supxlabel(
        "framed: chosen, with its place in the order; <0: the noise made it negative; blank: no "
        "such matrix",
        fontsize=8,
    )
    figure.savefig(path, dpi=150)


class _Grid:
    """The parts of one selection by block and kind."""

    def __init__(self, chosen: Chosen):
        self.chosen, self.parts = chosen, chosen.parts
        self.outside = [part for part in chosen.parts if not part.block]
        inside = [part for part in chosen.parts if part.block]
        self.blocks = list(dict.fromkeys(part.block for part in inside))
        self.kinds = in_order([part.kind for part in inside])
        cells: Mapping[tuple[str, str], Part] = {(part.block, part.kind): part for part in inside}
        self.rows = [[cells.get((block, kind)) for kind in self.kinds] for block in self.blocks]
        self.taken = sum(part.order is not None for part in chosen.parts)


def _panel(axes: Any, rows: Sequence[Sequence[Part | None]], norm: Any) -> Any:
    """Draw a cell for each part; return what the color bar is made of."""
    from matplotlib.patches import Rectangle

    values = [
        [
            part.magnitude if part is not None and part.magnitude > 0 else float("nan")
            for part in row
        ]
        for row in rows
    ]
    shown = values if values and values[0] else [[float("nan")]]
    image = axes.imshow(shown, aspect="auto", cmap=_shades(), norm=norm)
    for i, row in enumerate(rows):
        for j, part in enumerate(row):
            if part is None:
                continue
            negative, dark = part.magnitude <= 0, part.magnitude > 0 and norm(part.magnitude) > 0.6
            said = ["<0"] * negative + [str(part.order)] * (part.order is not None)
            axes.text(
                j, i, "\n".join(said), ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
            if part.order is not None:
                place = (j - 0.46, i - 0.46)
                axes.add_patch(Rectangle(place, 0.92, 0.92, fill=False, ec="tab:red", lw=1.8))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    return image


def _shades() -> Any:
    """Return blues without the near-white, which is where nothing is."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(
        "shades", [colormaps["Blues"](0.12 + 0.88 * place / 15) for place in range(16)]
    )
