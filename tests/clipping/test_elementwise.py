"""Classes whose parameters only multiply activations or are added to them: gradients equal a loop
over single examples, nothing runs again, and any other use is left to the fallback."""

from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from models import (
    ARCHITECTURES,
    Architecture,
    Net,
    assert_equal,
    assert_exact,
    assert_net_exact,
    assert_same_sums,
    builder,
    clip_losses,
    loop,
    loop_over_losses,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_dp.clipping import ClippingEngine, elementwise, fallback
from hf_dp.clipping.engine import STRATEGIES

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
    "flat": (lambda m, x: x * (1 * m.scale.flatten()) + m.shift.flatten(), (2, 2), (WIDTH, 1)),
    "times numbers": (lambda m, x: x * (2.5 * m.scale) + 3 * m.shift * 2, W, W),
    "twice": (lambda m, x: torch.sin(x * m.scale + m.shift) * m.scale, W, W),
    "and with dropout": (lambda m, x: F.dropout(x * m.scale + m.shift, 0.0), W, W),
    "in place afterwards": (lambda m, x: (x * m.scale + m.shift).sin_().mul_(2), W, W),
    "after its type": (lambda m, x: x.to(m.scale.dtype) * m.scale + m.shift, W, W),
}


def _set(m: Block, x: Tensor) -> Tensor:
    y = (x * m.scale + m.shift).clone()
    y[:, 0] = m.scale
    return y


def _without_gradient(m: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        doubled = 2 * m.scale
    return x * m.scale + doubled * x + m.shift


LEFT = {
    "a product of matrices": (lambda m, x: x @ m.scale + m.shift, (WIDTH, WIDTH), W),
    "and a sum": (lambda m, x: x * m.scale + m.shift + m.shift.sum(), W, W),
    "a function of it": (lambda m, x: x * m.scale.exp() + m.shift, W, W),
    "its transpose": (lambda m, x: x * m.scale + m.shift.T, W, (WIDTH, LENGTH)),
    "one that is not used": (lambda m, x: x * m.scale, W, W),
    "in channels": (lambda m, x: x * m.scale + m.shift, W, (LENGTH, 1)),
    "of each other": (lambda m, x: x * (m.scale * m.shift), W, W),
    "written into activations": (_set, W, W),
    "in a place without gradients": (_without_gradient, W, W),
}  # fmt: skip


@pytest.fixture(autouse=True)
def served():
    elementwise.ELEMENTWISE.add(Block)
    yield
    elementwise.ELEMENTWISE.discard(Block)


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
    assert_net_exact(model, x, strategy)
    assert_net_exact(model, x[:1], strategy)


@pytest.mark.parametrize("name", WATCHED | LEFT)
def test_only_others_run_again(name):
    model, x = net(name), rows()
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(model(x))
    assert (model.block.runs == 1) is (name in WATCHED)


def test_any_other_class_runs_again():
    """It might sort or transpose examples before they meet its parameters."""

    class Other(Block):
        pass

    model, x = net("scale and shift"), rows()
    model.block.__class__ = Other
    model.block.compute = lambda m, x: (x.flip(0) * m.scale + m.shift).flip(0)
    assert_net_exact(model, x)
    model.block.compute = lambda m, x: (x.transpose(0, 1) * m.scale + m.shift).transpose(0, 1)
    assert_net_exact(model, x[:LENGTH])


def test_a_forward_of_the_instances_own_runs_again():
    model, x = net("scale and shift"), rows()
    block = model.block
    block.forward = lambda x: (
        block.inner(x).transpose(0, 1) * block.scale + block.shift
    ).transpose(0, 1)
    assert_net_exact(model, x[:LENGTH])


@pytest.mark.parametrize("name", ["scale and shift", "twice", "and a sum"])
def test_in_a_checkpoint(name):
    model, x = net(name), rows()
    expected = loop(model, x.split(1), lambda net, row: net(row)[0])
    within = model.compute
    model.compute = lambda net, x: checkpoint(within, net, x, use_reentrant=False)
    with ClippingEngine(model, expected.clipping_norm, strategy="two_pass") as engine:
        for _ in range(2):
            norms = engine.backward(model(x))
            torch.testing.assert_close(norms, expected.norms, rtol=1e-9, atol=0)
            assert_same_sums(engine.collect(), expected.sums, atol=1e-9)


def test_under_autocast_the_gradient_is_that_of_the_values_that_met():
    model = net("scale and shift").float()
    x = rows().float()

    def losses() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    expected = torch.autograd.grad(losses().sum(), model.block.scale)[0]
    _, sums = clip_losses(model, losses, 1e9)
    torch.testing.assert_close(sums["block.scale"].float(), expected, rtol=2e-2, atol=1e-2)


def test_what_all_examples_share_is_left_to_the_fallback():
    """There are as many positions as examples, so the shape of the product does not tell."""
    model = net("scale and shift")
    model.block.register_buffer("table", torch.randn(LENGTH, WIDTH, dtype=torch.float64))
    model.block.compute = lambda m, x: x + m.table * m.scale + m.shift
    assert_net_exact(model, rows()[:LENGTH])


_IMAGES = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2}
_ATTENTION = {
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "layer_scale_init_value": 0.5,
    "drop_path_rate": 0.0,
}
_STAGES = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2}
REAL = {
    "BeitLayer": (hf.BeitForImageClassification, hf.BeitConfig, _IMAGES | _ATTENTION),
    "Data2VecVisionLayer": (
        hf.Data2VecVisionForImageClassification,
        hf.Data2VecVisionConfig,
        _IMAGES | _ATTENTION,
    ),
    "ConvNextLayer": (
        hf.ConvNextForImageClassification,
        hf.ConvNextConfig,
        {"image_size": 8, "patch_size": 2, "layer_scale_init_value": 0.5, **_STAGES},
    ),
    "ConvNextV2GRN": (
        hf.ConvNextV2ForImageClassification,
        hf.ConvNextV2Config,
        {"image_size": 8, "patch_size": 2, **_STAGES},
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_models_with_learned_scales(name, monkeypatch):
    model_class, config_class, options = REAL[name]
    architecture = Architecture(
        builder(model_class, config_class, **options, num_labels=3), "image"
    )
    model = architecture.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    again = run_again(monkeypatch)
    assert_exact(
        architecture, model, architecture.examples(model, (1, 1, 1)), "book_keeping", "two_pass"
    )
    assert name in {type(each).__name__ for each in model.modules()} - again


class Mixed(GradientCheckpointingLayer):
    """Multiplies by a matrix of its own, so that it runs again for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.dropout(self.inner(x) @ self.own, 0.5, self.training))


def checkpointed(kind: str) -> tuple[nn.Module, Any, list[nn.Module]]:
    """A model in training, its losses, and its layers that own parameters."""
    torch.manual_seed(0)
    if kind == "Mixed":
        layers = [Mixed(), Mixed()]
        net = Net(
            lambda net, x: net.two(net.one(x)).square().mean((1, 2)), one=layers[0], two=layers[1]
        )
        x = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)
        return net.double().train(), lambda: net(x), layers
    model_class, config_class, options = REAL[kind]
    model = builder(model_class, config_class, **options, num_labels=3)(dropout=0.5)
    images, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4) % 3

    def losses() -> Tensor:
        return F.cross_entropy(model(pixel_values=images).logits, labels, reduction="none")

    return model, losses, [each for each in model.modules() if type(each).__name__ == kind]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["BeitLayer", "Data2VecVisionLayer", "Mixed"])
def test_layers_under_gradient_checkpointing(kind, strategy):
    """Transformers checkpoints in the layer's own forward."""
    model, losses, layers = checkpointed(kind)

    def drawn() -> Tensor:
        torch.manual_seed(3)
        return losses()

    expected = loop_over_losses(model, drawn())
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    norms, sums = clip_losses(model, drawn, expected.clipping_norm, strategy=strategy)
    assert_equal(norms, sums, expected)
    assert layers and all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("name", ["BeitLayer", "Data2VecVisionLayer", "ConvNextLayer"])
def test_blocks_that_are_skipped_at_random(name):
    """The sum of unclipped gradients is that of autograd with the same draws."""
    model_class, config_class, options = REAL[name]
    options = options | {"drop_path_rate": 0.5}
    torch.manual_seed(0)
    model = model_class(config_class(**options, num_labels=3)).double().train()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3

    def losses(seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        logits = model(pixel_values=images).logits
        return F.cross_entropy(logits, labels, reduction="none")

    trained = dict(model.named_parameters())
    gradients = torch.autograd.grad(losses().sum(), list(trained.values()), allow_unused=True)
    expected = {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}
    _, sums = clip_losses(model, losses, 1e9)
    assert_same_sums({n: sums[n] for n in expected}, expected, atol=1e-9)
    assert not torch.allclose(losses(1), losses(2))  # something was skipped


def test_ia3(monkeypatch):
    """The first layer runs again: its activations depend on no weight that trains."""
    architecture = ARCHITECTURES["bert"]
    config = peft.IA3Config(
        target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    )
    model = peft.get_peft_model(architecture.build(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    again = run_again(monkeypatch, lambda module: id(module))
    assert_exact(architecture, model, architecture.examples(model, (6, 3, 5)), "book_keeping")
    scaled = [id(each) for each in model.modules() if type(each) is peft.tuners.ia3.Linear]
    assert len(set(scaled) & again) == 2 and len(scaled) > 4


def run_again(monkeypatch: Any, what: Any = lambda module: type(module).__name__) -> set[Any]:
    """Note which modules run again for each example."""
    seen, each = set(), fallback._for_each_example

    def noted(run: Any, inputs: Any, grads: Any, call: Any) -> Any:
        seen.add(what(call.module))
        return each(run, inputs, grads, call)

    monkeypatch.setattr(fallback, "_for_each_example", noted)
    return seen


@pytest.mark.parametrize(
    ("planted", "name"),
    [("factor", "times numbers"), ("x", "scale and shift"), ("order", "each position")],
)
def test_planted_bugs_are_seen(planted, name, monkeypatch):
    see = elementwise.Elementwise._see

    def wrong(self, of, factor, dims, saved, grad):
        if planted == "x" and saved[0] is not None:
            saved = (torch.ones_like(saved[0]),)
        grad = grad.roll(1, 1) if planted == "order" else grad
        see(self, of, 1.0 if planted == "factor" else factor, dims, saved, grad)

    monkeypatch.setattr(elementwise.Elementwise, "_see", wrong)
    with pytest.raises(AssertionError):
        assert_net_exact(net(name), rows())
