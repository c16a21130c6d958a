"""The self-check passes on good models and refuses bad ones, and leaves everything as it was."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers
from models import BUILDERS, alone, batch_for, bert, gpt2, llama, olmoe
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dp.clipping import norms, rules, self_check
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.gradients import Dense, Unformed, Weights
from hf_dp.errors import SelfCheckError, UnaccountedGradientError, UnsupportedModelError
from hf_dp.losses import per_example_loss


def check(model, loss=per_example_loss, left=False):
    batch = batch_for(model, (5, 9), left=left)
    self_check(model, loss, batch, [alone(batch, 0), alone(batch, 1)])


@pytest.mark.parametrize("name", ["roberta", "albert", "gpt2_classifier", "gpt2_tied", "llama"])
def test_good_models_pass_with_dropout_configured(name):
    check(BUILDERS[name](dropout=0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(BUILDERS[name](dropout=0.5, dtype=torch.float32))


def test_more_examples_than_tokens_pass_in_16_bits():
    model = bert(dtype=torch.float32)
    batch = batch_for(model, (2, 3, 2, 3, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        self_check(model, per_example_loss, batch, [alone(batch, place) for place in range(5)])


def test_float32_left_padding_and_gradient_checkpointing_pass():
    check(gpt2(dtype=torch.float32), left=True)
    check(llama(dtype=torch.float32), left=True)
    model = bert(dropout=0.3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(model)


COUPLED = {
    "batch mean": lambda m, i: per_example_loss(m, i).mean().expand(len(i["labels"])),
    "divided by the batch size": lambda m, i: per_example_loss(m, i) / len(i["labels"]),
    "times the tokens of all": lambda m, i: per_example_loss(m, i) * i["attention_mask"].sum(),
    "divided by the padded length": lambda m, i: per_example_loss(m, i) / i["input_ids"].shape[1],
    "centered on the batch": lambda m, i: (lambda x: x - 0.1 * x.mean())(per_example_loss(m, i)),
    "attention to padding": lambda m, i: per_example_loss(m, {**i, "attention_mask": torch.ones_like(i["input_ids"])}),
    "exchanged": lambda m, i: per_example_loss(m, i).flip(0),
}  # fmt: skip


@pytest.mark.parametrize("case", COUPLED)
def test_coupled_losses_are_refused(case):
    with pytest.raises(SelfCheckError, match="beside a longer one"):
        check(bert(), COUPLED[case])


# Where 16 bits compute, only examples of one shape share a batch.
OF_SHAPE = {"divided by the padded length", "attention to padding"}


@pytest.mark.parametrize("case", sorted(COUPLED.keys() - OF_SHAPE))
def test_coupled_losses_are_refused_in_16_bits(case):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(SelfCheckError):
        check(bert(dtype=torch.float32), COUPLED[case])


class RoundedByShape(nn.Module):
    """What 16 bits do to a loss and its gradient where logits are large: by the shape of the batch,
    they are up to a fifth away."""

    def forward(self, losses: Tensor, shape: torch.Size) -> Tensor:
        return losses * (1 + 0.2 / sum(shape)) if torch.is_autocast_enabled("cpu") else losses


def test_what_16_bits_round_by_shape_is_not_taken_for_a_coupling(monkeypatch):
    rounded = RoundedByShape()

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return 8 * rounded(per_example_loss(model, inputs), inputs["input_ids"].shape[:1])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(bert(dtype=torch.float32), loss)
        backward = ClippingEngine.backward
        monkeypatch.setattr(ClippingEngine, "backward", lambda *given: 1.1 * backward(*given))
        with pytest.raises(SelfCheckError, match="by autograd but"):
            check(bert(dtype=torch.float32), loss)


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
    right = rules.RULES[RULES[name]]

    def wrong(use, kept, grad):
        found = dict(right.gradients(use, kept, grad))
        for name, gradient in found.items():
            if isinstance(gradient, Unformed):
                found[name] = gradient = gradient.formed()
            for field in ("left", "grads", "gradients"):
                if hasattr(gradient, field):
                    setattr(gradient, field, getattr(gradient, field) * factor)
        return found

    monkeypatch.setitem(rules.RULES, RULES[name], dataclasses.replace(right, gradients=wrong))
    with pytest.raises(SelfCheckError, match="gradient norm"):
        check(bert())


def test_a_dropped_inner_product_is_refused(monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))
    with pytest.raises(SelfCheckError, match="norm"):
        check(gpt2())


def test_a_wrong_sum_with_right_norms_is_refused(monkeypatch):
    right = Dense.weighted
    monkeypatch.setattr(
        Dense, "weighted", lambda self, weights: right(self, Weights(weights.values * 0.5))
    )
    with pytest.raises(SelfCheckError, match=r"clipped sum of '.*' differs"):
        check(bert())


def test_a_buffer_that_a_forward_changes_is_refused():
    model = bert()
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
    with pytest.raises(SelfCheckError, match="'seen'"):
        check(model)


def _write_none(module, mean):
    module.mean = mean if module.mean is None else 0.9 * module.mean + 0.1 * mean


def _register_late(module, mean):
    if not hasattr(module, "mean"):
        module.register_buffer("mean", mean)


def _write_data(module, mean):
    module.mean.data.mul_(0.9).add_(0.1 * mean)


def _put_another(module, mean):
    module.mean = frozen(0.9 * module.mean.detach() + 0.1 * mean)


def _put_late(module, mean):
    if not hasattr(module, "mean"):
        module.register_parameter("mean", frozen(torch.zeros(2)))
    _write_data(module, mean)


def frozen(values):
    return nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize(
    ("before", "write"),
    [
        (lambda model: model.register_buffer("mean", None), _write_none),
        (lambda model: None, _register_late),
        (lambda model: model.register_buffer("mean", torch.zeros(())), _write_data),
        (lambda model: model.register_parameter("mean", frozen(torch.zeros(()))), _write_data),
        (lambda model: model.register_parameter("mean", frozen(torch.zeros(4))), _write_data),
        (lambda model: model.register_parameter("mean", frozen(torch.ones(4, 2))), _put_another),
        (lambda model: None, _put_late),
    ],
    ids=["empty buffer", "late buffer", "buffer", "one frozen", "frozen", "another", "late"],
)
def test_a_running_mean_is_refused_however_it_is_kept(before, write):
    """Each would be saved without noise. Neither a name that was there nor a version shows it."""
    model = bert()
    before(model)

    def note(module, args, kwargs):
        write(module, kwargs["input_ids"].double().mean())

    model.register_forward_pre_hook(note, with_kwargs=True)
    with pytest.raises(SelfCheckError, match="changed the buffer or parameter 'mean'"):
        check(model)


@pytest.mark.parametrize("decay", [0.9999, 0.99999])
def test_a_loss_that_slowly_follows_earlier_examples_is_refused(decay):
    """Losses alone and together agree to 1e-3, and a far row of a step moves the next by 18 C."""
    scale = 1.0

    def scaled(model, inputs):
        nonlocal scale
        own = per_example_loss(model, inputs)
        scale = decay * scale + (1 - decay) * float(own.detach().mean())
        return own / scale

    with pytest.raises(SelfCheckError, match="at first but .* keep something from call to call"):
        check(bert(dtype=torch.float32), scaled)


def test_in_16_bits_too():
    scale = 1.0

    def scaled(model, inputs):
        nonlocal scale
        scale *= 0.999
        return per_example_loss(model, inputs) * scale

    said = pytest.raises(SelfCheckError, match="keep something from call to call")
    with torch.autocast("cpu", dtype=torch.bfloat16), said:
        check(bert(dtype=torch.float32), scaled)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_frozen_parameters_of_rare_kinds_pass(dtype):
    model = bert()
    model.register_parameter("rare", frozen(torch.zeros(4).to(dtype)))
    check(model)


def test_lora_of_experts_passes_and_weights_written_in_a_forward_are_refused():
    """PEFT registers these parameters again in each forward, which is no change."""
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_parameters=["experts.down_proj"])
    model = get_peft_model(olmoe(dtype=torch.float32), config)
    check(model)
    weight = model.get_parameter("base_model.model.model.layers.0.mlp.experts.base_layer.down_proj")
    model.register_forward_pre_hook(lambda *_: (weight.data.add_(1e-6), None)[1])
    with pytest.raises(SelfCheckError, match="down_proj'"):
        check(model)


@pytest.mark.parametrize("loss", [per_example_loss, COUPLED["batch mean"]], ids=["good", "refused"])
def test_model_and_generators_are_left_as_found(loss):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = bert().eval()
    model.classifier.train()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    if loss is per_example_loss:
        check(model)
    else:
        with pytest.raises(SelfCheckError):
            check(model, loss)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in model.named_parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def test_refusals_of_the_engine_come_through():
    model = bert()
    model.extra = nn.BatchNorm1d(2)
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        check(model)
    model = bert()
    model.classifier.bias.grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(UnaccountedGradientError, match=r"classifier\.bias"):
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
        match=r"engine fail on synthetic examples of shapes .*pixel_values.*\(RuntimeError: The",
    ):
        self_check(model, per_example_loss, images, each)


def test_a_lack_of_memory_stays_one():
    def lacking(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = bert()
    batch = batch_for(model, (5, 3))
    with pytest.raises(torch.OutOfMemoryError):
        self_check(model, lacking, batch, [alone(batch, 0), alone(batch, 1)])
