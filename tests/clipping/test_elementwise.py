"""Parameters that only multiply activations or are added to them: their gradients equal a loop over
single examples; a module does not run again after the first batch; any other use does."""

from typing import Any

import pytest
import torch
from models import Net, assert_net_exact, assert_same_sums, clip_losses, loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_dp.clipping import ClippingEngine, elementwise
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import UnaccountedGradientError, UnsupportedModelError

WIDTH, LENGTH = 4, 5


class Block(nn.Module):
    """Owns two parameters and holds another layer, as LayerScale stands in ConvNeXt's blocks."""

    def __init__(self, compute: Any, scale: tuple[int, ...], shift: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(shape)) for shape in (scale, shift))
        self.inner, self.compute, self.runs = nn.Linear(WIDTH, WIDTH), compute, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.compute(self, self.inner(x))


W, T = (WIDTH,), (LENGTH, WIDTH)
WATCHED = {
    "scale and shift": (lambda m, x: x * m.scale + m.shift, W, W),
    "the other way round": (lambda m, x: m.shift + torch.mul(m.scale, x), W, W),
    "numbers": (lambda m, x: torch.add(x, m.shift) * m.scale, (), ()),
    "each position": (lambda m, x: x * m.scale + m.shift, T, (1, *T)),
    "ones in front": (lambda m, x: x * m.scale + m.shift, (1, 1, WIDTH), (1, WIDTH)),
    "other shapes": (
        lambda m, x: x * (1 * m.scale.flatten()) + m.shift.reshape(WIDTH),
        (2, 2),
        (WIDTH, 1),
    ),
    "times and plus numbers": (lambda m, x: x * (1 + 2.5 * m.scale) + 3 * m.shift, W, W),
    "twice": (lambda m, x: torch.sin(x * m.scale + m.shift) * m.scale, W, W),
    "and with dropout": (lambda m, x: F.dropout(x * m.scale + m.shift, 0.0), W, W),
    "in place afterwards": (lambda m, x: (x * m.scale + m.shift).sin_().mul_(2), W, W),
}
LEFT = {
    "a product of matrices": (lambda m, x: x @ m.scale + m.shift, (WIDTH, WIDTH), W),
    "and a sum": (lambda m, x: x * m.scale + m.shift + m.shift.sum(), W, W),
    "a function of it": (lambda m, x: x * m.scale.exp() + m.shift, W, W),
    "its transpose": (lambda m, x: x * m.scale + m.shift.T, W, (WIDTH, LENGTH)),
    "one that is not used": (lambda m, x: x * m.scale, W, W),
    "in channels": (lambda m, x: x * m.scale + m.shift, W, (LENGTH, 1)),
    "of each other": (lambda m, x: x * (m.scale * m.shift), W, W),
    "seen as other numbers": (
        lambda m, x: x * m.scale + m.shift.view(torch.int64).view(torch.float64),
        W,
        W,
    ),
}


def net(name: str) -> Any:
    torch.manual_seed(0)
    block = Block(*(WATCHED | LEFT)[name])
    head = nn.Linear(WIDTH, 2)
    compute = lambda net, x: torch.sin(net.head(net.block(net.first(x)))).sum((1, 2))  # noqa: E731
    return Net(compute, first=nn.Linear(3, WIDTH), block=block, head=head).double()


def rows() -> Tensor:
    return torch.randn(6, LENGTH, 3, dtype=torch.float64)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WATCHED | LEFT)
def test_gradients_equal_a_loop_over_examples(name, strategy):
    model, x = net(name), rows()
    for _ in range(2):  # also once it is known
        assert_net_exact(model, x, strategy)
    assert_net_exact(model, x[:1], strategy)


@pytest.mark.parametrize("name", WATCHED | LEFT)
def test_only_others_run_again(name):
    model, x = net(name), rows()
    with ClippingEngine(model, 1.0) as engine:
        for known in (False, True, True):
            model.block.runs = 0
            engine.backward(model(x))
            assert (model.block.runs == 1) is (known and name in WATCHED)


@pytest.mark.parametrize("name", ["scale and shift", "twice", "and a sum"])
def test_in_a_checkpoint(name):
    model, x = net(name), rows()
    expected = loop(model, x.split(1), lambda net, row: net(row)[0])
    within = model.compute
    model.compute = lambda net, x: checkpoint(within, net, x, use_reentrant=False)
    with ClippingEngine(model, expected.clipping_norm, strategy="two_pass") as engine:
        for _ in range(2):  # the second time, it is known what the block does
            norms = engine.backward(model(x))
            torch.testing.assert_close(norms, expected.norms, rtol=1e-9, atol=0)
            assert_same_sums(engine.collect(), expected.sums, atol=1e-9)


def test_under_autocast_the_gradient_is_that_of_the_values_that_met():
    torch.manual_seed(0)
    model = net("scale and shift").float()
    x = rows().float()

    def losses() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    expected = torch.autograd.grad(losses().sum(), model.block.scale)[0]
    clip_losses(model, losses, 1e9)
    _, sums = clip_losses(model, losses, 1e9)
    torch.testing.assert_close(sums["block.scale"].float(), expected, rtol=2e-2, atol=1e-2)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * x).sum((0, 1))


def test_a_use_that_is_not_seen():
    """An autograd function of the module's own takes the values as any tensor."""
    scaled = lambda m, x: _Scaled.apply(x * m.scale + m.shift, m.scale)  # noqa: E731
    model, x = net("twice"), rows()
    model.block.compute = scaled
    for _ in range(2):
        assert_net_exact(model, x)
    other = net("twice")
    assert_net_exact(other, x)
    other.block.compute = scaled  # only after its first batch
    with ClippingEngine(other, 1.0) as engine:
        with pytest.raises(UnaccountedGradientError, match=r"'scale' of Block `block`"):
            engine.backward(other(x))


def test_one_example_does_not_show_whether_examples_are_mixed():
    model, x = net("scale and shift"), rows()
    model.block.compute = lambda m, x: (x - x.mean(0)) * m.scale + m.shift
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(model(x[:1]))
        with pytest.raises(UnsupportedModelError, match="mixes examples"):
            engine.backward(model(x))


def test_what_all_examples_share_is_left_to_the_fallback():
    """As many positions as examples, and a product of two things that no example is in."""
    model = net("scale and shift")
    model.block.register_buffer("table", torch.randn(LENGTH, WIDTH, dtype=torch.float64))
    model.block.compute = lambda m, x: x + m.table * m.scale + m.shift
    x = rows()[:LENGTH]
    for _ in range(2):
        assert_net_exact(model, x)


def test_rows_one_by_one_are_left_to_the_fallback():
    """No operation has the examples in its first dimension."""
    model, x = net("scale and shift"), rows()
    one = lambda m, row: row[None] * m.scale + m.shift  # noqa: E731
    model.block.compute = lambda m, x: torch.cat([one(m, row) for row in x])
    for _ in range(2):
        assert_net_exact(model, x)


@pytest.mark.parametrize(
    ("planted", "name"),
    [("factor", "times and plus numbers"), ("x", "scale and shift"), ("shape", "each position")],
)
def test_planted_bugs_are_seen(planted, name, monkeypatch):
    see = elementwise.Elementwise._see

    def wrong(self, of, factor, shape, saved, grad):
        factor, saved = (1.0 if planted == "factor" else factor, saved)
        if planted == "x" and saved[0] is not None:
            saved = (torch.ones_like(saved[0]),)
        grad = grad.roll(1, 1) if planted == "shape" else grad
        see(self, of, factor, shape, saved, grad)

    monkeypatch.setattr(elementwise.Elementwise, "_see", wrong)
    model, x = net(name), rows()
    assert_net_exact(model, x)  # by the fallback
    with pytest.raises(AssertionError):
        assert_net_exact(model, x)
