"""A rule for a layer of one's own: a decorated function."""

from __future__ import annotations

import pytest
import torch
from models import Net, assert_net_exact, assert_refused, clip_losses
from torch import Tensor, nn

from hf_dp.clipping import register_rule, rules
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts
from hf_dp.errors import InvalidArgumentError


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


def between(middle: nn.Module) -> Net:
    return Net(
        lambda net, x: net.last(net.middle(net.first(x))).square().flatten(1).sum(1),
        first=nn.Linear(3, 4),
        middle=middle,
        last=nn.Linear(4, 1),
    )


@pytest.fixture(autouse=True)
def no_rule_stays(monkeypatch):
    for kind in (Scale, Mixing):
        monkeypatch.setitem(rules.RULES, kind, None)
        del rules.RULES[kind]


def scale_gradients(use, kept, grad):
    inner = grad * (1 - torch.tanh(kept[0] * use.module.scale + use.module.shift).square())
    return {"scale": (inner * kept[0]).flatten(1, -2).sum(1), "shift": inner.flatten(1, -2).sum(1)}


def outer_products(use, kept, grad):
    return {"matrix": OuterProducts(kept[0], grad)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("middle", "gradients"),
    [(Scale, scale_gradients), (Mixing, outer_products)],
    ids=["dense", "outer products"],
)
def test_a_registered_rule_is_exact(middle, gradients, strategy):
    torch.manual_seed(0)
    called = []
    register_rule(middle)(lambda *args: called.append(1) or gradients(*args))
    model, x = between(middle()).double(), torch.randn(5, 3, 3).double()
    assert_net_exact(model, x, strategy)
    assert bool(called) == (strategy != "per_example")


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (lambda use, kept, grad: {"scale": grad.sum((0, 1)), "shift": grad.sum(1)}, r"Scale `middle` gave Dense .*\(4,\)"),
        (lambda use, kept, grad: {"scale": grad, "shift": grad.sum(1)}, r"Scale `middle` gave Dense .*\(5, 3, 4\)"),
        (lambda use, kept, grad: {"scale": OuterProducts(grad, grad), "shift": grad.sum(1)}, "gave OuterProducts"),
        (lambda use, kept, grad: {"scale": grad.sum(1)}, r"none for its trainable \['shift'\]"),
    ],
    ids=["summed over examples", "not summed over positions", "another form", "a name is missing"],
)  # fmt: skip
def test_wrong_shapes_are_refused(gradients, message):
    register_rule(Scale)(gradients)
    assert_refused(between(Scale()), torch.randn(5, 3, 3), message)


def test_frozen_parameters_need_no_gradient():
    register_rule(Scale)(lambda *args: {"shift": scale_gradients(*args)["shift"]})
    model = between(Scale())
    model.middle.scale.requires_grad_(False)
    _, sums = clip_losses(model, lambda: model(torch.randn(5, 3, 3)), 0.1)
    assert "middle.shift" in sums and "middle.scale" not in sums


@pytest.mark.parametrize("value", [nn.Linear(2, 2), "Linear", int, nn.Linear, Scale])
def test_what_is_no_module_class_or_has_a_rule_is_refused(value):
    register_rule(Scale)(scale_gradients)
    with pytest.raises(InvalidArgumentError, match="torch.nn.Module that have no rule yet"):
        register_rule(value)(scale_gradients)


def test_a_subclass_does_not_inherit_a_rule_and_a_rule_may_leave_modules_out():
    class Doubled(Scale):
        def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            return 2 * super().forward(x)

    register_rule(Scale, serves=lambda module: module.training)(scale_gradients)
    assert rules.find_rule(Scale()) is not None
    assert rules.find_rule(Scale().eval()) is None and rules.find_rule(Doubled()) is None
