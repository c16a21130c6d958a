"""Modules without a rule: their own parameters' gradients are taken per example by differentiating them again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dp.clipping import ClippingEngine, per_example_gradients
from hf_dp.errors import UnsupportedModelError


class Scale(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.tanh(x * self.gain)


class Patches(nn.Module):
    """As ViT's embeddings: bare parameters expanded over the batch, and a child with a rule."""

    def __init__(self, width=4):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.randn(1, 6, width))
        self.projection = nn.Linear(3, width)

    def forward(self, x):
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), self.projection(x)], 1)
        return tokens + self.position_embeddings


class Noisy(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return nn.functional.dropout(x * self.gain, 0.5, training=True)


class Pair(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x, *, scale=None):
        return x * self.gain, (x + self.gain).sum(-1)


class Net(nn.Module):
    def __init__(self, middle, inputs=3):
        super().__init__()
        self.first = nn.Linear(3, inputs)
        self.middle = middle
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        y = self.middle(self.first(x))
        y = y[0] * y[1][..., None] if isinstance(y, tuple) else y
        return self.last(y).flatten(1).square().sum(1)


CASES = {
    "own parameter": lambda: Net(Scale(), 4),
    "bare parameters and a child": lambda: Net(Patches()),
    "two outputs": lambda: Net(Pair(), 4),
    "inside a sequence, twice": lambda: Net((lambda s: nn.Sequential(s, nn.ReLU(), s))(Scale()), 4),
    "at the root": lambda: Scale(3),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_backward_an_example_on_the_same_masks(case):
    torch.manual_seed(0)
    model = CASES[case]().double()
    x = torch.randn(5, 5, 3).double()

    def losses():
        torch.manual_seed(3)  # the same dropout masks
        out = model(x)
        return out if out.dim() == 1 else out.flatten(1).sum(1)

    parameters = dict(model.named_parameters())
    gradients = list(per_example_gradients(losses(), parameters))
    norms = [torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in gradients]
    with ClippingEngine(model, 0.5) as engine:
        got_norms = engine.backward(losses())
        got = engine.collect()
    torch.testing.assert_close(got_norms, torch.stack(norms), rtol=1e-9, atol=0)
    for name in parameters:
        expected = sum(one[name] * min(1.0, 0.5 / float(n)) for one, n in zip(gradients, norms, strict=True))
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-12)


def test_a_module_that_draws_random_numbers_is_refused():
    model = Net(Noisy(), 4)
    with ClippingEngine(model, 0.1), pytest.raises(UnsupportedModelError, match="Noisy .*dropout"):
        model(torch.randn(4, 5, 3))


def test_a_nan_stays_with_its_example():
    model = Net(Scale(), 4).double()
    x = torch.randn(4, 5, 3).double()
    x[2] = float("nan")
    with ClippingEngine(model, 0.1) as engine:
        norms = engine.backward(model(x))
        sums = engine.collect()
    with ClippingEngine(model, 0.1) as engine:
        engine.backward(model(x[[0, 1, 3]]))
        expected = engine.collect()
    assert torch.isinf(norms).tolist() == [False, False, True, False]
    for name in sums:
        torch.testing.assert_close(sums[name], expected[name], rtol=1e-12, atol=1e-12)


def test_an_input_without_one_row_per_example_is_refused():
    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, table):
            return table * self.bias

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative = Relative()

        def forward(self, x):
            return (x + self.relative(torch.ones(7, 3)).sum()).sum(1)

    model = Uses()
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedModelError, match=r"Relative .*\(7, 3\)"):
        engine.backward(model(torch.randn(4, 3)))
