"""Sums over physical batches, and bugs of norms and sums that are planted.

What equals a loop over single, unpadded examples is in test_architectures.py.
"""

from __future__ import annotations

import sys

import models
import pytest
import torch
from models import (
    SHORT,
    assert_same_sums,
    batch_for,
    disagreement,
    engine_result,
    loop_oracle,
    rows,
)

from hf_dp.clipping import ClippingEngine, gradients, norms
from hf_dp.losses import per_example_loss

EXACT = 1e-9


def test_tied_bias_owned_by_a_module_without_a_rule_is_counted_once():
    model = models.bert_masked_lm()
    batch = batch_for(models.bert(), SHORT)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)

    def loss(m, inputs):
        logits = m(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        tokens = torch.nn.functional.cross_entropy(logits.mT, inputs["labels"], reduction="none")
        return tokens.sum(1) / (inputs["labels"] != -100).sum(1)

    expected_norms, expected = loop_oracle(model, batch, 0.5, loss=loss)
    got_norms, got = engine_result(model, batch, 0.5, loss=loss)
    torch.testing.assert_close(got_norms, expected_norms, rtol=EXACT, atol=0)
    assert_same_sums(got, expected, EXACT)


@pytest.mark.parametrize(
    "cuts", [[[0, 1, 2, 3]], [[2], [0, 3], [1]], [[0], [1], [2], [3]]], ids=len
)
def test_physical_batches_do_not_change_the_sums(cuts):
    model = models.gpt2()
    assert disagreement(model, batch_for(model, SHORT), cuts=cuts) < EXACT


def test_repeated_examples_count_each_time():
    model = models.bert()
    batch = {name: value.repeat_interleave(3, 0) for name, value in batch_for(model, SHORT).items()}
    assert disagreement(model, batch) < EXACT


def test_padding_idx_gets_no_gradient_and_unused_parameters_get_zeros():
    model = models.TinyTied(padding_idx=0).double()
    model.unused = torch.nn.Linear(2, 2).double()
    tokens = torch.tensor([[1, 2, 0, 0], [3, 0, 3, 1]])
    with ClippingEngine(model, 1e9) as engine:
        engine.backward(model.embedding(tokens).square().sum((1, 2)))
        sums = engine.collect()
    assert sums["embedding.weight"][0].abs().max() == 0
    assert sums["embedding.weight"][3].abs().max() > 0
    assert sums["unused.weight"].abs().max() == 0


def test_collect_resets():
    model = models.bert()
    batch = batch_for(model, SHORT)
    with ClippingEngine(model, 0.1) as engine:
        engine.backward(per_example_loss(model, batch))
        first = engine.collect()
        assert all(total.abs().max() == 0 for total in engine.collect().values())
        engine.backward(per_example_loss(model, batch))
        assert_same_sums(engine.collect(), first, EXACT)


def test_bf16_contributions_stay_within_the_clipping_norm():
    """Sums of neighboring batches differ by at most C, in float32, under bf16 autocast."""
    model = models.bert(dtype=torch.float32)
    batch = batch_for(model, (9, 9, 9, 9, 9))

    def loss(m, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return per_example_loss(m, inputs)

    _, every = engine_result(model, batch, 0.1, loss=loss, cuts=None)
    _, fewer = engine_result(model, rows(batch, range(4)), 0.1, loss=loss)
    assert all(total.dtype == torch.float64 for total in every.values())
    difference = (
        torch.stack([(every[n].double() - fewer[n].double()).square().sum() for n in every])
        .sum()
        .sqrt()
    )
    assert 0.099 < float(difference) <= 0.1 * (1 + 1e-3)


# -- planted bugs ---


def test_planted_missing_inner_product_is_seen(monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))
    model = models.gpt2(tied=True)
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


def test_planted_unclipped_layer_is_seen(monkeypatch):
    original = gradients.OuterProducts.weighted_factors

    def unclipped(self, weights):
        of_that_layer = (self.left.shape[2], self.right.shape[2]) == (24, 16)
        return original(
            self, gradients.Weights(torch.ones_like(weights.values)) if of_that_layer else weights
        )

    monkeypatch.setattr(gradients.OuterProducts, "weighted_factors", unclipped)
    model = models.bert()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


def test_planted_half_norm_in_one_rule_is_seen(monkeypatch):
    linear = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(
        linear, "OuterProducts", lambda left, right: gradients.OuterProducts(left / 2, right)
    )
    model = models.bert()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


def test_planted_batch_mean_loss_is_seen():
    model = models.bert()
    batch = batch_for(model, SHORT)
    got, _ = engine_result(
        model, batch, 0.1, loss=lambda m, i: per_example_loss(m, i) / len(i["labels"])
    )
    expected, _ = loop_oracle(model, batch, 0.1)
    assert ((got - expected).abs() > 1e-3).any()
