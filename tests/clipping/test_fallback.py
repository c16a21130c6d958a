"""Modules without a rule are run again and differentiated example by example."""

from __future__ import annotations

import pytest
import torch
from models import assert_norms_exact, assert_refused, batch_for, disagreement, llama
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, per_example_gradients
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import UnsupportedModelError

RTOL = 1e-9


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
    "dropout": lambda: Net(Noisy(), 4),
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

    parameters = dict(model.named_parameters())
    gradients = list(per_example_gradients(losses(), parameters))
    norms = [
        torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in gradients
    ]
    with ClippingEngine(model, 0.5, strategy=strategy) as engine:
        got_norms = engine.backward(losses())
        got = engine.collect()
    torch.testing.assert_close(got_norms, torch.stack(norms), rtol=1e-9, atol=0)
    for name in parameters:
        expected = sum(
            one[name] * min(1.0, 0.5 / float(n)) for one, n in zip(gradients, norms, strict=True)
        )
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-12)


class Jitter(Noisy):
    def forward(self, x):
        return x * self.gain + torch.rand_like(x)


class DropsAndJitters(Noisy):
    def forward(self, x):
        return super().forward(x) * torch.rand_like(x)


@pytest.mark.parametrize("noisy", [Jitter, DropsAndJitters])
def test_a_module_that_draws_random_numbers_other_than_dropout_is_refused(noisy):
    model = Net(noisy(), 4)
    assert_refused(model, torch.randn(4, 5, 3), f"{noisy.__name__} `middle` .*dropout")


class Mixes(Scale):
    def forward(self, x):
        return super().forward(x) + 0.1 * x.mean(0)


def test_a_module_that_mixes_examples_is_refused():
    model = Net(Mixes(), 4)
    assert_refused(model, torch.randn(4, 5, 3), "Mixes .*mixes examples")


def test_a_shared_table_of_as_many_rows_as_examples_is_refused_and_not_split():
    class Shifted(Scale):
        def forward(self, x, table):
            return super().forward(x) + table.sum(0)

    class Outer(Net):
        def forward(self, x):
            return self.last(self.middle(self.first(x), torch.ones(len(x), 4))).flatten(1).sum(1)

    model = Outer(Shifted(), 4)
    assert_refused(model, torch.randn(4, 5, 3), "Shifted .*examples in their first dimension")


class Branching(Scale):
    """Cannot be mapped: it looks at values. It is run once for each example instead."""

    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) > 0 else 2 * super().forward(x)


def test_a_module_that_cannot_be_mapped_is_run_for_each_example():
    class PerRow(Branching):
        def forward(self, x):
            return torch.cat([super(PerRow, self).forward(row) for row in x.split(1)])

    model, x = Net(PerRow(), 4).double(), torch.randn(4, 5, 3).double()
    assert_norms_exact(model, x)


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
    assert_refused(model, torch.randn(4, 3), r"Relative .*\(7, 3\)")


class Doubled(nn.Embedding):
    """A subclass that scales, as Gemma's embedding does: the parent's rule would halve its norm."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Replaced(nn.Module):
    """Exact classes that the rules know, but one with its forward replaced."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.embedding, self.linear = embedding, nn.Linear(4, 4)
        original = self.linear.forward
        self.linear.forward = lambda value: 3 * original(value)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.linear(self.embedding(input_ids)).square().sum((1, 2))


@pytest.mark.parametrize("kind", [nn.Embedding, Doubled])
def test_subclasses_and_replaced_forwards_do_not_get_the_plain_rule(kind):
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (3, 5))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model = Replaced(kind(9, 4)).double()
    assert disagreement(model, batch, loss=lambda m, inputs: m(inputs["input_ids"])) < RTOL


class Hidden:
    """An output that no tree of tensors describes."""

    def __init__(self, logits: Tensor):
        self.logits = logits


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, value: Tensor) -> Hidden:
        return Hidden((value * self.gain).sum(1))


def test_an_output_the_fallback_cannot_see_into_is_refused():
    """Otherwise the parameter would silently never train."""
    model = Opaque()
    with (
        ClippingEngine(model, 1.0) as engine,
        pytest.raises(UnsupportedModelError, match="Opaque.*Hidden"),
    ):
        engine.backward(model(torch.randn(3, 4)).logits)


def test_a_parametrized_weight_of_as_many_rows_as_examples_is_refused():
    """Its output's first dimension counts outputs; if it equals b, no shape shows that."""

    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    torch.nn.utils.parametrize.register_parametrization(model, "weight", Twice())
    value = torch.randn(3, 4)
    with (
        ClippingEngine(model, 1.0) as engine,
        pytest.raises(UnsupportedModelError, match="ParametrizationList"),
    ):
        engine.backward(model(value).square().sum(1))


def test_rules_and_fallbacks_under_checkpointing():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert disagreement(model, batch_for(model, (9, 4, 2))) < RTOL
