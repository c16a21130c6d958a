"""Clipping over the entries that a mask keeps, and through low-rank carriers, against float64 loops."""

import pytest
import torch
from models import (
    ARCHITECTURES,
    INFILLING,
    assert_equal,
    cancelling_linear,
    clip,
    collate,
    gradients_of,
    together,
    trained,
)
from torch.func import functional_call

from hf_dp.clipping import partial_gradients
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts
from hf_dp.clipping.partial_gradients import (
    LEFT,
    RIGHT,
    Carriers,
    LowRankEngine,
    MaskedEngine,
    masked_norms,
)
from hf_dp.errors import InvalidArgumentError
from hf_dp.tuners.rgp import RgpConfig, carriers, weight_gradients

LENGTHS = (5, 1, 3, 6)
MASKED = ("bert", "gpt2_tied", "vit", "t5", "infilling")


def with_masks(name):
    architecture = INFILLING["bert"] if name == "infilling" else ARCHITECTURES[name]
    model = architecture.build()
    generator = torch.Generator().manual_seed(5)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.3 for n, p in model.named_parameters()}
    masks.popitem()  # the last trains whole
    return architecture, model, masks, architecture.examples(model, LENGTHS)


def expected_of(architecture, model, masks, examples):
    with architecture.precision():
        rows = (zip(trained(model), row, strict=True) for row in gradients_of(model, examples))
    masked = [[g if g is None or n not in masks else g * masks[n] for n, g in row] for row in rows]
    return clip(trained(model), masked)


def by_engine(engine, architecture, model, examples):
    """Norms and sums of two physical batches."""
    with engine, architecture.precision():
        parts = (collate(model, part) for part in (examples[:1], examples[1:]))
        norms = [engine.backward(together(model, part)) for part in parts]
        return torch.cat(norms), engine.collect()


@pytest.mark.parametrize("name", MASKED)
def test_equals_the_loop(name):
    architecture, model, masks, examples = with_masks(name)
    expected = expected_of(architecture, model, masks, examples)
    engine = MaskedEngine(model, masks, expected.clipping_norm)
    norms, sums = by_engine(engine, architecture, model, examples)
    assert_equal(norms, sums, expected)
    for n, mask in masks.items():
        assert not sums[n][~mask].any()


def test_norms_are_of_the_kept_entries_alone():
    """Planted: norms of all entries would clip an example harder, and the loop shows it."""
    architecture, model, masks, examples = with_masks("bert")
    expected = expected_of(architecture, model, masks, examples)
    whole = expected_of(architecture, model, {}, examples)
    assert bool((whole.norms > 1.2 * expected.norms).all())


@pytest.mark.parametrize("numbers", [1, 7, 40])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_the_size_of_the_blocks_does_not_matter(name, numbers, monkeypatch):
    monkeypatch.setitem(partial_gradients._BLOCK, "cpu", numbers)
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
    whole = [sum(use.example_gradient(i, mask.shape) for use in uses) for i in range(b)]
    expected = (torch.stack(whole) * mask).square().sum((1, 2))
    assert torch.allclose(masked_norms(uses, mask).squared, expected, rtol=1e-12)


def test_cancelling_uses_are_not_taken_for_small():
    """The slack covers a float32 sum whose rounding exceeds the gradient that is left."""
    left, right = torch.full((1, 1, 4), 1e4), torch.full((1, 1, 4), 1.0)
    uses = [OuterProducts(left, right), OuterProducts(-left * (1 + 2**-23), right)]
    found = masked_norms(uses, torch.eye(4, dtype=torch.bool))
    rounding = (left * 2**-23).norm() * right.norm()
    assert float(found.squared.sqrt() + found.slack) >= float(rounding)


def test_a_parameter_without_a_mask_is_settled_where_its_gram_sum_cancels():
    """And the bias has a small gradient."""
    linear, losses, truths = cancelling_linear()
    linear.bias = torch.nn.Parameter(torch.zeros(256))
    with MaskedEngine(linear, {"bias": torch.zeros(256, dtype=torch.bool)}, 1.0) as engine:
        found = engine.backward(losses())
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
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    found = masked_norms([OuterProducts(left, right)], mask)
    assert torch.isfinite(found.squared + found.slack).tolist() == [True, False]


def test_automatic_clipping():
    architecture, model, masks, examples = with_masks("bert")
    expected = expected_of(architecture, model, masks, examples)
    with MaskedEngine(model, masks, 0.5, clipping="automatic") as engine:
        engine.backward(together(model, collate(model, examples[:1])))
        total = sum(float(s.square().sum()) for s in engine.collect().values()) ** 0.5
    norm = float(expected.norms[0])
    assert total == pytest.approx(0.5 * norm / (norm + 0.01), rel=1e-9)


def test_bad_masks_are_refused():
    _, model, masks, _ = with_masks("bert")
    with pytest.raises(InvalidArgumentError, match="'nothing'"):
        MaskedEngine(model, {"nothing": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="classifier.weight"):
        MaskedEngine(model, {"classifier.weight": torch.ones(1)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="clipping"):
        MaskedEngine(model, masks, 1.0, clipping="per_layer")


LOW_RANK = ("bert", "gpt2_classifier", "albert", "t5", "vit")


def orthonormal(rows, generator, dtype=torch.float64):
    """Two orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, 2, generator=generator, dtype=dtype)).Q


def with_carriers(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    weights = RgpConfig(rank=2, task_type="SEQ_CLS").weights(model)
    generator, by_name = torch.Generator().manual_seed(2), {}
    for n, p in weights.items():
        left, right = (orthonormal(size, generator) for size in p.shape)
        by_name[n] = Carriers(left, right.mT)
    for n, p in model.named_parameters():
        p.requires_grad_(n in weights or "classifier" in n or "score" in n)
    return architecture, model, by_name, architecture.examples(model, LENGTHS)


def by_the_text(architecture, model, by_name, examples):
    """Return the carriers' gradients by autograd, one example at a time."""
    own = dict(model.named_parameters())
    pairs = {
        n: (each.left.clone().requires_grad_(), each.right.clone().requires_grad_())
        for n, each in by_name.items()
    }
    parameters = {n: p for n, p in trained(model).items() if n not in by_name}
    for n, (left, right) in pairs.items():
        parameters |= {n + LEFT: left, n + RIGHT: right}
    rest = {n: own[n].detach() - each.left @ each.right for n, each in by_name.items()}
    found = []
    for example in examples:
        weights = {n: left @ right + rest[n] for n, (left, right) in pairs.items()}
        with architecture.precision():
            loss = functional_call(model, weights, (), example).loss
        found.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
    return clip(parameters, found)


@pytest.mark.parametrize("name", LOW_RANK)
def test_equals_the_reparametrized_model(name):
    architecture, model, by_name, examples = with_carriers(name)
    expected = by_the_text(architecture, model, by_name, examples)
    engine = LowRankEngine(model, by_name, expected.clipping_norm)
    assert_equal(*by_engine(engine, architecture, model, examples), expected)
    with engine:  # collected once
        assert not any(each.any() for each in engine.collect().values())


def test_the_weights_gradient_is_the_projection():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    left, right = orthonormal(6, generator), orthonormal(5, generator).mT
    each = Carriers(left, right)
    found = each.gradient(gradient @ right.mT, left.mT @ gradient)
    outside_left, outside_right = torch.eye(6) - left @ left.mT, torch.eye(5) - right.mT @ right
    outside = outside_left.double() @ gradient @ outside_right.double()
    torch.testing.assert_close(found, gradient - outside)
    factors = {"w" + LEFT: gradient @ right.mT, "w" + RIGHT: left.mT @ gradient}
    again = weight_gradients(factors, {"w": each})
    assert set(again) == {"w"} and torch.equal(again["w"], found)


@pytest.mark.parametrize("seed", range(4))
def test_the_weights_gradient_does_not_depend_on_how_its_factors_lie(seed):
    """Processes with and without examples lay their sums out differently."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (orthonormal(16, generator, torch.float32) for _ in range(2))
    of_left, of_right = (torch.randn(shape, generator=generator) for shape in ((16, 2), (2, 16)))
    by_columns = [factor.mT.contiguous().mT for factor in (of_left, of_right)]
    assert by_columns[0].stride() != of_left.stride() and torch.equal(by_columns[0], of_left)
    each = Carriers(left, right.mT)
    found = [
        weight_gradients({"w" + LEFT: a, "w" + RIGHT: b}, {"w": each})["w"]
        for a, b in ((of_left, of_right), by_columns)
    ]
    assert torch.equal(*found)


def test_carriers_follow_the_historical_update():
    torch.manual_seed(0)
    start = torch.randn(8, 6)
    column, row = torch.randn(8, 1), torch.randn(1, 6)
    each = carriers(start + column @ row, start, 1, 2)
    assert float((each.left.mT @ column).abs() / column.norm()) == pytest.approx(1, abs=1e-4)
    assert float((each.right @ row.mT).abs() / row.norm()) == pytest.approx(1, abs=1e-4)
    first = carriers(start, start, 3, 8)  # no update yet: along the weight itself
    u, _, v = torch.linalg.svd(start)
    for each_vector, basis in ((first.left[:, 0], u[:, :3]), (first.right[0], v[:3].mT)):
        assert float((basis.mT @ each_vector).norm()) > 0.9
    torch.testing.assert_close(first.left.mT @ first.left, torch.eye(3), atol=1e-5, rtol=0)


def test_bad_carriers_are_refused():
    _, model, by_name, _ = with_carriers("bert")
    name, each = next(iter(by_name.items()))
    with pytest.raises(InvalidArgumentError, match="parts.*nothing"):
        LowRankEngine(model, {"nothing": each}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="parts"):
        LowRankEngine(model, {name: Carriers(each.left[1:], each.right)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="rank.*at most"):
        RgpConfig(rank=1000, task_type="SEQ_CLS").weights(model)
    with pytest.raises(InvalidArgumentError, match="rank"):
        RgpConfig(rank=0)
