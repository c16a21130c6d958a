"""Describe where a measurement ran: versions and machine, for the JSON and the line above a table.

No path, user or host name is among them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from hf_dp._version import __version__
from hf_dp.benchmarks.workload import Workload
from hf_dp.clipping.rounding import product_precision

_PACKAGES = ("torch", "transformers", "peft", "opacus")


def environment(workload: Workload) -> dict[str, Any]:
    """Return versions (None where not installed), device, threads, and the load before the run."""
    return {
        "hf_dp": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name() if workload.on_cuda else _processor(),
        "threads": workload.threads,
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "products": product_precision("cuda" if workload.on_cuda else "cpu"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.partition(":")[2].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
