"""Products of bfloat16 factors on tensor cores, emulated: as exact as norms and sums allow for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from forms import FORMS, force
from models import batch_for, gpt2, rows
from tensor_cores import emulate, piece, worst_difference
from torch import Tensor

from hf_dp.clipping import ClippingEngine, tensor_cores
from hf_dp.clipping.rounding import unit
from hf_dp.losses import per_example_loss
from hf_dp.plans.rounding import ROUNDING_MARGIN

EPS = torch.finfo(torch.float32).eps
TERMS_OF = ("of one sign", "of both signs", "that nearly cancel", "of many sizes")


def factors(kind: str, terms: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 1, terms, 4, generator=source) for _ in range(2))
    if kind == "of one sign":
        one, other = one.abs() + 1, other.abs() + 1
    if kind == "that nearly cancel":
        one[:, :, 1::2] = -one[:, :, ::2][:, :, : terms // 2]
        other[:, :, 1::2] = other[:, :, ::2][:, :, : terms // 2]
    if kind == "of many sizes":
        one = one * torch.logspace(-6, 6, terms)[torch.randperm(terms, generator=source)][:, None]
    return one.bfloat16(), other.bfloat16()


def error(kind: str, terms: int) -> float:
    """Return the largest error in eps of the sum of the terms' magnitudes."""
    return error_of(*factors(kind, terms))


def error_of(one: Tensor, other: Tensor, weight: float = 1.0) -> float:
    weights = torch.full(one.shape[:2], weight)
    exact = torch.einsum("zgki,zgkj->zij", one.double(), other.double()) * weights[0, 0].double()
    size = torch.einsum("zgki,zgkj->zij", one.double().abs(), other.double().abs()) * weight
    found = tensor_cores.product(one, other, weights)
    return float(((found - exact).abs() / size).max()) / EPS


@pytest.fixture
def by_pieces(monkeypatch):
    monkeypatch.setattr(tensor_cores, "piece", piece)


@pytest.mark.parametrize("terms", [1, 7, 64, 768, 14_336])
@pytest.mark.parametrize("kind", TERMS_OF)
@pytest.mark.usefixtures("by_pieces")
def test_sums_are_off_by_less_than_norms_allow_for(kind, terms):
    assert error(kind, terms) <= 15 <= unit(torch.float32) / EPS / 2


@pytest.mark.usefixtures("by_pieces")
def test_planted_sums_that_never_leave_the_tensor_cores_are_seen(monkeypatch):
    monkeypatch.setattr(tensor_cores, "TERMS", 14_336)
    assert error("of one sign", 14_336) > unit(torch.float32) / EPS


def of_terms_alike(groups: int, terms: int) -> float:
    """Return the largest error for terms of one size, whose rounding adds up."""
    ones = torch.ones(1, groups, terms, 1).bfloat16()
    return max(error_of(ones, ones, weight) for weight in (0.1, 1 / 3, 0.7))


@pytest.mark.parametrize(("groups", "terms"), [(1, 2**13), (512, 64), (48, 100)])
@pytest.mark.usefixtures("by_pieces")
def test_many_partial_sums_are_off_by_no_more(groups, terms):
    assert of_terms_alike(groups, terms) <= unit(torch.float32) / EPS


@pytest.mark.usefixtures("by_pieces")
def test_planted_sums_of_any_length_in_float32_are_seen(monkeypatch):
    monkeypatch.setattr(tensor_cores, "PARTS", 2**20)
    assert of_terms_alike(2**13, 8) > unit(torch.float32) / EPS


# -- in the engine ---


def backward(engine: ClippingEngine, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = per_example_loss(model, batch)
    return engine.backward(losses)


@pytest.mark.parametrize(
    ("strategy", "form"),
    [("book_keeping", form) for form in FORMS] + [("two_pass", "factors")],
)
def test_norms_are_those_of_the_sums(form, strategy, monkeypatch):
    force(form, monkeypatch)
    calls = emulate(monkeypatch)
    assert worst_difference(strategy, bf16=True) < 2e-5
    assert calls


def test_sums_and_norms_are_those_of_float32_products(monkeypatch):
    model = gpt2(dtype=torch.float32)
    batch = batch_for(model, (9, 4, 12))

    def result() -> tuple[Tensor, Tensor]:
        with ClippingEngine(model, 0.1) as engine:
            norms = backward(engine, model, batch)
            return norms, torch.cat([each.flatten() for each in engine.collect().values()])

    norms, sums = result()
    assert emulate(monkeypatch) == []
    again, same = result()
    torch.testing.assert_close(again, norms, rtol=2e-5, atol=0)
    assert (same - sums).norm() < 2e-5 * sums.norm()


PHYSICAL, C = 128, 0.01


def moved(aligned: int, strategy: str = "book_keeping") -> float:
    """Return by how many C one of so many aligned examples moves the clipped sum."""
    model = models.bert(dtype=torch.float32)
    one = batch_for(model, (12,))
    sums = []
    for examples in (aligned + 1, aligned):
        with ClippingEngine(model, C, strategy=strategy) as engine:
            for start in range(0, examples, PHYSICAL):
                count = min(PHYSICAL, examples - start)
                backward(engine, model, rows(one, [0] * count))
            sums.append(torch.cat([each.flatten().double() for each in engine.collect().values()]))
    assert sums[0].norm() > 0.5 * aligned * C
    return float((sums[0] - sums[1]).norm()) / C


@pytest.mark.parametrize(("strategy", "aligned"), [("book_keeping", 1024), ("two_pass", 128)])
def test_one_example_moves_the_sum_by_no_more_than_the_noise_is_scaled_to(
    strategy, aligned, monkeypatch
):
    calls = emulate(monkeypatch)
    assert moved(aligned, strategy) <= 1 + ROUNDING_MARGIN
    assert calls


def test_planted_weights_in_bf16_are_seen(monkeypatch):
    """A weight that is rounded up adds too much, as a split without its rest would."""
    emulate(monkeypatch)
    as_it_is = tensor_cores.product

    def rounded_up(one: Tensor, other: Tensor, weights: Tensor, total: Tensor | None = None):
        short = weights.bfloat16()
        short = torch.where(short < weights, short * (1 + 2**-7), short)
        return as_it_is(one, other, short.float(), total)

    monkeypatch.setattr(tensor_cores, "product", rounded_up)
    assert moved(256) > 1 + ROUNDING_MARGIN


def test_only_bfloat16_on_a_gpu_is_taken():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert not tensor_cores.take(torch.ones(2, 3, dtype=dtype))


# -- the kernel itself ---


def in_a_process(program: str, **env: str) -> None:
    """Run a program beside this file; Triton reads its settings when it is imported."""
    path = Path(__file__).with_name(program)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_the_kernel_computes_what_it_says():
    pytest.importorskip("triton")
    in_a_process("interpreted_kernel.py", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernel_compiles_to_tensor_cores_whose_sums_begin_at_zero():
    pytest.importorskip("triton")
    in_a_process("compiled_kernel.py")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3, 5, 7, 9), (2, 1, 200, 70, 65), (1, 16, 512, 768, 3072)])
def test_on_a_gpu(shape):
    z, groups, terms, height, width = shape
    source = torch.Generator("cuda").manual_seed(0)
    one = torch.rand(z, groups, terms, height, generator=source, device="cuda").bfloat16()
    other = torch.rand(z, groups, terms, width, generator=source, device="cuda").bfloat16()
    weights = torch.rand(z, groups, generator=source, device="cuda")
    assert tensor_cores.take(one, other)
    found = tensor_cores.product(one, other, weights)
    exact = torch.einsum("zg,zgki,zgkj->zij", weights.double(), one.double(), other.double())
    assert ((found - exact).abs() <= 15 * EPS * exact).all()
