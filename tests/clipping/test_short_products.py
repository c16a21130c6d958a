"""With TF32 products in forward and backward, norms and sums are those of full precision."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forms import FORMS, force
from models import batch_for, gpt2
from short_products import WAYS, TensorCores, precision_restored, worst_difference

from hf_dp.clipping import ClippingEngine, clipped_sum, forms, gradients, norms
from hf_dp.clipping.rounding import full_convolutions, full_precision, product_precision
from hf_dp.losses import per_example_loss


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with precision_restored():
        yield


def worst_on_tensor_cores(strategy: str) -> float:
    with TensorCores() as cores:
        worst = worst_difference(strategy)
    assert (cores.rounded > 0) is (torch.backends.cuda.matmul.fp32_precision == "tf32")
    return worst


def _as_set(method: Any) -> Any:
    """Return a method without its full precision; torch.no_grad is around that."""
    return torch.no_grad()(method.__wrapped__.__wrapped__)


ALL_FORMS = [("book_keeping", form) for form in FORMS]
ALL_FORMS += [("two_pass", "factors"), ("per_example", "factors")]


@pytest.mark.parametrize(
    ("way", "strategy", "form"),
    [("torch.backends.fp32_precision", *each) for each in ALL_FORMS]
    + [(way, "book_keeping", "factors") for way in WAYS if "cuda" in way or "set_" in way],
)
def test_norms_are_those_of_the_sums(way, strategy, form, monkeypatch):
    force(form, monkeypatch)
    WAYS[way]()
    assert worst_on_tensor_cores(strategy) < 1e-5


@pytest.mark.parametrize(("strategy", "form"), ALL_FORMS[:-1])  # the last runs modules again
def test_factors_of_16_bits_are_widened_before_norms_and_sums(strategy, form, monkeypatch):
    """So what torch lets products of 16 bits do (sum in 16 bits, say) cannot reach them."""
    force(form, monkeypatch)
    assert of_16_bits(strategy) == (0, True)


def test_planted_products_of_16_bits_are_seen(monkeypatch):
    force("factors", monkeypatch)
    monkeypatch.setattr(
        gradients.OuterProducts,
        "weighted_factors",
        lambda self, weights: (self.left.flatten(0, 1).mT, self.right.flatten(0, 1)),
    )
    found, exact = of_16_bits("book_keeping")
    assert found > 0 and not exact


def of_16_bits(strategy: str) -> tuple[int, bool]:
    """Return how many products of 16-bit factors made norms and sums, and whether these agree."""
    WAYS["torch.backends.fp32_precision"]()
    with TensorCores() as cores:
        exact = worst_difference(strategy, bf16=True) < 2e-5
    return cores.of_16_bits, exact


@pytest.mark.parametrize("of", [norms.ExampleNorms, clipped_sum.ClippedSum])
def test_planted_short_products_in_norms_or_sums_are_seen(of, monkeypatch):
    force("factors", monkeypatch)
    WAYS["torch.backends.fp32_precision"]()
    monkeypatch.setattr(of, "add", _as_set(of.add))
    assert worst_on_tensor_cores("book_keeping") > 1e-5


def test_planted_short_explicit_gradients_are_seen(monkeypatch):
    """What is measured is what is added, so that no norm shows it: gradients differ instead."""
    force("explicit at the end", monkeypatch)
    WAYS["torch.backends.fp32_precision"]()

    def sums():
        torch.manual_seed(0)
        model = gpt2(dtype=torch.float32)
        with TensorCores(), ClippingEngine(model, 1e6) as engine:
            engine.backward(per_example_loss(model, batch_for(model, (9, 4))))
            return torch.cat([each.flatten() for each in engine.collect().values()])

    exact = sums()
    monkeypatch.setattr(forms, "full_precision", nullcontext)
    assert (sums() - exact).norm() > 1e-5 * exact.norm()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_set_is_restored(way):
    WAYS[way]()
    of_all = torch.backends.cudnn, torch.backends.mkldnn
    switches = *(each.conv for each in of_all), torch.backends.cuda.matmul, of_all[1].matmul
    before = [each.fp32_precision for each in switches]
    assert before[2] == "tf32" and product_precision("cuda") == "tf32"
    with full_precision(), full_precision():
        assert product_precision("cuda") == product_precision("cpu") == "float32"
    with full_convolutions():
        assert all(each.conv.fp32_precision == "ieee" for each in of_all)
    assert [each.fp32_precision for each in switches] == before
    if way == "torch.backends.fp32_precision":  # and what followed it still does
        torch.backends.fp32_precision = "ieee"
        assert product_precision("cuda") == product_precision("cpu") == "float32"


def test_nothing_set_stays_nothing_set():
    with full_precision():
        pass
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == "none"
    torch.backends.fp32_precision = "tf32"  # what is not set for CUDA still follows
    assert product_precision("cuda") == "tf32"
