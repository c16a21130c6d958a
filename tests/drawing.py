"""What a figure shows, without looking at it."""

from __future__ import annotations

import pytest


def drawn(monkeypatch, names=("errorbar", "plot")):
    """What matplotlib is told to draw: (x, y, label) of each curve or point."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    found = []
    for name in names:
        original = getattr(Axes, name)

        def noted(self, x, y, *args, original=original, name=name, **options):
            if not options.get("label", "_").startswith("_"):  # matplotlib's own have no name
                found.append((list(x), list(y), options["label"]))
            return original(self, x, y, *args, **options)

        monkeypatch.setattr(Axes, name, noted)
    return found
