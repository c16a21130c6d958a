"""The self-check passes on good models and refuses bad ones, and leaves everything as it was."""

from __future__ import annotations

import sys

import models
import pytest
import torch
from models import BUILDERS, alone, batch_for

from hf_dp.clipping import norms, self_check
from hf_dp.clipping.gradients import OuterProducts
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss


def check(model, loss=per_example_loss, **options):
    batch = batch_for(model, (5, 9))
    self_check(model, loss, batch, [alone(batch, 0), alone(batch, 1)], **options)


@pytest.mark.parametrize("name", BUILDERS)
def test_good_models_pass_with_dropout_configured(name):
    check(BUILDERS[name](dropout=0.5))
    check(BUILDERS[name](dropout=0.5, dtype=torch.float32))


def test_a_loss_coupled_to_neighbors_is_refused():
    with pytest.raises(SelfCheckError, match="neighbors"):
        check(models.bert(), lambda m, i: per_example_loss(m, i) * i["attention_mask"].sum())
    with pytest.raises(SelfCheckError, match="neighbors"):
        check(models.bert(), lambda m, i: per_example_loss(m, i) / len(i["labels"]))


def test_a_wrong_rule_is_refused(monkeypatch):
    linear = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(
        linear, "OuterProducts", lambda left, right: OuterProducts(left * 0.9, right)
    )
    with pytest.raises(SelfCheckError, match="norm"):
        check(models.bert())


def test_a_dropped_inner_product_is_refused(monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))
    with pytest.raises(SelfCheckError, match="norm"):
        check(models.gpt2(tied=True))


def test_a_buffer_that_a_forward_changes_is_refused():
    model = models.bert()
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
    with pytest.raises(SelfCheckError, match="'seen'"):
        check(model)


def test_the_model_is_left_as_found():
    model = models.bert(dropout=0.5).eval()
    weights = {n: p.clone() for n, p in model.named_parameters()}
    check(model)
    assert not model.training
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in model.named_parameters())
