"""More of what the self-check must see, and what it must leave alone (see also test_check.py)."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers
from models import BUILDERS, alone, batch_for, bert, gpt2, llama
from torch import Tensor, nn

from hf_dp.clipping import rules, self_check
from hf_dp.clipping.gradients import Dense, Weights
from hf_dp.errors import SelfCheckError, UnaccountedGradientError, UnsupportedModelError
from hf_dp.losses import per_example_loss


def check(model, loss=per_example_loss, left=False):
    batch = batch_for(model, (5, 9), left=left)
    self_check(model, loss, batch, [alone(batch, 0), alone(batch, 1)])


@pytest.mark.parametrize("name", BUILDERS)
def test_bf16_autocast_passes(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(BUILDERS[name](dtype=torch.float32))


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_left_padding_passes(build):
    check(build(), left=True)


def test_gradient_checkpointing_passes():
    model = bert(dropout=0.3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(model)


COUPLED = {
    "batch mean": lambda m, i: per_example_loss(m, i).mean().expand(len(i["labels"])),
    "divided by the batch size": lambda m, i: per_example_loss(m, i) / len(i["labels"]),
    "divided by the padded length": lambda m, i: per_example_loss(m, i) / i["input_ids"].shape[1],
    "centered on the batch": lambda m, i: (lambda x: x - 0.1 * x.mean())(per_example_loss(m, i)),
    "attention to padding": lambda m, i: per_example_loss(
        m, {**i, "attention_mask": torch.ones_like(i["input_ids"])}
    ),
    "exchanged": lambda m, i: per_example_loss(m, i).flip(0),
}


@pytest.mark.parametrize("case", COUPLED)
def test_coupled_losses_are_refused(case):
    with pytest.raises(SelfCheckError, match="beside a longer one"):
        check(bert(), COUPLED[case])


def test_a_coupling_that_keeps_every_loss_is_refused():
    """Losses agree, gradients do not: each example's gradient also carries its neighbor's."""

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        own = per_example_loss(model, inputs)
        return own + (own.flip(0) - own.flip(0).detach()) * (len(own) > 1)

    with pytest.raises(SelfCheckError, match="gradient norm"):
        check(bert(), loss)


RULES = {"linear": nn.Linear, "layer_norm": nn.LayerNorm, "embedding": nn.Embedding}


@pytest.mark.parametrize("factor", [0.5, 1.1])
@pytest.mark.parametrize("name", RULES)
def test_each_wrong_rule_is_refused(name, factor, monkeypatch):
    """Only what the rule captures is wrong; what it passes on is right."""
    right = rules._RULES[RULES[name]]

    def wrong(use, kept, grad):
        found = right.gradients(use, kept, grad)
        for gradient in found.values():
            for field in ("left", "grads", "gradients"):
                if hasattr(gradient, field):
                    setattr(gradient, field, getattr(gradient, field) * factor)
        return found

    monkeypatch.setitem(rules._RULES, RULES[name], dataclasses.replace(right, gradients=wrong))
    with pytest.raises(SelfCheckError, match="gradient norm"):
        check(bert())


def test_a_wrong_sum_with_right_norms_is_refused(monkeypatch):
    right = Dense.add_weighted_sum
    monkeypatch.setattr(
        Dense, "add_weighted_sum", lambda *a: right(*a[:-1], Weights(a[-1].values * 0.5))
    )
    with pytest.raises(SelfCheckError, match=r"clipped sum of '.*' differs"):
        check(bert())


def test_the_global_generators_are_left_as_found_with_dropout_off():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    model = bert(dropout=0.0)
    torch.manual_seed(0)
    check(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.parametrize("training", [True, False])
def test_mixed_training_modes_are_left_as_found(training):
    model = bert(dropout=0.5).train(training)
    model.classifier.train(not training)
    modes = {name: module.training for name, module in model.named_modules()}
    check(model)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_the_model_is_left_as_found_after_a_refusal():
    model = bert().eval()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(SelfCheckError):
        check(model, COUPLED["batch mean"])
    assert not model.training
    assert all(
        torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters()
    )
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_refusals_of_the_engine_come_through():
    model = bert()
    model.extra = nn.BatchNorm1d(2)
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        check(model)
    model = bert()
    model.classifier.bias.grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(UnaccountedGradientError, match=r"classifier\.bias"):
        check(model)


def test_weight_norm_is_refused():
    model = bert()
    model.classifier = torch.nn.utils.parametrizations.weight_norm(model.classifier)
    with pytest.raises((SelfCheckError, UnsupportedModelError, UnaccountedGradientError)):
        check(model)


def test_an_engine_that_fails_is_named():
    """Windows of images stand where the examples should, and no rule can tell them apart."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    model = transformers.SwinForImageClassification(config)
    images = {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 1])}
    each = [{name: value[i : i + 1] for name, value in images.items()} for i in range(3)]
    with pytest.raises(
        SelfCheckError,
        match=r"engine fail on made-up examples of pixel_values.*\(RuntimeError: The",
    ):
        self_check(model, per_example_loss, images, each)


def test_a_lack_of_memory_stays_one():
    def lacking(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = bert()
    batch = batch_for(model, (5, 3))
    with pytest.raises(torch.OutOfMemoryError):
        self_check(model, lacking, batch, [alone(batch, 0), alone(batch, 1)])
