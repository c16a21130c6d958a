"""Norms and clipped sums equal a loop over single, unpadded examples in plain autograd; sums over
physical batches; and bugs of norms and sums that are planted.

These are invariants 2 and 12. Whole architectures are in test_architectures.py.
"""

import sys
from functools import partial

import models
import pytest
import torch
from models import (
    BUILDERS,
    EXACT,
    SHORT,
    Net,
    TinyTied,
    assert_net_exact,
    assert_refused,
    assert_same_sums,
    batch_for,
    bert,
    clip_losses,
    clipped,
    disagreement,
    example_norms,
    rows,
)
from torch import Tensor, nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

from hf_dp.clipping import ClippingEngine, gradients, norms, self_check
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient
from hf_dp.clipping.rules import affine, find_rule
from hf_dp.clipping.rules.rule import RULES, Rule
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_tied_embedding_and_head(padding_idx, length):
    """A row at the padding index gets no gradient from look-ups but one from the head."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, length))
    tokens[:, 0] = 3
    tied = TinyTied(padding_idx=padding_idx)
    model = Net(lambda net, tokens: torch.sin(net.tied(tokens)).mean(1).sum(1), tied=tied)
    assert_net_exact(model.double(), tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (1, {"stride": 2}),
        (3, {"padding": 1}),
        (7, {"stride": 2, "padding": 3}),
        (3, {"dilation": 2, "padding": 2, "stride": 2}),
        ((3, 5), {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}),
    ],
)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d,
        WeightStandardizedConv2d,
        partial(nn.Conv2d, groups=4),
        partial(nn.Conv2d, groups=2),
    ],
    ids=["plain", "standardized", "depthwise", "groups"],
)
def test_convolutions(layer, size, options, strategy, monkeypatch):
    """Memory holds an image channel by channel, or pixel by pixel."""
    monkeypatch.setattr(affine, "_TERMS", 24)  # so that a few rows at a time are added up
    torch.manual_seed(0)
    options = {"padding": 0} | options
    layers = {"one": layer(4, 8, size, bias=True, **options), "two": nn.Conv2d(8, 2, 1)}
    model = Net(lambda net, x: net.two(torch.sin(net.one(x))).square().sum((1, 2, 3)), **layers)
    x = torch.randn(3, 4, 13, 11, dtype=torch.float64)
    assert_net_exact(model.double(), x, strategy)
    assert_net_exact(model, x.to(memory_format=torch.channels_last), strategy)


@pytest.mark.parametrize(
    ("layer", "options"),
    [(nn.Conv2d, {}), (nn.Conv2d, {"groups": 3}), (WeightStandardizedConv2d, {})],
)
def test_images_one_by_one_are_refused(layer, options):
    """Channels, rows and columns are as many as the examples, so that no shape tells them apart."""
    parts = {"one": layer(3, 3, 1, padding=0, **options)}
    compute = lambda net, x: torch.stack([net.one(image) for image in x]).sum((1, 2, 3))  # noqa: E731
    assert_refused(Net(compute, **parts), torch.randn(3, 3, 3, 3), "four dimensions")


@pytest.mark.parametrize("groups", [2, 4])
def test_rounding_of_a_convolution_in_groups_is_within_its_slack(groups):
    """Sums of equal terms drift the most: by 23 times the slack, if all are added one by one."""
    layer = nn.Conv2d(4, 4, 3, padding=1, stride=(1, 2), groups=groups)
    x, grad = torch.full((2, 4, 112, 112), 0.1), torch.full((2, 4, 112, 56), 0.7)
    found, exact = (affine._of_groups(layer, x.to(t), grad.to(t)) for t in (x.dtype, torch.float64))
    error = (found.gradients - exact.gradients).flatten(1).norm(dim=1)
    assert (error < found.slack()).all()


def test_a_convolution_that_pads_by_the_size_of_its_input():
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(3, 4, 3, stride=2, padding="SAME")
    assert layer.pad is not None and find_rule(layer)
    model = Net(lambda net, x: net.one(x).square().sum((1, 2, 3)), one=layer)
    assert_net_exact(model.double(), torch.randn(4, 3, 8, 7, dtype=torch.float64))


@pytest.mark.parametrize("cuts", [[[2], [0, 3], [1]], [[0], [1], [2], [3]]], ids=len)
def test_physical_batches_do_not_change_the_sums(cuts):
    model = models.gpt2()
    batch = batch_for(model, SHORT)
    together, expected = clipped(model, batch, 0.1)
    with ClippingEngine(model, 0.1) as engine:
        norms = [engine.backward(per_example_loss(model, rows(batch, cut))) for cut in cuts]
        sums = engine.collect()
    torch.testing.assert_close(torch.cat(norms), together[sum(cuts, [])], rtol=EXACT, atol=0)
    assert_same_sums(sums, expected, atol=EXACT)


def test_collect_resets_and_backward_calls_add_up():
    model = bert()
    batch = batch_for(model, SHORT)
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(per_example_loss(model, batch))
        once = engine.collect()
        engine.backward(per_example_loss(model, batch))
        engine.backward(per_example_loss(model, batch))
        twice = engine.collect()
        nothing = engine.collect()
    assert_same_sums(twice, {name: 2 * value for name, value in once.items()}, atol=EXACT)
    assert all(not value.any() for value in nothing.values())


def test_keys_are_the_trainable_parameters_and_unused_ones_get_zeros():
    model = models.gpt2()
    model.unused = nn.Linear(3, 2)
    model.transformer.ln_f.requires_grad_(False)
    _, sums = clipped(model, batch_for(model, SHORT), 1.0)
    expected = [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad]
    assert [(name, total.shape) for name, total in sums.items()] == expected
    assert not sums["unused.weight"].any() and not sums["unused.bias"].any()


# -- planted bugs are seen ---


def no_products_between_uses(monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))


def one_layer_unclipped(monkeypatch):
    original = OuterProducts.weighted_factors

    def unclipped(self, weights):
        if (self.left.shape[2], self.right.shape[2]) == (24, 16):
            weights = gradients.Weights(torch.ones_like(weights.values))
        return original(self, weights)

    monkeypatch.setattr(OuterProducts, "weighted_factors", unclipped)


def half_the_norm_in_one_rule(monkeypatch):
    rule = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(rule, "OuterProducts", lambda left, right: OuterProducts(left / 2, right))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (no_products_between_uses, "gpt2_tied"),
        (no_products_between_uses, "albert"),
        (one_layer_unclipped, "bert"),
        (half_the_norm_in_one_rule, "bert"),
    ],
)
def test_planted_bugs_are_seen(plant, name, monkeypatch):
    model = BUILDERS[name]()
    batch = batch_for(model, SHORT)
    assert disagreement(model, batch) < EXACT
    plant(monkeypatch)
    assert disagreement(model, batch) > 1e-3


# -- examples that are not finite are removed, as if they had not been sampled ---

LENGTHS = (6, 3, 6, 2)


class Scale(nn.Module):
    """Has a rule that a user registered."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


NO_ARCHITECTURE_HAS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "torch's RMS norm": lambda: nn.RMSNorm(4),
    "own": Scale,
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NO_ARCHITECTURE_HAS)
def test_rules_that_no_architecture_uses(name, strategy, value, monkeypatch):
    rule = Rule(lambda use, kept, grad: {"scale": (kept[0] * grad).sum(1)})
    monkeypatch.setitem(RULES, Scale, rule)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), NO_ARCHITECTURE_HAS[name](), nn.Linear(4, 2))
    x = torch.randn(3, 4, 3)  # also as (examples, channels, positions)

    def result(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = lambda: model(x).square().sum((1, 2))  # noqa: E731
        return clip_losses(model, losses, 0.5, strategy=strategy)

    expected_norms, expected = result(x[[0, 2]])
    x[1, 0, 0] = value
    norms, sums = result(x)
    assert norms[1] == torch.inf
    torch.testing.assert_close(norms[[0, 2]], expected_norms, rtol=1e-5, atol=0)
    assert_same_sums(sums, expected, atol=1e-5)


@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_torchs_rms_norm_has_the_epsilon_of_what_it_computes_in(scale):
    """For bfloat16 activations that is float32's."""
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(32).to(torch.bfloat16), (scale * torch.randn(2, 5, 32)).bfloat16()

    def losses() -> Tensor:
        return norm(x).float().square().sum((1, 2))

    (expected,) = torch.autograd.grad(losses().sum(), norm.weight)
    _, sums = clip_losses(norm, losses, 1e9)
    torch.testing.assert_close(sums["weight"].float(), expected.float(), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama", "albert"])
def test_bit_for_bit_the_sum_without_it(name):
    """Compare the example with weight 0 and the example spoiled. The shapes are the same, so no
    rounding differs."""
    model = BUILDERS[name](dtype=torch.float32)
    batch = batch_for(model, LENGTHS)

    def sums(factor: float) -> dict[str, Tensor]:
        factors = torch.tensor([1.0, factor, 1.0, 1.0])
        return clip_losses(model, lambda: per_example_loss(model, batch) * factors, 0.5)[1]

    nothing = sums(0.0)
    for value in (torch.nan, torch.inf):
        found = sums(value)
        assert all(torch.equal(found[key], nothing[key]) for key in nothing)


def test_a_whole_batch_can_go():
    model = bert()
    batch = batch_for(model, LENGTHS)
    norms, sums = clip_losses(model, lambda: per_example_loss(model, batch) * torch.nan, 0.5)
    assert torch.isinf(norms).all()
    assert not any(value.any() for value in sums.values())


def test_batches_before_and_after_one_that_goes_are_kept():
    model = bert()
    batch = batch_for(model, LENGTHS)
    _, expected = clipped(model, rows(batch, [0, 2]), 0.5)
    with ClippingEngine(model, 0.5) as engine:
        for row, factor in ((0, 1.0), (1, torch.nan), (2, 1.0)):
            engine.backward(per_example_loss(model, rows(batch, [row])) * factor)
        assert_same_sums(engine.collect(), expected, atol=1e-12)


@pytest.mark.parametrize("scale", [1e20, 1e30, 1e38])
def test_a_norm_that_overflows_float32_removes_its_example(scale):
    """The gradient is finite but its square is not, so its norm is unknown. A weight of C / inf
    would be 0 * x."""
    torch.manual_seed(0)
    model = TinyTied()
    tokens = torch.randint(0, 11, (3, 4))
    factors = torch.tensor([1.0, scale, 1.0])
    losses = lambda tokens: model(tokens).square().mean((1, 2))  # noqa: E731
    norms, sums = clip_losses(model, lambda: losses(tokens) * factors, 0.5)
    _, expected = clip_losses(model, lambda: losses(tokens[[0, 2]]), 0.5)
    assert norms[1] == torch.inf
    assert_same_sums(sums, expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e-40])
def test_a_norm_that_underflows_adds_next_to_nothing(scale):
    model, tokens = TinyTied(), torch.zeros(2, 3, dtype=torch.long)
    norms, sums = clip_losses(model, lambda: model(tokens).square().mean((1, 2)) * scale, 0.5)
    assert torch.isfinite(norms).all()
    assert all(float(value.abs().max()) <= 1e-15 for value in sums.values())


def test_the_self_check_refuses_a_model_that_is_not_finite():
    model = bert()
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    batch = batch_for(model, (3, 5))
    with pytest.raises(SelfCheckError):
        self_check(model, per_example_loss, batch, [rows(batch, [0]), rows(batch, [1])])


def test_a_squared_norm_of_minus_infinity_is_not_a_small_one():
    """Products that overflow can sum to -inf; clamped to 0, the example would be unclipped."""
    left = torch.tensor([[[1e20, 1.0], [-1e20, 1.0]], [[1.0, 2.0], [0.5, 0.1]]])
    right = torch.tensor([[[1.0, 1e20], [1.0, 1e20]], [[1.0, 1.0], [1.0, 2.0]]])
    uses = {nn.Parameter(torch.zeros(2, 2)): [OuterProducts(left, right)]}
    norms, _ = example_norms(uses, 2)
    assert torch.isfinite(norms).tolist() == [False, True]


def test_planted_product_with_a_nan_is_seen(monkeypatch):
    monkeypatch.setattr(PerExampleGradient, "keep_only", lambda self, keep: None)
    model, factor = bert(), torch.tensor([1.0, torch.nan, 1.0, 1.0], dtype=torch.float64)
    batch = batch_for(model, LENGTHS)
    _, sums = clip_losses(model, lambda: per_example_loss(model, batch) * factor, 0.1)
    assert any(torch.isnan(total).any() for total in sums.values())
