"""Let PEFT load hf_dp's own adapter once ``hf_dp`` is imported."""

from __future__ import annotations

import importlib


def register() -> None:
    """Import the adapter module, which registers itself with PEFT.

    If that import is already under way, it is what called this function, and nothing happens.
    """
    importlib.import_module("hf_dp.tuners.adapter")
