"""Modules without a rule inside whole models.

Small cases of the fallback itself are in test_no_rule.py.
"""

from __future__ import annotations

import pytest
import torch
from models import (
    Batch,
    alone,
    assert_same_sums,
    batch_for,
    bert_masked_lm,
    engine_result,
    llama,
    loop_oracle,
    middle_norm,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from hf_dp.clipping import ClippingEngine, per_example_gradients
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import UnsupportedModelError

RTOL = 1e-9


def masked_lm_loss(model: nn.Module, inputs: Batch) -> Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    tokens = F.cross_entropy(logits.mT, inputs["labels"], reduction="none")
    return tokens.sum(1) / (inputs["labels"] != -100).sum(1)


@pytest.mark.parametrize("lengths", [(5, 1, 3), (19, 7)], ids=str)
def test_a_bias_tied_between_a_rule_and_a_module_without_one(lengths):
    """BertLMPredictionHead owns the bias that its decoder adds: it must count exactly once."""
    model = bert_masked_lm()
    head = model.cls.predictions
    assert head.bias is head.decoder.bias
    batch = batch_for(model, lengths)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    norms, _ = loop_oracle(model, batch, 1.0, masked_lm_loss)
    expected_norms, expected = loop_oracle(model, batch, middle_norm(norms), masked_lm_loss)
    found_norms, found = engine_result(model, batch, middle_norm(norms), loss=masked_lm_loss)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)


def test_only_rms_norms_train():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    batch = batch_for(model, (6, 2, 6))
    expected_norms, expected = loop_oracle(model, batch, 0.1)
    found_norms, found = engine_result(model, batch, 0.1)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)


def vit(dropout: float = 0.0) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3,
    )  # fmt: skip
    model = ViTForImageClassification(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_vision_transformer_with_bare_parameters_and_a_convolution():
    model = vit()
    pixels, labels = torch.randn(4, 3, 8, 8).double(), torch.tensor([0, 2, 1, 1])
    expected = []
    for i in range(4):
        loss = F.cross_entropy(model(pixels[i : i + 1]).logits, labels[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        expected.append(sum(g.square().sum() for g in gradients if g is not None) ** 0.5)
    with ClippingEngine(model, 1.0) as engine:
        found = engine.backward(F.cross_entropy(model(pixels).logits, labels, reduction="none"))
        sums = engine.collect()
    torch.testing.assert_close(found, torch.stack(expected), rtol=RTOL, atol=0)
    assert all(
        sums[name].any() for name in sums if name.endswith(("cls_token", "position_embeddings"))
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vision_transformer_with_dropout_beside_bare_parameters(strategy):
    """The module that owns cls_token also drops: it is run again with the masks of the batch."""
    model = vit(dropout=0.5)
    pixels, labels = torch.randn(3, 3, 8, 8).double(), torch.tensor([0, 2, 1])

    def losses() -> Tensor:
        torch.manual_seed(5)
        return F.cross_entropy(model(pixels).logits, labels, reduction="none")

    expected = [
        torch.stack([g.square().sum() for g in one.values()]).sum().sqrt()
        for one in per_example_gradients(losses(), dict(model.named_parameters()))
    ]
    with ClippingEngine(model, 1.0, strategy=strategy) as engine:
        found = engine.backward(losses())
    torch.testing.assert_close(found, torch.stack(expected), rtol=RTOL, atol=0)


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
    model = Replaced(kind(9, 4)).double()
    tokens = torch.randint(0, 9, (3, 5))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    loss = lambda module, inputs: module(inputs["input_ids"])  # noqa: E731
    expected_norms, expected = loop_oracle(model, batch, 1.0, loss)
    found_norms, found = engine_result(model, batch, 1.0, loss=loss)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)


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


def test_a_deep_model_of_rules_and_fallbacks_under_checkpointing():
    model = llama()
    batch = batch_for(model, (9, 4, 2))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected_norms, expected = loop_oracle(model, batch, 0.5)
    found_norms, found = engine_result(model, batch, 0.5)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)
    assert alone(batch, 0)["input_ids"].shape == (1, 9)
