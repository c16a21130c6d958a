"""What a statement says of a run that its ledger does not know."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import torch

from hf_dp._version import __version__
from hf_dp.run.precision import Precision
from hf_dp.statement.facts import RunFacts, Weaknesses

PACKAGES = ("torch", "transformers", "accelerate", "peft", "dp-accounting", "prv-accountant")


def run_facts(
    device: torch.device,
    precision: Precision,
    weaknesses: Weaknesses,
    trained: str,
    **found: Any,
) -> RunFacts:
    """Return the facts of a run. Args: trained: which parameters, in words. found: what observers
    inside the run found."""
    noise = f"PyTorch's {device.type} generator seeded with 63 bits"
    if device.type == "cpu":
        noise = "NumPy SFC64 seeded with 128 bits"
    return RunFacts(
        trained=trained,
        precision=precision.words(),
        noise_generator=f"{noise} by the operating system (not cryptographic)",
        sampling_generator="the operating system's cryptographic generator",
        **vars(weaknesses),
        **found,
        versions={"hf_dp": __version__, **_versions()},
    )


@cache  # what is imported stays as it is, and to parse a package's metadata takes milliseconds
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}
