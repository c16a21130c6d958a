"""A CPU that rounds the factors of products as a GPU's tensor cores do, where torch is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import batch_for, gpt2, rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.clipping import ClippingEngine, tensor_cores
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


# -- bfloat16 factors, by the model of hf_dp.clipping.tensor_cores ---

_STEP = 8  # products that one step adds to the accumulator
_BITS = 24


def _cut(values: Tensor, quantum: Tensor) -> Tensor:
    return torch.where(quantum > 0, (values / quantum).trunc() * quantum, values)


def _quantum(largest: Tensor) -> Tensor:
    """Return the last of 24 bits of numbers, 0 for 0; in float64, which holds all sums exactly."""
    exponent = torch.frexp(largest).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent - _BITS), 0.0)


def partial_sum(one: Tensor, other: Tensor) -> Tensor:
    """Return ``sum_k one[..., k, i] other[..., k, j]`` as one accumulator sums it, in float64."""
    terms = one.shape[-2]
    one, other = one.double(), other.double()
    accumulator = torch.zeros(*one.shape[:-2], one.shape[-1], other.shape[-1], dtype=torch.float64)
    for start in range(0, terms, _STEP):
        here = slice(start, start + _STEP)
        added = one[..., here, :, None] * other[..., here, None, :]  # exact
        added = torch.cat([accumulator.unsqueeze(-3), added], -3)
        quantum = _quantum(added.abs().amax(-3, keepdim=True))
        accumulator = _cut(added, quantum).sum(-3)
        accumulator = _cut(accumulator, _quantum(accumulator.abs()))
    return accumulator


def piece(one: Tensor, other: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Compute what the kernel computes of the same arguments."""
    assert one.dtype == other.dtype == torch.bfloat16 and weights.dtype == torch.float32
    found = torch.zeros(len(one), one.shape[3], other.shape[3])
    for start in range(0, one.shape[2], tensor_cores.TERMS):
        here = slice(start, start + tensor_cores.TERMS)
        parts = partial_sum(one[:, :, here], other[:, :, here]).float() * weights[..., None, None]
        for group in range(one.shape[1]):  # in float32, one after the other
            found += parts[:, group]
    return found if total is None else total.add_(found)


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let bfloat16 factors on the CPU be multiplied as on a GPU; return the calls, as they come."""
    calls: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return piece(*arguments)

    def take(*factors: Tensor) -> bool:
        return all(each.dtype == torch.bfloat16 for each in factors)

    monkeypatch.setattr(tensor_cores, "take", take)
    monkeypatch.setattr(tensor_cores, "piece", counted)
    return calls


def worst_difference(
    strategy: str = "book_keeping", chunked: bool = False, bf16: bool = False
) -> float:
    """Return how far a norm is, relatively, from that of the one gradient that makes the sum.

    Nothing is clipped. Both are computed by the engine, the second norm in float64.
    """
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
