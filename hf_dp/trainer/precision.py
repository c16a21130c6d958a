"""In which precision forward and backward passes run: read from what runs, never from what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError

_FULL = ("float32", "float64")


@dataclass(frozen=True)
class Precision:
    """What the accelerator, the surrounding autocast and the parameters say.

    Args: autocast: name of the type that products are computed in, or None. parameters: names of all parameters' types.
    """

    autocast: str | None
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, accelerator: Any) -> Precision:
        """Return the precision that a forward of this model has now.

        Raises: UnsupportedArgumentError for float16 and 8-bit autocast, which scale losses or share scales in a batch.
        """
        mixed = str(accelerator.mixed_precision or "no")
        if mixed not in ("no", "bf16"):
            raise invalid(
                "mixed_precision",
                mixed,
                'to be "no" or "bf16" in private modes',
                "float16 scales the loss and skips steps on overflow; 8 bits share a scale in the batch. Both depend on the "
                "data. Use bf16=True, and check ACCELERATE_MIXED_PRECISION.",
                UnsupportedArgumentError,
            )
        autocast = "bfloat16" if mixed == "bf16" else None
        device = accelerator.device.type
        if torch.is_autocast_enabled(device):
            autocast = _name(torch.get_autocast_dtype(device))
            if autocast != "bfloat16":
                raise invalid(
                    "torch.autocast",
                    autocast,
                    "to be bfloat16 or off around private training",
                    "Other types overflow or round so coarsely that no margin was measured. Use bf16=True.",
                    UnsupportedArgumentError,
                )
        return cls(autocast, tuple(sorted({_name(p.dtype) for p in model.parameters()})))

    @property
    def is_short(self) -> bool:
        """Whether anything is computed in less than float32, so that rounding depends on the padded length."""
        return self.autocast is not None or any(name not in _FULL for name in self.parameters)

    def words(self) -> str:
        """Return it for the card."""
        weights = " and ".join(self.parameters)
        forward = weights if self.autocast is None else f"{self.autocast} autocast over {weights} weights"
        return f"forward and backward {forward}; norms, clipped sums and noise float32 or better"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
