"""A rule for a layer of one's own: two functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, per_example_gradients, register_rule, rules
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts
from hf_dp.errors import InvalidArgumentError, UnsupportedModelError


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return torch.tanh(x * self.scale * factor + self.shift)


class Mixing(nn.Module):
    """A matrix that a rule gives as outer products."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Net(nn.Module):
    def __init__(self, middle: nn.Module):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), middle, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().flatten(1).sum(1)


@pytest.fixture(autouse=True)
def no_rule_stays(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


def keep_scale(module, x, *, factor=1.0):
    return (x,)


def scale_gradients(module, kept, grad):
    inner = grad * (1 - torch.tanh(kept[0] * module.scale + module.shift).square())
    return {"scale": (inner * kept[0]).flatten(1, -2).sum(1), "shift": inner.flatten(1, -2).sum(1)}


def outer_products(module, kept, grad):
    return {"matrix": OuterProducts(kept[0], grad)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("middle", "keep", "gradients"),
    [(Scale, keep_scale, scale_gradients), (Mixing, lambda module, x: (x,), outer_products)],
    ids=["dense", "outer products"],
)
def test_a_registered_rule_is_exact(middle, keep, gradients, strategy):
    torch.manual_seed(0)
    called = []
    register_rule(middle, keep, lambda *args: called.append(1) or gradients(*args))
    model, x = Net(middle()).double(), torch.randn(5, 3, 3).double()
    expected = [
        torch.stack([g.square().sum() for g in one.values()]).sum().sqrt()
        for one in per_example_gradients(model(x), dict(model.named_parameters()))
    ]
    with ClippingEngine(model, 0.1, strategy=strategy) as engine:
        torch.testing.assert_close(
            engine.backward(model(x)), torch.stack(expected), rtol=1e-9, atol=0
        )
    assert bool(called) == (strategy != "per_example")


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (
            lambda m, kept, grad: {"scale": grad.sum((0, 1)), "shift": grad.sum(1)},
            r"Scale `middle` gave Dense .*\(4,\)",
        ),
        (
            lambda m, kept, grad: {"scale": grad, "shift": grad.sum(1)},
            r"Scale `middle` gave Dense .*\(5, 3, 4\)",
        ),
        (
            lambda m, kept, grad: {"scale": OuterProducts(grad, grad), "shift": grad.sum(1)},
            "gave OuterProducts",
        ),
        (lambda m, kept, grad: {"scale": grad.sum(1)}, r"none for its trainable \['shift'\]"),
    ],
    ids=["summed over examples", "not summed over positions", "another form", "a name is missing"],
)
def test_wrong_shapes_are_refused(gradients, message):
    register_rule(Scale, keep_scale, gradients)
    model = Net(Scale())
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedModelError, match=message):
        engine.backward(model(torch.randn(5, 3, 3)))


def test_frozen_parameters_need_no_gradient():
    register_rule(Scale, keep_scale, lambda *args: {"shift": scale_gradients(*args)["shift"]})
    model = Net(Scale())
    model.middle.scale.requires_grad_(False)
    with ClippingEngine(model, 0.1) as engine:
        engine.backward(model(torch.randn(5, 3, 3)))
        assert "middle.scale" not in engine.collect()


@pytest.mark.parametrize("value", [nn.Linear(2, 2), "Linear", int])
def test_what_is_no_module_class(value):
    with pytest.raises(
        InvalidArgumentError, match="`module_class` to be a subclass of torch.nn.Module"
    ):
        register_rule(value, keep_scale, scale_gradients)


@pytest.mark.parametrize("known", [nn.Linear, Scale])
def test_a_second_rule_for_a_class_is_refused(known):
    if known is Scale:
        register_rule(Scale, keep_scale, scale_gradients)
    with pytest.raises(InvalidArgumentError, match="to have no rule yet"):
        register_rule(known, keep_scale, scale_gradients)


def test_a_subclass_does_not_inherit_a_rule():
    class Doubled(Scale):
        def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            return 2 * super().forward(x)

    register_rule(Scale, keep_scale, scale_gradients)
    assert rules.find_rule(Scale()) is not None and rules.find_rule(Doubled()) is None
