"""A CPU that rounds the factors of products as a GPU's tensor cores do, where torch is told to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from models import batch_for, gpt2, rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.clipping import ClippingEngine
from hf_dp.losses import per_example_loss

aten = torch.ops.aten
# Where the two factors stand among the arguments.
_FACTORS = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.mv.default: 0, aten.linear.default: 0,
    aten.addmm.default: 1, aten.addmm_.default: 1, aten.baddbmm.default: 1,
    aten.baddbmm_.default: 1, aten.addmv_.default: 1,
}  # fmt: skip


def to_tf32(values: Tensor) -> Tensor:
    """Round float32 numbers to TF32's 10 bits, half to even."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class TensorCores(TorchDispatchMode):
    """Inside, products of float32 matrices are TF32 products while torch's CUDA flag says so.

    Attributes:
        rounded: how many were.
        of_16_bits: how many products of 16-bit factors there were while the flag did not say so,
            which is where norms and sums are formed if it was set before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.of_16_bits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func)
        pair = () if first is None else args[first : first + 2]
        if pair and torch.backends.cuda.matmul.fp32_precision == "tf32":
            self.rounded += 1
            short = [to_tf32(each) if each.dtype == torch.float32 else each for each in pair]
            args = (*args[:first], *short, *args[first + 2 :])
        else:
            self.of_16_bits += any(each.dtype == torch.bfloat16 for each in pair)
        return func(*args, **(kwargs or {}))


WAYS: dict[str, Callable[[], None]] = {
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "torch.backends.fp32_precision": partial(setattr, torch.backends, "fp32_precision", "tf32"),
    "torch.backends.cuda.matmul.fp32_precision": partial(
        setattr, torch.backends.cuda.matmul, "fp32_precision", "tf32"
    ),
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


def worst_difference(
    strategy: str = "book_keeping", chunked: bool = False, bf16: bool = False
) -> float:
    """Return how far a norm is, relatively, from that of the one gradient that makes the sum.
    Nothing is clipped. Both are computed by the engine, the second norm in float64."""
    model = gpt2(dtype=torch.float32)
    batch = batch_for(model, (9, 4, 12))
    worst = 0.0
    for index in range(3):
        with ClippingEngine(model, 1e6, strategy=strategy) as engine:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                losses = per_example_loss(model, rows(batch, [index, index]), chunked)
            norm = engine.backward(losses)
            total = [each.double().flatten() for each in engine.collect().values()]
        worst = max(worst, abs(norm[0].item() * 2 / torch.cat(total).norm().item() - 1))
    return worst
