"""Norms and clipped sums equal a loop over single, unpadded examples in plain autograd.

These are invariants 2 and 12.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    BUILDERS,
    SHORT,
    TinyTied,
    albert,
    assert_same_sums,
    batch_for,
    bert,
    engine_result,
    gpt2,
    loop_oracle,
    middle_norm,
    roberta,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine
from hf_dp.losses import per_example_loss

# float64: the engine orders sums differently from the loop, so a few hundred roundings of 1e-16;
# 1e-9 is the design's.
RTOL = 1e-9


def assert_exact(
    model: Any,
    batch: Any,
    *,
    clipping_norm: float | None = None,
    rtol: float = RTOL,
    **options: Any,
) -> None:
    norms, _ = loop_oracle(model, batch, 1.0)
    clipping_norm = middle_norm(norms) if clipping_norm is None else clipping_norm
    norms, sums = loop_oracle(model, batch, clipping_norm)
    found_norms, found_sums = engine_result(model, batch, clipping_norm, **options)
    torch.testing.assert_close(
        found_norms.double(), norms, rtol=rtol, atol=rtol * float(norms.max())
    )
    assert_same_sums(found_sums, sums, atol=rtol * clipping_norm)


def only(model: nn.Module, wanted: Any) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted(name))
    return model


SELECTIONS = {
    "no_embeddings": lambda name: (
        "embeddings" not in name and "wte" not in name and "wpe" not in name
    ),
    "bias_only": lambda name: name.endswith("bias"),
    "layer_norm_only": lambda name: "LayerNorm" in name or "ln_" in name,
    "layer_norm_bias_only": lambda name: (
        ("LayerNorm" in name or "ln_" in name) and name.endswith("bias")
    ),
    "embeddings_only": lambda name: "embeddings" in name or "wte" in name or "wpe" in name,
    "head_only": lambda name: name.startswith(
        ("classifier", "score", "lm_head", "transformer.wte")
    ),
    "first_layer_only": lambda name: ".0." in name,
    "positions_only": lambda name: "position_embeddings" in name or "wpe" in name,
    "one_linear_weight": lambda name: name.endswith(
        ("1.output.dense.weight", "1.mlp.c_proj.weight")
    ),
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2_tied"])
def test_frozen_parts(name, selection):
    model = only(BUILDERS[name](), SELECTIONS[selection])
    batch = batch_for(model, (11, 1, 6))
    assert_exact(model, batch)
    _, sums = engine_result(model, batch, 1.0)
    assert list(sums) == [n for n, p in model.named_parameters() if p.requires_grad]


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
    model = UsedTwice().double()
    loss = lambda module, inputs: module(inputs["input_ids"])  # noqa: E731
    tokens = torch.randint(0, 9, (4, length))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    norms, _ = loop_oracle(model, batch, 1.0, loss)
    expected_norms, expected = loop_oracle(model, batch, middle_norm(norms), loss)
    found_norms, found = engine_result(model, batch, middle_norm(norms), loss=loss)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)


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
            engine.backward(losses(x, y)), torch.stack(expected), rtol=RTOL, atol=0
        )


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_tied_embedding_and_head(padding_idx, length):
    """A row at the padding index gets no gradient from look-ups but one from the head."""
    torch.manual_seed(0)
    model = TinyTied(padding_idx=padding_idx).double()
    loss = lambda module, inputs: torch.sin(module(inputs["input_ids"])).mean(1).sum(1)  # noqa: E731
    tokens = torch.randint(0, 11, (4, length))
    tokens[:, 0] = 3
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    norms, _ = loop_oracle(model, batch, 1.0, loss)
    expected_norms, expected = loop_oracle(model, batch, middle_norm(norms), loss)
    found_norms, found = engine_result(model, batch, middle_norm(norms), loss=loss)
    torch.testing.assert_close(found_norms, expected_norms, rtol=RTOL, atol=0)
    assert_same_sums(found, expected, atol=RTOL)


def test_backward_calls_add_up_and_collect_resets():
    model = bert()
    batch = batch_for(model, SHORT)
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(per_example_loss(model, batch))
        once = engine.collect()
        engine.backward(per_example_loss(model, batch))
        engine.backward(per_example_loss(model, batch))
        twice = engine.collect()
        nothing = engine.collect()
    assert_same_sums(twice, {name: 2 * value for name, value in once.items()}, atol=RTOL)
    assert all(not value.any() for value in nothing.values())


def test_keys_are_the_trainable_parameters_and_unused_ones_get_zeros():
    model = gpt2()
    model.unused = nn.Linear(3, 2)
    batch = batch_for(model, SHORT)
    _, sums = engine_result(model, batch, 1.0)
    assert list(sums) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name: value.shape for name, value in sums.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert not sums["unused.weight"].any()
    assert not sums["unused.bias"].any()


def test_clipped_sum_of_one_example_has_the_clipping_norm():
    model = roberta()
    batch = batch_for(model, (6,))
    (norm,), sums = engine_result(model, batch, 0.1)
    assert float(norm) > 0.1
    total = torch.stack([value.square().sum() for value in sums.values()]).sum().sqrt()
    torch.testing.assert_close(total, torch.tensor(0.1, dtype=torch.float64), rtol=1e-12, atol=0)


def lora(name: str) -> Any:
    model = BUILDERS[name]()
    targets = {"bert": ["query", "value"], "gpt2_tied": ["c_attn", "c_fc"]}[name]
    torch.manual_seed(1)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=name == "gpt2_tied",
            init_lora_weights=False, task_type="SEQ_CLS" if name == "bert" else "CAUSAL_LM",
        ),
    )  # fmt: skip
    return wrapped.double().train()


def test_lora_under_gradient_checkpointing_with_frozen_embeddings():
    model = lora("bert")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_exact(model, batch_for(model, SHORT))


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
    model = albert()
    batch = batch_for(model, (6, 4))
    norms, _ = engine_result(model, batch, 1.0)
    assert len(model.albert.encoder.albert_layer_groups) == 1
    assert model.config.num_hidden_layers == 3
    torch.testing.assert_close(norms, loop_oracle(model, batch, 1.0)[0], rtol=RTOL, atol=0)
