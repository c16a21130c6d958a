"""What lets PEFT load the one adapter of ours that it does not know, once ``hf_dp`` is imported."""

from __future__ import annotations

import importlib


def register() -> None:
    """Import the adapter method, which makes itself known. (Where that import is under way already,
    it is what led here.)"""
    importlib.import_module("hf_dp.tuners.adapter")
