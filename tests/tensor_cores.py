"""A CPU that rounds the factors of products as a GPU's tensor cores do, where torch is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Where the two factors stand among the arguments.
_FACTORS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.mv.default: 0,
    aten.linear.default: 0,
    aten.addmm.default: 1,
    aten.addmm_.default: 1,
    aten.baddbmm.default: 1,
    aten.baddbmm_.default: 1,
    aten.addmv_.default: 1,
}


def to_tf32(values: Tensor) -> Tensor:
    """Round float32 numbers to TF32's 10 bits, half to even."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class TensorCores(TorchDispatchMode):
    """Inside, products of float32 matrices are TF32 products while torch's CUDA flag says so.

    Attributes:
        rounded: how many were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func)
        if first is not None and torch.backends.cuda.matmul.fp32_precision == "tf32":
            self.rounded += 1
            pair = args[first : first + 2]
            short = [to_tf32(each) if each.dtype == torch.float32 else each for each in pair]
            args = (*args[:first], *short, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


def _by_the_old_function() -> None:
    torch.set_float32_matmul_precision("high")


def _for_all() -> None:
    torch.backends.fp32_precision = "tf32"


def _for_cuda() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


WAYS: dict[str, Callable[[], None]] = {
    "set_float32_matmul_precision": _by_the_old_function,
    "torch.backends.fp32_precision": _for_all,
    "torch.backends.cuda.matmul.fp32_precision": _for_cuda,
}


@contextmanager
def precision_restored() -> Iterator[None]:
    """Put torch's settings back, whatever is set inside."""
    try:
        yield
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"
