"""Norms and clipped sums equal a loop over single, unpadded examples in plain autograd; sums over
physical batches; and bugs of norms and sums that are planted.

These are invariants 2 and 12. Whole architectures are in test_architectures.py.
"""

from __future__ import annotations

import sys
from typing import Any

import models
import pytest
import torch
from models import (
    BUILDERS,
    LONG,
    SHORT,
    TinyTied,
    assert_same_sums,
    batch_for,
    disagreement,
    engine_result,
    loop_oracle,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, gradients, norms
from hf_dp.losses import per_example_loss

# float64: the engine orders sums differently from the loop, so a few hundred roundings of 1e-16;
# 1e-9 is the design's.
EXACT = 1e-9

SELECTIONS = {
    "first_layer_only": lambda name: ".0." in name,
    "layer_norm_bias_only": lambda name: ("LayerNorm" in name or "ln_" in name) and name.endswith("bias"),
    "positions_only": lambda name: "position_embeddings" in name or "wpe" in name,
    "one_linear_weight": lambda name: name.endswith(("1.output.dense.weight", "1.mlp.c_proj.weight")),
}  # fmt: skip


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_frozen_parts(name, selection):
    model = BUILDERS[name]()
    for each, parameter in model.named_parameters():
        parameter.requires_grad_(SELECTIONS[selection](each))
    assert disagreement(model, batch_for(model, (11, 1, 6))) < EXACT


def tokens_of(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class UsedTwice(nn.Module):
    """One linear layer and one norm used twice, and an embedding looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = (
            nn.Embedding(9, 5),
            nn.Linear(5, 5),
            nn.LayerNorm(5),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.norm(torch.tanh(self.linear(x)))
        x = self.norm(self.linear(x)) * self.embedding(input_ids.flip(1) // 2)
        return x.sum((1, 2))


@pytest.mark.parametrize("length", [1, 2, 12])
def test_a_module_used_twice(length):
    torch.manual_seed(0)
    batch = tokens_of(torch.randint(0, 9, (4, length)))
    model = UsedTwice().double()
    assert disagreement(model, batch, loss=lambda m, inputs: m(inputs["input_ids"])) < EXACT


def test_reused_layers_of_different_lengths_and_forms():
    """One weight meets short sequences (outer products) and long ones (formed at once)."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 6).double()
    x, y = torch.randn(3, 2, 6).double(), torch.randn(3, 30, 6).double()

    def losses(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(linear(a)).sum((1, 2)) + torch.sin(linear(torch.tanh(linear(b)))).sum(
            (1, 2)
        )

    expected = []
    for i in range(3):
        gradients = torch.autograd.grad(
            losses(x[i : i + 1], y[i : i + 1])[0], list(linear.parameters())
        )
        expected.append(torch.cat([g.flatten() for g in gradients]).norm())
    with ClippingEngine(linear, 1.0) as engine:
        torch.testing.assert_close(
            engine.backward(losses(x, y)), torch.stack(expected), rtol=EXACT, atol=0
        )


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_tied_embedding_and_head(padding_idx, length):
    """A row at the padding index gets no gradient from look-ups but one from the head."""

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return torch.sin(model(inputs["input_ids"])).mean(1).sum(1)

    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, length))
    tokens[:, 0] = 3
    model = TinyTied(padding_idx=padding_idx).double()
    assert disagreement(model, tokens_of(tokens), loss=loss) < EXACT


@pytest.mark.parametrize("lengths", [SHORT, LONG[:2]], ids=str)
def test_a_tied_bias_owned_by_a_module_without_a_rule_is_counted_once(lengths):
    """BertLMPredictionHead owns the bias that its decoder adds."""

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        tokens = nn.functional.cross_entropy(logits.mT, inputs["labels"], reduction="none")
        return tokens.sum(1) / (inputs["labels"] != -100).sum(1)

    model = models.bert_masked_lm()
    assert model.cls.predictions.bias is model.cls.predictions.decoder.bias
    batch = batch_for(model, lengths)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    assert disagreement(model, batch, loss=loss) < EXACT


@pytest.mark.parametrize(
    "cuts", [[[0, 1, 2, 3]], [[2], [0, 3], [1]], [[0], [1], [2], [3]]], ids=len
)
def test_physical_batches_do_not_change_the_sums(cuts):
    model = models.gpt2()
    assert disagreement(model, batch_for(model, SHORT), cuts=cuts) < EXACT


def test_collect_resets_and_backward_calls_add_up():
    model = models.bert()
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
    _, sums = engine_result(model, batch_for(model, SHORT), 1.0)
    expected = [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad]
    assert [(name, total.shape) for name, total in sums.items()] == expected
    assert not sums["unused.weight"].any() and not sums["unused.bias"].any()


def test_padding_idx_gets_no_gradient():
    model = TinyTied(padding_idx=0).double()
    tokens = torch.tensor([[1, 2, 0, 0], [3, 0, 3, 1]])
    with ClippingEngine(model, 1e9) as engine:
        engine.backward(model.embedding(tokens).square().sum((1, 2)))
        total = engine.collect()["embedding.weight"]
    assert not total[0].any() and total[3].any()


def test_clipped_sum_of_one_example_has_the_clipping_norm():
    model = models.roberta()
    batch = batch_for(model, (6,))
    (norm,), sums = engine_result(model, batch, 0.1)
    assert float(norm) > 0.1
    total = torch.stack([value.square().sum() for value in sums.values()]).sum().sqrt()
    torch.testing.assert_close(total, torch.tensor(0.1, dtype=torch.float64), rtol=1e-12, atol=0)


def test_lora_under_gradient_checkpointing_with_frozen_embeddings():
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules=["query", "value"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    model: Any = get_peft_model(models.bert(), config).double().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert disagreement(model, batch_for(model, SHORT)) < EXACT


@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_broadcast_position_ids(name):
    """Positions of shape (1, T), shared by the batch, must agree with explicit (b, T)."""
    model = BUILDERS[name]()
    batch = batch_for(model, (8, 3, 5))
    position_ids = torch.arange(8).expand(3, 8)
    key = "position_embeddings.weight" if name == "bert" else "wpe.weight"
    norms, sums = engine_result(model, batch, 1.0)
    found_norms, found_sums = engine_result(model, {**batch, "position_ids": position_ids}, 1.0)
    torch.testing.assert_close(found_norms, norms, rtol=1e-12, atol=0)
    assert_same_sums(found_sums, sums, atol=1e-12)
    assert all(value[:8].any() for name_, value in sums.items() if name_.endswith(key))


def test_albert_counts_the_cross_terms_of_its_reused_layer():
    """The sum of the three uses' squared norms is another number, so this model can tell."""
    model = models.albert()
    assert len(model.albert.encoder.albert_layer_groups) == 1
    assert model.config.num_hidden_layers == 3
    assert disagreement(model, batch_for(model, (6, 4))) < EXACT


def test_planted_missing_inner_product_is_seen(monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))
    model = models.gpt2()
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
