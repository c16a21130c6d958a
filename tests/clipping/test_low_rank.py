"""Clipping through low-rank carriers against a float64 loop over the paper's model."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, assert_equal, collate, together
from models import clip
from torch.func import functional_call

from hf_dp.clipping.low_rank import LEFT, RIGHT, Carriers, LowRankEngine
from hf_dp.errors import InvalidArgumentError
from hf_dp.tuners.rgp import RgpConfig, carriers, weight_gradients

LENGTHS = (5, 1, 3, 6)
NAMES = ("bert", "gpt2_classifier", "albert", "t5", "vit")


def built(name, rank=2):
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    weights = RgpConfig(rank=rank, task_type="SEQ_CLS").weights(model)
    generator = torch.Generator().manual_seed(2)

    def orthonormal(rows):
        return torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q

    by_name = {
        n: Carriers(orthonormal(len(p)), orthonormal(p.shape[1]).mT) for n, p in weights.items()
    }
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
    trainable = {n: p for n, p in own.items() if p.requires_grad and n not in by_name}
    for n, (left, right) in pairs.items():
        trainable |= {n + LEFT: left, n + RIGHT: right}
    rest = {n: own[n].detach() - each.left @ each.right for n, each in by_name.items()}
    found = []
    for example in examples:
        weights = {n: left @ right + rest[n] for n, (left, right) in pairs.items()}
        with architecture.precision():
            loss = functional_call(model, weights, (), example).loss
        found.append(torch.autograd.grad(loss, list(trainable.values()), allow_unused=True))
    return clip(trainable, found, None)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reparametrized_model(name):
    architecture, model, by_name, examples = built(name)
    expected = by_the_text(architecture, model, by_name, examples)
    with LowRankEngine(model, by_name, expected.clipping_norm) as engine, architecture.precision():
        norms = [
            engine.backward(together(model, collate(model, examples[a:b])))
            for a, b in ((0, 1), (1, 4))
        ]
        sums = engine.collect()
        assert not any(
            sums_again.any() for sums_again in engine.collect().values()
        )  # collected once
    assert set(sums) == set(expected.sums)
    assert_equal(torch.cat(norms), sums, expected)


def test_the_weights_gradient_is_the_projection():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64)).Q.mT
    each = Carriers(left, right)
    found = each.gradient(gradient @ right.mT, left.mT @ gradient)
    outside_left, outside_right = torch.eye(6) - left @ left.mT, torch.eye(5) - right.mT @ right
    torch.testing.assert_close(
        found, gradient - outside_left.double() @ gradient @ outside_right.double()
    )
    again = weight_gradients(
        {"w" + LEFT: gradient @ right.mT, "w" + RIGHT: left.mT @ gradient}, {"w": each}
    )
    assert set(again) == {"w"} and torch.equal(again["w"], found)


@pytest.mark.parametrize("seed", range(4))
def test_the_weights_gradient_does_not_depend_on_how_its_factors_lie(seed):
    """Processes with and without examples lay their sums out differently."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(16, 2, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(16, 2, generator=generator)).Q.mT
    of_left, of_right = (
        torch.randn(16, 2, generator=generator),
        torch.randn(2, 16, generator=generator),
    )
    by_columns = [factor.mT.contiguous().mT for factor in (of_left, of_right)]
    assert by_columns[0].stride() != of_left.stride() and torch.equal(by_columns[0], of_left)
    each = Carriers(left, right)
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
    _, model, by_name, _ = built("bert")
    name, each = next(iter(by_name.items()))
    with pytest.raises(InvalidArgumentError, match="carriers.*nothing"):
        LowRankEngine(model, {"nothing": each}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="carriers"):
        LowRankEngine(model, {name: Carriers(each.left[1:], each.right)}, 1.0).__enter__()
    with pytest.raises(InvalidArgumentError, match="rank.*at most"):
        RgpConfig(rank=1000, task_type="SEQ_CLS").weights(model)
    with pytest.raises(InvalidArgumentError, match="rank"):
        RgpConfig(rank=0)
