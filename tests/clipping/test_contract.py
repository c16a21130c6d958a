"""What the engine refuses, removes and restores."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from models import SHORT, assert_same_sums, batch_for, engine_result, rows
from torch import nn

from hf_dp.clipping import ClippingEngine, gradients, per_example_gradients
from hf_dp.errors import (
    InvalidArgumentError,
    UnaccountedGradientError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss


@pytest.fixture
def model():
    return models.bert()


@pytest.fixture
def batch(model):
    return batch_for(model, SHORT)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_is_removed(model, batch, value):
    def broken(m, inputs):
        factor = torch.ones(len(inputs["labels"]), dtype=torch.float64)
        factor[inputs["attention_mask"].sum(1) == SHORT[2]] = value
        return per_example_loss(m, inputs) * factor

    norms, sums = engine_result(model, batch, 0.1, loss=broken)
    assert torch.isinf(norms[2])
    assert torch.isfinite(norms[[0, 1, 3]]).all()
    _, expected = engine_result(model, rows(batch, [0, 1, 3]), 0.1)
    assert_same_sums(sums, expected, 1e-12)


def test_planted_product_with_a_nan_is_seen(model, batch, monkeypatch):
    for kind in (gradients.OuterProducts, gradients.Lookups, gradients.Dense):
        monkeypatch.setattr(kind, "keep_only", lambda self, keep: None)
    factor = torch.tensor([1.0, float("nan"), 1.0, 1.0], dtype=torch.float64)
    _, sums = engine_result(model, batch, 0.1, loss=lambda m, i: per_example_loss(m, i) * factor)
    assert any(torch.isnan(total).any() for total in sums.values())


def test_backward_past_the_engine_is_refused(model, batch):
    with (
        ClippingEngine(model, 0.1),
        pytest.raises(UnaccountedGradientError, match="engine.backward"),
    ):
        per_example_loss(model, batch).sum().backward()


def test_engine_backward_outside_the_with_is_refused(model, batch):
    engine = ClippingEngine(model, 0.1)
    with pytest.raises(UnaccountedGradientError, match="inside"):
        engine.backward(per_example_loss(model, batch))


def test_a_stale_gradient_is_refused(model, batch):
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnaccountedGradientError, match="zero_grad"),
    ):
        engine.backward(per_example_loss(model, batch))


def test_a_parameter_used_outside_its_module_is_named():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x):
            return (x @ self.table.weight.T).sum(1)

    model = Outside()
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnaccountedGradientError, match="'table.weight'"),
    ):
        engine.backward(model(torch.randn(4, 3)))


@pytest.mark.parametrize(
    "losses", [lambda x: x.sum(), lambda x: x[:, None], lambda x: x.long()], ids=["0d", "2d", "int"]
)
def test_losses_must_be_one_float_per_example(model, batch, losses):
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedLossError, match=r"\(b,\)"):
        engine.backward(losses(per_example_loss(model, batch)))


def test_one_loss_for_each_example_of_the_forward(model, batch):
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnsupportedLossError, match="each of the 4 examples"),
    ):
        engine.backward(per_example_loss(model, batch)[:3])


class Flattening(nn.Module):
    """OPT's way: (b * T, d) inside."""

    def __init__(self, drop: int = 0):
        super().__init__()
        self.drop = drop
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        rows = self.inner(x.flatten(0, 1)[self.drop :])
        return torch.cat([rows.new_zeros(self.drop, 1), rows]).view(len(x), -1).sum(1)


def test_flattened_positions_are_split_by_example():
    model, x = Flattening().double(), torch.randn(4, 5, 3).double()
    with ClippingEngine(model, 0.1) as engine:
        norms = engine.backward(model(x))
    expected = [
        g["inner.weight"].square().sum() + 25
        for g in per_example_gradients(model(x), dict(model.named_parameters()))
    ]
    torch.testing.assert_close(norms, torch.stack(expected).sqrt(), rtol=1e-12, atol=0)


def test_rows_that_are_no_multiple_of_the_examples_are_refused_by_shape():
    model = Flattening(drop=1)
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnsupportedModelError, match=r"Linear `inner` .*\(19, 3\)"),
    ):
        engine.backward(model(torch.randn(4, 5, 3)))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(3), "GroupNorm"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "statistics"),
    ],
)
def test_batch_statistics_are_refused(module, message):
    with (
        pytest.raises(UnsupportedModelError, match=message),
        ClippingEngine(nn.Sequential(nn.Linear(3, 3), module), 0.1),
    ):
        pass


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_embedding_options_that_couple_examples_are_refused(options):
    model = nn.Embedding(5, 3, **options)
    with (
        pytest.raises(UnsupportedModelError, match=next(iter(options))),
        ClippingEngine(model, 0.1),
    ):
        pass


def test_dynamic_rope_is_refused():
    model = models.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModelError, match="dynamic rotary"), ClippingEngine(model, 0.1):
        pass


def test_nothing_trainable_is_refused():
    with pytest.raises(UnsupportedModelError, match="no trainable"), ClippingEngine(nn.ReLU(), 0.1):
        pass


@pytest.mark.parametrize(
    "options", [{"clipping": "flatt"}, {"strategy": "ghost"}, {"clipping_norm": 0.0}], ids=str
)
def test_bad_options_are_named(options):
    with pytest.raises(InvalidArgumentError, match=f"`{next(iter(options))}`"):
        ClippingEngine(nn.Linear(2, 2), **{"clipping_norm": 1.0, **options})


def test_engines_do_not_nest(model):
    with (
        ClippingEngine(model, 0.1),
        pytest.raises(UnaccountedGradientError, match="already"),
        ClippingEngine(model, 1),
    ):
        pass


def test_the_model_is_left_as_found_also_after_an_error(model, batch):
    before = {name: dict(module.__dict__).get("forward") for name, module in model.named_modules()}
    with pytest.raises(KeyError), ClippingEngine(model, 0.1):
        raise KeyError
    after = {name: dict(module.__dict__).get("forward") for name, module in model.named_modules()}
    assert before == after
    assert not model._forward_pre_hooks
    per_example_loss(model, batch).sum().backward()
    assert model.classifier.weight.grad is not None


def test_outputs_inside_and_outside_are_equal(model, batch):
    outside = per_example_loss(model, batch)
    with ClippingEngine(model, 0.1):
        torch.testing.assert_close(per_example_loss(model, batch), outside, rtol=1e-12, atol=0)


def test_a_deep_copy_made_inside_uses_its_own_weights(model, batch):
    with ClippingEngine(model, 0.1):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.classifier.weight.zero_()
            twin.classifier.bias.zero_()
            assert twin(input_ids=batch["input_ids"]).logits.abs().max() == 0
            assert model(input_ids=batch["input_ids"]).logits.abs().max() > 0


def test_an_empty_batch_of_losses_adds_nothing(model):
    with ClippingEngine(model, 0.1) as engine:
        engine.backward(torch.zeros(0))
        assert all(total.abs().max() == 0 for total in engine.collect().values())
