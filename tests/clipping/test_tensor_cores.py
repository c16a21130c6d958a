"""Products of bfloat16 factors on tensor cores: what they cut off is inside what norms and sums claim.

On the CPU they are made up, with the most that an H100 was seen to cut off: 39 of the sum's 2^-24ths
for 1,024 terms, and in proportion for others.
"""

import pytest
import torch
from models import DEVICES
from torch import Tensor

from hf_dp.clipping import gradients, rounding
from hf_dp.clipping.gradients import OuterProducts, Weights
from hf_dp.clipping.rounding import outer_norms, outer_sums, pieces, unit

CUT_OFF = 39 / 1024 * 2**-24
# Examples, positions, and both widths; sums of more than LONG_SUM terms, of fewer, of just as many,
# and of some that are no multiple of any.
SIZES = [(8, 300, 32, 48), (4, 128, 48, 32), (2, 1024, 24, 24), (2, 1031, 17, 1600)]


def cutting_off(one: Tensor, other: Tensor, total: Tensor | None = None) -> Tensor:
    product, size = (
        torch.bmm(*pair)
        for pair in ((one.double(), other.double()), (one.double().abs(), other.double().abs()))
    )
    product = product - one.shape[2] * CUT_OFF * size
    return (product if total is None else total + product).float()


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(gradients, "_SLOW", 0)
    monkeypatch.setattr(gradients, "_SUMS", 2**14)


@pytest.fixture
def made_up(small_blocks, monkeypatch) -> str:
    def all_bf16(*each: Tensor) -> bool:
        return all(factor.dtype == torch.bfloat16 for factor in each)

    for module in (rounding, gradients):
        monkeypatch.setattr(module, "on_tensor_cores", all_bf16)
        monkeypatch.setattr(module, "exact_products", cutting_off)
    return "cpu"


@pytest.fixture(params=DEVICES)
def device(request, small_blocks) -> str:
    return request.getfixturevalue("made_up") if request.param == "cpu" else request.param


def factors(size: tuple[int, ...], positive: bool, device: str) -> OuterProducts:
    b, length, height, width = size
    draw = torch.rand if positive else torch.randn
    left, right = draw(b, length, height), draw(b, length, width)
    return OuterProducts(left.bfloat16().to(device), right.bfloat16().to(device))


def relative_errors(size: tuple[int, ...], positive: bool, device: str) -> list[float]:
    """Return how far a sum, gradients and norms are off, in what they claim to be off at most."""
    use = factors(size, positive, device)
    left, right = use.left.double(), use.right.double()
    values = torch.rand(size[0], device=device)
    total = torch.zeros(size[2], size[3], dtype=torch.float64, device=device)
    use.add_weighted_sum(total, Weights(values))
    each = torch.bmm(left.mT, right)
    of_sum = (total - torch.einsum("b,bmn->mn", values.double(), each)).norm() / (
        values * use.slack()
    ).sum()
    explicit = (outer_sums(use.left, use.right) - each).flatten(1).norm(dim=1) / use.slack()
    (norms,) = outer_norms([(use.left, use.right)])
    squared = (norms.squared - each.flatten(1).square().sum(1)).abs() / norms.error
    return [float(of_sum), float(explicit.max()), float(squared.max())]


@pytest.mark.parametrize("positive", [True, False], ids=["positive", "random"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_cut_off_is_inside_what_is_claimed(size, positive, device):
    assert max(relative_errors(size, positive, device)) <= 1


@pytest.mark.parametrize(("name", "which"), [("LONG_SUM", 0), ("LONG_SUM", 1), ("SHORT_SUM", 2)])
def test_planted_longer_sums_are_seen(name, which, made_up, monkeypatch):
    for module in (rounding, gradients):
        monkeypatch.setattr(module, name, 2**20, raising=False)
    assert relative_errors((1, 4096, 17, 3072), True, made_up)[which] > 1


def test_three_pieces_are_exact_and_two_are_not():
    values = torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,))
    found = pieces(values)
    assert {each.dtype for each in found} == {torch.bfloat16}
    assert torch.equal(sum(each.double() for each in found), values.double())
    assert not torch.equal(sum(each.double() for each in found[1:]), values.double())


def test_pieces_are_shared_by_weights_that_read_the_same_input(device):
    use, weights = factors(SIZES[0], False, device), Weights(torch.rand(8, device=device))
    assert weights.pieces(use.right) is weights.pieces(use.right)
    assert weights.pieces(use.right) is not weights.pieces(use.left)


def test_unit_is_what_the_docstring_compares_with():
    assert unit(torch.float32) == 64 * 2**-24
