"""Clipping over the entries that a mask keeps, against a loop over single examples in float64."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, INFILLING, assert_equal, collate, together
from models import clip, single

from hf_dp.clipping import masked
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts
from hf_dp.clipping.masked import MaskedEngine, masked_norms
from hf_dp.errors import InvalidArgumentError

LENGTHS = (5, 1, 3, 6)
NAMES = ("bert", "gpt2_tied", "vit", "t5", "infilling")


def built(name):
    architecture = INFILLING["bert"] if name == "infilling" else ARCHITECTURES[name]
    model = architecture.build()
    generator = torch.Generator().manual_seed(5)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.3 for n, p in model.named_parameters()}
    masks.popitem()  # the last trains whole
    return architecture, model, masks, architecture.examples(model, LENGTHS)


def expected_of(architecture, model, masks, examples):
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    with architecture.precision():
        for example in examples:
            gradients = torch.autograd.grad(
                single(model, example), list(trainable.values()), allow_unused=True
            )
            pairs = zip(trainable, gradients, strict=True)
            found.append([g if g is None or n not in masks else g * masks[n] for n, g in pairs])
    return clip(trainable, found, None)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop(name):
    architecture, model, masks, examples = built(name)
    expected = expected_of(architecture, model, masks, examples)
    with MaskedEngine(model, masks, expected.clipping_norm) as engine, architecture.precision():
        norms = [
            engine.backward(together(model, collate(model, examples[a:b])))
            for a, b in ((0, 1), (1, 4))
        ]
        sums = engine.collect()
    assert_equal(torch.cat(norms), sums, expected)
    for n, mask in masks.items():
        assert not sums[n][~mask].any()


def test_norms_are_of_the_kept_entries_alone():
    """Planted: norms of all entries would clip an example harder, and the loop shows it."""
    architecture, model, masks, examples = built("bert")
    expected = expected_of(architecture, model, masks, examples)
    whole = expected_of(architecture, model, {}, examples)
    assert bool((whole.norms > 1.2 * expected.norms).all())


@pytest.mark.parametrize("numbers", [1, 7, 40])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_the_size_of_the_blocks_does_not_matter(name, numbers, monkeypatch):
    monkeypatch.setitem(masked._BLOCK, "cpu", numbers)
    test_equals_the_loop(name)


@pytest.mark.parametrize(
    "forms", ["outer", "lookups", "dense", "outer outer", "outer lookups", "dense outer lookups"]
)
def test_norms_of_every_mix_of_uses(forms):
    generator = torch.Generator().manual_seed(3)
    b, length, m, n = 3, 4, 6, 5

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {
        "outer": lambda: OuterProducts(draw(b, length, m), draw(b, length, n)),
        "lookups": lambda: Lookups(
            torch.randint(m, (b, length), generator=generator), draw(b, length, n)
        ),
        "dense": lambda: Dense(draw(b, m, n)),
    }
    uses = [made[form]() for form in forms.split()]
    mask = torch.rand((m, n), generator=generator) < 0.4
    gradients = torch.stack(
        [sum(use.example_gradient(i, mask.shape) for use in uses) for i in range(b)]
    )
    assert torch.allclose(
        masked_norms(uses, mask).squared, (gradients * mask).square().sum((1, 2)), rtol=1e-12
    )


def test_cancelling_uses_are_not_taken_for_small():
    """The slack covers a float32 sum whose rounding exceeds the gradient that is left."""
    left, right = torch.full((1, 1, 4), 1e4), torch.full((1, 1, 4), 1.0)
    uses = [OuterProducts(left, right), OuterProducts(-left * (1 + 2**-23), right)]
    found = masked_norms(uses, torch.eye(4, dtype=torch.bool))
    rounding = (left * 2**-23).norm() * right.norm()
    assert float(found.squared.sqrt() + found.slack) >= float(rounding)


def test_a_parameter_without_a_mask_is_settled_where_its_gram_sum_cancels():
    """The loss is v.(W a_1) - v.(W a_2) with nearly equal a.

    Then G = v (a_1 - a_2)^T, and the bias has a small gradient.
    """
    torch.manual_seed(0)
    width = 256
    linear = torch.nn.Linear(width, width)
    direction, x = torch.randn(width), torch.randn(4, 1, width).expand(4, 2, width).clone()
    x[:, 1] += torch.tensor([1e-1, 1e-2, 1e-3, 1e-4])[:, None] * torch.randn(4, width)
    truths = direction.double().norm() * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    with MaskedEngine(linear, {"bias": torch.zeros(width, dtype=torch.bool)}, 1.0) as engine:
        output = linear(x) @ direction
        found = engine.backward(output[:, 0] - output[:, 1])
    torch.testing.assert_close(found.double(), truths, rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_infinite_entry_removes_the_example_also_where_it_is_masked(value):
    model = torch.nn.LayerNorm(4, bias=False)
    mask = torch.tensor([True, False, True, True])
    gradients = torch.tensor([[1.0, 7.0, 2.0, 2.0], [1.0, value, 1.0, 1.0]])
    with MaskedEngine(model, {"weight": mask}, 6.0) as engine:
        step = ClippedSum(engine._tape, engine._groups, "flat", 6.0, engine._sums, lambda: None)
        step.capture = lambda losses: {model.weight: [Dense(gradients)]}
        norms = engine._take(step, torch.zeros(2))
        sums = engine.collect()["weight"]
    assert norms.tolist() == [3.0, torch.inf]
    assert sums.tolist() == [1.0, 0.0, 2.0, 2.0]


def test_sums_that_do_not_train_may_overflow():
    """They are not clipped: zero times infinity would be NaN."""
    model = torch.nn.LayerNorm(2, bias=False)
    with MaskedEngine(model, {"weight": torch.tensor([True, False])}, 6.0) as engine:
        engine._sums[model.weight] = torch.tensor([1.0, torch.inf])
        assert engine.collect()["weight"].tolist() == [1.0, 0.0]


def test_an_infinite_factor_of_an_outer_product_removes_the_example():
    left, right = torch.ones(2, 1, 3), torch.ones(2, 1, 2)
    left[1, 0, 2] = torch.inf
    found = masked_norms(
        [OuterProducts(left, right)], torch.tensor([[True, True], [True, True], [False, False]])
    )
    assert torch.isfinite(found.squared + found.slack).tolist() == [True, False]


def test_automatic_clipping():
    architecture, model, masks, examples = built("bert")
    expected = expected_of(architecture, model, masks, examples)
    with MaskedEngine(model, masks, 0.5, clipping="automatic") as engine:
        engine.backward(together(model, collate(model, examples[:1])))
        total = sum(float(s.square().sum()) for s in engine.collect().values()) ** 0.5
    norm = float(expected.norms[0])
    assert total == pytest.approx(0.5 * norm / (norm + 0.01), rel=1e-9)


def test_bad_masks_are_refused():
    _, model, masks, _ = built("bert")
    with pytest.raises(InvalidArgumentError, match="'nothing'"):
        MaskedEngine(model, {"nothing": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="classifier.weight"):
        MaskedEngine(model, {"classifier.weight": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="clipping"):
        MaskedEngine(model, masks, 1.0, clipping="per_layer")
