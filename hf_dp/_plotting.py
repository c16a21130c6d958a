"""What every figure needs: matplotlib where it is installed, and a clear message where it is
not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hf_dp import _validate

_KINDS = (".png", ".pdf", ".svg")


def require_matplotlib(path: str) -> None:
    """Raise InvalidArgumentError for another kind of file, or where matplotlib is not installed.

    The message names the extra to install. Call it before anything is computed.
    """
    if Path(path).suffix.lower() not in _KINDS:
        raise _validate.invalid(
            "plot", path, f"to end in one of {list(_KINDS)}", "That decides what is written."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise _validate.invalid(
            "plot", path, "with matplotlib installed", "Run `pip install hf-dp[plot]`."
        )


def panels(count: int, width: float = 4.5, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Return a figure and its ``count`` axes side by side, without upper and right edges."""
    from matplotlib.figure import Figure  # not pyplot: no display is touched

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
