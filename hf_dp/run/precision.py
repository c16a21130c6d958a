"""The precision of forward and backward passes, read from what runs, never from the request; and
what else a statement says of a run that its ledger does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp._borrowed import forward_without_autocast
from hf_dp._validate import invalid
from hf_dp._version import __version__
from hf_dp.clipping.rounding import full_precision, product_precision
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.statement.audited import AuditResult
from hf_dp.statement.facts import RunFacts, Weaknesses

PACKAGES = ("torch", "transformers", "accelerate", "peft", "dp-accounting", "prv-accountant")
_FULL = ("float32", "float64")


@dataclass(frozen=True)
class Precision:
    """The precision that accelerator, surrounding autocast and parameters give, by names of types:
    ``computed`` are shorter ones seen in a forward, ``products`` what float32 products round to.
    ``around`` is the autocast that surrounds, which is also ``autocast``."""

    autocast: str | None
    parameters: tuple[str, ...]
    computed: tuple[str, ...] = ()
    products: str = "float32"
    around: str | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mixed_precision: str | None,
        device: torch.device,
        computed: Iterable[str] = (),
    ) -> Precision:
        """Return the precision that a forward of this model has now, or raise
        UnsupportedArgumentError for other autocast than to bfloat16."""
        mixed = str(mixed_precision or "no")
        autocast = {"no": None, "bf16": "bfloat16"}.get(mixed, mixed)
        around = autocast_around(device)
        if autocast in (None, "bfloat16"):
            autocast = around or autocast
        if autocast not in (None, "bfloat16"):
            raise invalid(
                "torch.autocast" if around else "mixed_precision",
                autocast,
                'to be "no" or "bf16" in private modes',
                "float16 scales the loss and skips steps on overflow; 8-bit types share a scale in "
                "the batch. Both depend on the data. Use bf16=True, and check "
                "ACCELERATE_MIXED_PRECISION.",
                UnsupportedArgumentError,
            )
        return cls(
            autocast,
            tuple(sorted({_name(p.dtype) for p in model.parameters()})),
            tuple(sorted(computed)),
            product_precision(device.type),
            around,
        )

    @property
    def is_rounded(self) -> bool:
        """Return whether forward and backward round more than their parameters do."""
        return self.autocast is not None or bool(self.computed) or self.products != "float32"

    @property
    def is_short(self) -> bool:
        """Whether anything is computed in less than float32; rounding depends on padding then."""
        return self.is_rounded or any(name not in _FULL for name in self.parameters)

    def words(self) -> str:
        """Return the precision in words, for the card."""
        weights = " and ".join(self.parameters)
        forward = f"{self.autocast} autocast over {weights} weights" if self.autocast else weights
        if self.autocast is None and set(self.computed) - set(self.parameters):
            forward += f" and, within, {' and '.join(self.computed)}"
        if self.products != "float32":
            forward += f" with products in {self.products}"
        return f"forward and backward {forward}; norms, clipped sums and noise float32 or better"


def autocast_around(device: torch.device) -> str | None:
    """Return the type of the autocast that surrounds the caller, or None."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return _name(torch.get_autocast_dtype(device.type))


class Watched(TorchDispatchMode):
    """Notes in ``short`` the types shorter than float32 that are computed in, whoever switched."""

    def __init__(self) -> None:
        super().__init__()
        self.short: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.short |= {_name(each.dtype)} if each.dtype.itemsize < 4 else set()
        return output


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Take accelerate's autocast off a model's forward inside, and keep float32 products whole."""
    wrapped, original = model.forward, forward_without_autocast(model)
    try:
        if original is not None:
            model.forward = original
        with full_precision():
            yield
    finally:
        if original is not None:
            model.forward = wrapped


def computes_in_full(model: nn.Module, losses: Callable[[], Tensor]) -> bool:
    """Return whether weights and losses have nothing shorter than float32 now."""
    if any(parameter.dtype.itemsize < 4 for parameter in model.parameters()):
        return False
    with torch.no_grad(), Watched() as watched:
        losses()
    return not watched.short


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_facts(
    device: torch.device,
    precision: Precision,
    weaknesses: Weaknesses,
    trained: str,
    audit: AuditResult | None,
) -> RunFacts:
    """Return the facts of a run. Args: trained: which parameters, in words."""
    bits = 125 if device.type == "cuda" else 63
    noise = f"PyTorch's {device.type} generator seeded with {bits} bits"
    if device.type == "cpu":
        noise = "NumPy SFC64 seeded with 128 bits"
    return RunFacts(
        trained=trained,
        precision=precision.words(),
        noise_generator=f"{noise} by the operating system (not cryptographic)",
        sampling_generator="the operating system's cryptographic generator",
        **vars(weaknesses),
        audit=audit,
        versions={"hf_dp": __version__, **_versions()},
    )


@cache  # what is imported stays as it is, and to parse a package's metadata takes milliseconds
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}
