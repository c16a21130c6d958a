"""Rules for layers of one's own; modules without a rule are run again, example by example."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import (
    Net,
    assert_equal,
    assert_net_exact,
    assert_refused,
    clip_losses,
    loop_over_losses,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from hf_dp.clipping import register_rule, rules
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts
from hf_dp.errors import InvalidArgumentError


class Affine(nn.Module):
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


@pytest.fixture(autouse=True)
def no_rule_stays(monkeypatch):
    for kind in (Affine, Mixing):
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
    [(Affine, scale_gradients), (Mixing, outer_products)],
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
        (lambda use, kept, grad: {"scale": grad.sum((0, 1)), "shift": grad.sum(1)}, r"Affine `middle` gave Dense .*\(4,\)"),
        (lambda use, kept, grad: {"scale": grad, "shift": grad.sum(1)}, r"Affine `middle` gave Dense .*\(5, 3, 4\)"),
        (lambda use, kept, grad: {"scale": OuterProducts(grad, grad), "shift": grad.sum(1)}, "gave OuterProducts"),
        (lambda use, kept, grad: {"scale": grad.sum(1)}, r"none for its trainable \['shift'\]"),
    ],
    ids=["summed over examples", "not summed over positions", "another form", "a name is missing"],
)  # fmt: skip
def test_wrong_shapes_are_refused(gradients, message):
    register_rule(Affine)(gradients)
    assert_refused(between(Affine()), torch.randn(5, 3, 3), message)


def test_frozen_parameters_need_no_gradient():
    register_rule(Affine)(lambda *args: {"shift": scale_gradients(*args)["shift"]})
    model = between(Affine())
    model.middle.scale.requires_grad_(False)
    _, sums = clip_losses(model, lambda: model(torch.randn(5, 3, 3)), 0.1)
    assert "middle.shift" in sums and "middle.scale" not in sums


@pytest.mark.parametrize("value", [nn.Linear(2, 2), "Linear", int, nn.Linear, Affine])
def test_what_is_no_module_class_or_has_a_rule_is_refused(value):
    register_rule(Affine)(scale_gradients)
    with pytest.raises(InvalidArgumentError, match="torch.nn.Module that have no rule yet"):
        register_rule(value)(scale_gradients)


def test_a_subclass_does_not_inherit_a_rule_and_a_rule_may_leave_modules_out():
    class Doubled(Affine):
        def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            return 2 * super().forward(x)

    register_rule(Affine, serves=lambda module: module.training)(scale_gradients)
    assert rules.find_rule(Affine()) is not None
    assert rules.find_rule(Affine().eval()) is None and rules.find_rule(Doubled()) is None


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


class Noisy(Scale):
    def forward(self, x):
        return nn.functional.dropout(x * self.gain, 0.5, training=True)


class Pair(Scale):
    def forward(self, x, *, scale=None):
        return x * self.gain, (x + self.gain).sum(-1)


def between(middle: nn.Module, inputs: int = 4) -> Net:
    """A net with this module in the middle."""

    def losses(net: Any, x: Tensor) -> Tensor:
        y = net.middle(net.first(x))
        y = y[0] * y[1][..., None] if isinstance(y, tuple) else y
        return net.last(y).flatten(1).square().sum(1)

    return Net(losses, first=nn.Linear(3, inputs), middle=middle, last=nn.Linear(4, 1))


CASES = {
    "own parameter": lambda: between(Scale()),
    "bare parameters and a child": lambda: between(Patches(), 3),
    "two outputs": lambda: between(Pair()),
    "inside a sequence, twice": lambda: between(
        (lambda s: nn.Sequential(s, nn.ReLU(), s))(Scale())
    ),
    "at the root": lambda: Scale(3),
    "dropout": lambda: between(Noisy()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_backward_an_example_on_the_same_masks(case, strategy):
    torch.manual_seed(0)
    model = CASES[case]().double()
    x = torch.randn(5, 5, 3).double()

    def losses():
        torch.manual_seed(3)  # the same dropout masks
        out = model(x)
        return out if out.dim() == 1 else out.flatten(1).sum(1)

    expected = loop_over_losses(model, losses(), 0.5)
    assert_equal(*clip_losses(model, losses, 0.5, strategy=strategy), expected)


class Jitter(Noisy):
    def forward(self, x):
        return x * self.gain + torch.rand_like(x)


class DropsAndJitters(Noisy):
    def forward(self, x):
        return super().forward(x) * torch.rand_like(x)


class Mixes(Scale):
    def forward(self, x):
        return super().forward(x) + 0.1 * x.mean(0)


class HandMadeBatchNorm(Scale):
    """Alone it divides by a deviation of 0: NaN, which must not pass for agreement."""

    def forward(self, x):
        return (x - x.mean(0)) / x.std(0, correction=0) + self.gain


class Spectrum(Scale):
    def forward(self, x):
        return torch.fft.fft(x * self.gain)


class Shifted(Scale):
    """By a table that all examples share, of as many rows as there are examples."""

    def forward(self, x, table):
        return super().forward(x) + table.sum(0)


class Opaque(Scale):
    """No tree of tensors describes its output. The parameter would silently never train."""

    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))


class OtherPadding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, 2)


class Renormed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, self.padding_idx, 1.0)


def parametrized() -> nn.Module:
    """Its output's first dimension counts outputs; if it equals b, no shape shows that."""
    layer = nn.Linear(3, 4)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


def of(module: nn.Module, compute: Any = lambda middle, x: middle(x)) -> Net:
    """A net of one module, and what it computes."""
    return Net(lambda net, x: compute(net.middle, x).flatten(1).sum(1), middle=module)


# Inputs are (4, 5, 3), or tokens.
REFUSED = {
    "a draw that is no dropout": (lambda: between(Jitter()), "Jitter `middle` .*dropout"),
    "a draw beside dropout": (lambda: between(DropsAndJitters()), "DropsAndJitters `middle` .*dropout"),
    "examples mixed": (lambda: between(Mixes()), "Mixes .*mixes examples"),
    "a batch norm by hand": (lambda: between(HandMadeBatchNorm()), "mixes examples"),
    "complex numbers": (lambda: of(Spectrum(3), lambda middle, x: middle(x).abs()), "complex"),
    "a shared table": (
        lambda: of(Shifted(3), lambda middle, x: middle(x, torch.ones(4, 3))), "Shifted .*examples in their first dimension",
    ),
    "no row for each example": (
        lambda: of(Scale(3), lambda middle, x: x + middle(torch.ones(7, 3)).sum()), r"Scale .*\(7, 3\)",
    ),
    "an opaque output": (lambda: of(Opaque(3), lambda middle, x: middle(x).logits), "Opaque.*SimpleNamespace"),
    "a parametrized weight of as many rows as examples": (lambda: of(parametrized()), "ParametrizationList"),
    "group norm of flattened rows": (
        lambda: of(nn.GroupNorm(1, 3), lambda middle, x: middle(x.flatten(0, 1)).view(x.shape)), r"GroupNorm `middle` .*\(20, 3\)",
    ),
    "an embedding of other padding": (lambda: of(OtherPadding(9, 6)), "OtherPadding `middle` calls F.embedding with"),
    "a renormed embedding": (lambda: of(Renormed(9, 6)), "Renormed `middle` calls F.embedding with"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_apart_by_example_is_refused(case):
    build, said = REFUSED[case]
    tokens = torch.randint(0, 9, (4, 5))
    assert_refused(build(), tokens if "embedding" in case else torch.randn(4, 5, 3), said)


class Branching(Scale):
    """Cannot be mapped: it looks at values. It is run once for each example instead."""

    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) > 0 else 2 * super().forward(x)


def test_a_module_that_cannot_be_mapped_is_run_for_each_example():
    class PerRow(Branching):
        def forward(self, x):
            return torch.cat([super(PerRow, self).forward(row) for row in x.split(1)])

    assert_net_exact(between(PerRow()).double(), torch.randn(4, 5, 3).double())


class Doubled(nn.Embedding):
    """A subclass that scales, as Gemma's embedding does: the parent's rule would halve its norm."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", [nn.Embedding, Doubled])
def test_subclasses_and_replaced_forwards_do_not_get_the_plain_rule(kind):
    torch.manual_seed(0)
    parts = {"embedding": kind(9, 4), "linear": nn.Linear(4, 4)}
    model = Net(lambda net, x: net.linear(net.embedding(x)).square().sum((1, 2)), **parts)
    original = model.linear.forward
    model.linear.forward = lambda value: 3 * original(value)
    assert_net_exact(model.double(), torch.randint(0, 9, (3, 5)))
