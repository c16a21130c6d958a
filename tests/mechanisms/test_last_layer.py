"""Clipping and noise of the representation against equations 8 and 9; where it is found; what must
not happen to it."""

from contextlib import AbstractContextManager

import models
import pytest
import tiny
import torch
from scipy import stats
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnsupportedModelError
from hf_dp.mechanisms import last_layer
from hf_dp.mechanisms.last_layer import block_loss, clip_vectors, find_last_layer, into_blocks
from hf_dp.noise import SecretRandomness

REJECT = 1e-8


def noising(
    layer: nn.Module,
    clipping_norm: float = 0.7,
    noise_std: float = 1.3,
    insecure_seed: int | None = None,
) -> AbstractContextManager[None]:
    randomness = SecretRandomness(insecure_seed)
    return last_layer.noising(
        layer, clipping_norm, lambda vectors: vectors + randomness.gaussian_like(vectors, noise_std)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clipping_is_equation_8_and_never_beyond_the_norm(dtype):
    rows = (torch.randn(200, 33) * torch.logspace(-30, 18, 200)[:, None]).to(dtype)
    exact = rows.double() * (0.7 / rows.double().norm(dim=1, keepdim=True)).clamp_max(1)
    clipped = clip_vectors(rows if dtype != torch.bfloat16 else rows.float(), 0.7).double()
    assert torch.allclose(clipped, exact, rtol=1e-6, atol=0)
    assert clipped.norm(dim=1).max() <= 0.7 * (1 + 1e-6)


def test_a_row_that_is_not_finite_is_nothing_and_spoils_no_other():
    rows = torch.randn(4, 5, dtype=torch.float64)
    rows[1, 2], rows[2, 0] = torch.nan, torch.inf
    rows.requires_grad_()
    clipped = clip_vectors(rows, 0.5)
    clipped.sum().backward()
    assert not clipped[1:3].any() and clipped.isfinite().all()
    assert not rows.grad[1:3].any() and rows.grad.isfinite().all()


def test_the_gradient_goes_through_the_clip():
    scales = torch.tensor([0.01, 0.1, 0.4, 1, 5, 50])[:, None]
    rows = torch.randn(6, 4, dtype=torch.float64) * scales
    assert torch.autograd.gradcheck(lambda x: clip_vectors(x, 0.5), rows.requires_grad_())


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_the_noise_has_its_standard_deviation_and_not_another(factor, accepted):
    """(2/3 and 3/2 are the planted bugs.)"""
    layer = nn.Linear(50, 2)
    rows = torch.randn(400, 50)
    seen = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with noising(layer, noise_std=1.3 * factor):
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
        layer(rows)
    noise = (seen[-1] - clip_vectors(rows, 0.7)) / 1.3
    p = stats.kstest(noise.double().flatten().numpy(), "norm").pvalue
    assert (p > REJECT) == accepted
    assert (stats.pearsonr(*noise[:, :2].T.double().numpy()).pvalue > REJECT) and not torch.equal(
        noise[0], noise[1]
    )


def test_outside_of_a_step_nothing_is_added():
    model = tiny.model(dropout=0.1)
    batch = {
        "input_ids": torch.tensor([[2, 5, 3]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
    }
    _, layer = find_last_layer(model, batch)
    before = model.eval()(**batch).logits
    with noising(layer):
        noised = model(**batch).logits
    assert not torch.allclose(before, noised)
    assert torch.equal(before, model(**batch).logits) and not layer._forward_pre_hooks


LAYERS = {
    **dict.fromkeys(["bert", "distilbert", "albert", "deberta_v2", "modernbert"], "classifier"),
    **dict.fromkeys(["vit", "dinov2", "convnext"], "classifier"),
    **dict.fromkeys(["roberta", "electra", "mpnet"], "classifier.out_proj"),
    "bart_classifier": "classification_head.out_proj",
}


@pytest.mark.parametrize(("name", "layer"), LAYERS.items())
def test_the_last_layer_is_found(name, layer):
    architecture = models.ARCHITECTURES[name]
    model = architecture.build(dropout=0.1, dtype=torch.float32)
    batch = models.collate(model, architecture.examples(model, (5, 8, 3)))
    with architecture.precision():
        assert find_last_layer(model, batch)[0] == layer
        assert find_last_layer(model, batch, layer)[0] == layer
        with pytest.raises(
            UnsupportedModelError, match="a layer that is used once, takes one vector per example"
        ):
            find_last_layer(model, batch, next(iter(dict(model.named_children()))))
    assert model.training and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "named", "message"),
    [
        ("gpt2_tied", None, "predicts for each token .or generates text., so no single"),
        ("bert_masked_lm", None, "predicts for each token"),
        ("t5", None, "predicts for each token"),
        ("gpt2_classifier", None, "Layers that take one vector per example: none"),
        ("bert", "head", "`representation_module`='head' to be the last layer.*'classifier'"),
    ],
)
def test_what_has_no_such_layer_is_refused_with_what_could_be_named(name, named, message):
    architecture = models.ARCHITECTURES[name]
    model = architecture.build(dtype=torch.float32)
    batch = models.collate(model, architecture.examples(model, (5, 8)))
    with pytest.raises(UnsupportedModelError, match=message):
        find_last_layer(model, batch, named)


class TwiceOrCheckpointed(nn.Module):
    def __init__(self, mode: str):
        super().__init__()
        self.below, self.layer, self.mode = nn.Linear(6, 5), nn.Linear(5, 2), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "twice":
            return self.layer(self.below(x)) + self.layer(self.below(-x))
        if self.mode == "checkpointed":
            return checkpoint(lambda value: self.layer(self.below(value)), x, use_reentrant=False)
        return self.layer(self.below(x))


def test_gradient_checkpointing_gets_the_same_noise_again(monkeypatch):
    """The gradient is that of the forward that was seen; with fresh noise on recompute (planted) it
    is another."""
    torch.manual_seed(0)
    x = torch.randn(7, 6)

    def gradients(mode: str) -> list[torch.Tensor]:
        model = TwiceOrCheckpointed(mode)
        model.load_state_dict(weights)
        with noising(model.layer, 0.5, 1.0, insecure_seed=3):
            model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    weights = TwiceOrCheckpointed("plain").state_dict()
    plain = gradients("plain")
    assert all(
        torch.allclose(*pair, rtol=1e-5, atol=1e-6)
        for pair in zip(gradients("checkpointed"), plain, strict=True)
    )

    def fresh_each_time(clipping_norm, noise, released, module, inputs):
        return (noise(clip_vectors(inputs[0], clipping_norm)),)

    monkeypatch.setattr(last_layer, "_enter", fresh_each_time)
    assert not torch.allclose(gradients("checkpointed")[2], plain[2], rtol=1e-2)


def test_other_inputs_than_one_vector_per_example_are_refused():
    model = TwiceOrCheckpointed("twice")
    with noising(model.layer), pytest.raises(UnsupportedModelError, match="two different repres"):
        model(torch.randn(3, 6))
    for shape in ((3, 4, 5), (5,)):
        layer = nn.Linear(5, 2)
        with noising(layer), pytest.raises(UnsupportedModelError, match="one vector per example"):
            layer(torch.randn(shape))


def test_a_vector_with_its_label_inside_has_the_rows_norm():
    rows, labels = torch.randn(9, 4), torch.arange(9) % 3
    vectors = into_blocks(rows, labels, 3)
    assert vectors.shape == (9, 12) and torch.allclose(vectors.norm(dim=1), rows.norm(dim=1))
    assert torch.equal(vectors.view(9, 3, 4)[torch.arange(9), labels], rows)


def test_the_loss_of_vectors_needs_no_label_and_is_cross_entropy_without_noise():
    layer = nn.Linear(4, 3).double()
    rows, labels = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 3
    vectors = into_blocks(rows, labels, 3)
    expected = (
        nn.functional.cross_entropy(layer(rows), labels, reduction="none") + layer.bias[labels]
    )
    assert torch.allclose(block_loss(layer, vectors), expected)
    block_loss(layer, vectors).sum().backward()
    got, layer.weight.grad = layer.weight.grad.clone(), None
    assert layer.bias.grad is None  # its gradient would need the label
    nn.functional.cross_entropy(layer(rows), labels, reduction="sum").backward()
    assert torch.allclose(got, layer.weight.grad)
