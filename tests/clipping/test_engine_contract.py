"""What the engine refuses, in which words, and what it leaves behind."""

import copy
import re
from typing import Any

import pytest
import torch
from models import (
    BUILDERS,
    SHORT,
    Net,
    alone,
    assert_net_exact,
    assert_not_entered,
    assert_refused,
    batch_for,
    bert,
    engine_result,
    gpt2,
    llama,
    norm_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BigBirdConfig,
    BigBirdForSequenceClassification,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

from hf_dp.clipping import ClippingEngine
from hf_dp.errors import (
    InvalidArgumentError,
    UnaccountedGradientError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def x(examples: int = 3) -> Tensor:
    return torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))


# -- arguments ---


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_bad_clipping_norm(value):
    with pytest.raises(
        InvalidArgumentError, match=r"`clipping_norm` to be .*, got " + re.escape(repr(value))
    ):
        ClippingEngine(linear(), value)


@pytest.mark.parametrize(("name", "value"), [("clipping", "flatt"), ("strategy", "book-keeping")])
def test_unknown_choice_names_the_nearest(name, value):
    with pytest.raises(InvalidArgumentError, match=f"`{name}` to be one of .*Did you mean"):
        ClippingEngine(linear(), 1.0, **{name: value})


# -- backward ---


def test_engine_backward_outside_the_with():
    model = linear()
    engine = ClippingEngine(model, 1.0)
    losses = model(x()).squeeze(1)
    with pytest.raises(UnaccountedGradientError, match="only inside `with engine:`"):
        engine.backward(losses)
    with engine:
        losses = model(x()).squeeze(1)
    with pytest.raises(UnaccountedGradientError, match="only inside `with engine:`"):
        engine.backward(losses)


@pytest.mark.parametrize("leave_first", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_autograd_backward_past_the_engine(name, leave_first):
    model = BUILDERS[name]()
    batch = batch_for(model, SHORT)
    with ClippingEngine(model, 1.0):
        losses = per_example_loss(model, batch)
        if not leave_first:
            with pytest.raises(UnaccountedGradientError, match=r"Call engine\.backward"):
                losses.sum().backward()
    if leave_first:
        with pytest.raises(UnaccountedGradientError, match=r"Call engine\.backward"):
            losses.sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_number_of_losses_that_is_not_the_number_of_examples(count):
    model = linear()
    with ClippingEngine(model, 1.0) as engine:
        losses = torch.cat([model(x()).squeeze(1)] * 2)[:count]
        with pytest.raises(
            UnsupportedLossError, match=f"each of the 3 examples of the forward, got {count}"
        ):
            engine.backward(losses)


@pytest.mark.parametrize("after", [False, True], ids=["first", "after_another"])
def test_an_empty_batch_adds_nothing(after):
    model = linear()
    with ClippingEngine(model, 1.0) as engine:
        if after:
            engine.backward(model(x()).squeeze(1))
            engine.collect()
        assert engine.backward(torch.zeros(0)).shape == (0,)
        assert not any(value.any() for value in engine.collect().values())


def test_refused_batches_add_nothing():
    """An error half way leaves neither sums nor gradients of what was not clipped."""
    model = Net(  # a head tied by hand
        lambda net, x: F.linear(net.inner(x), net.inner.weight).sum(1), inner=nn.Linear(4, 4)
    )
    with ClippingEngine(model, 1.0) as engine:
        with pytest.raises(UnaccountedGradientError, match="'inner.weight'.*bypassing clipping"):
            engine.backward(model(x()))
        assert not any(value.any() for value in engine.collect().values())
    assert all(p.grad is None for p in model.parameters())  # for no optimizer to find


@pytest.mark.parametrize(
    "losses", [lambda x: x.sum(), lambda x: x[:, None], lambda x: x.long()], ids=["0d", "2d", "int"]
)
def test_losses_must_be_one_float_per_example(losses):
    model = linear()
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedLossError, match=r"\(b,\)"):
        engine.backward(losses(model(x()).squeeze(1)))


def test_a_stale_gradient_is_refused():
    model = linear()
    model.bias.grad = torch.zeros(1)
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnaccountedGradientError, match="zero_grad"),
    ):
        engine.backward(model(x()).squeeze(1))


def test_nothing_trainable_is_refused():
    assert_not_entered(nn.ReLU(), "no trainable")


def flattening(drop: int = 0) -> Net:
    """OPT's way: (b * T, d) inside."""

    def losses(net: Any, x: Tensor) -> Tensor:
        rows = net.inner(x.flatten(0, 1)[drop:])
        return torch.cat([rows.new_zeros(drop, 1), rows]).view(len(x), -1).sum(1)

    return Net(losses, inner=nn.Linear(3, 1))


def test_flattened_positions_are_split_by_example():
    assert_net_exact(flattening().double(), torch.randn(4, 5, 3).double())


def test_rows_that_are_no_multiple_of_the_examples_are_refused_by_shape():
    assert_refused(flattening(drop=1), torch.randn(4, 5, 3), r"Linear `inner` .*\(19, 3\)")


# -- nesting and restoring ---


def test_nested_engines_are_refused_and_the_outer_one_goes_on():
    model = linear()
    with ClippingEngine(model, 1.0) as outer:
        for inner in (ClippingEngine(model, 1.0), outer):
            with pytest.raises(UnaccountedGradientError, match="already inside a ClippingEngine"):
                inner.__enter__()
        assert outer.backward(model(x()).squeeze(1)).shape == (3,)


def test_an_engine_can_be_entered_again():
    model = linear()
    engine, once = ClippingEngine(model, 1.0), ClippingEngine(model, 1.0)
    for _ in range(2):
        with engine:
            engine.backward(model(x()).squeeze(1))
    with once:
        once.backward(model(x()).squeeze(1))
    # What an earlier block left uncollected is not part of this one's sums: it may have ended in an
    # error.
    torch.testing.assert_close(engine.collect()["weight"], once.collect()["weight"])


def forwards(model: nn.Module) -> dict[str, object]:
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_the_model_is_restored(name, fails):
    model = BUILDERS[name]()
    model.train()
    patched = next(
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module._forward_pre_hooks
    )
    original = patched.forward
    patched.forward = lambda *args: original(*args)
    before, hooks = forwards(model), len(model._forward_pre_hooks)
    if fails:
        with pytest.raises(KeyError), ClippingEngine(model, 1.0):
            raise KeyError
    else:
        engine_result(model, batch_for(model, SHORT), 1.0)
    assert forwards(model) == before
    assert len(model._forward_pre_hooks) == hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", BUILDERS)
def test_the_output_is_the_same_inside_and_outside(name):
    model = BUILDERS[name]()
    inputs = {key: value for key, value in batch_for(model, SHORT).items() if key != "labels"}
    outside = model(**inputs).logits
    with ClippingEngine(model, 1.0):
        # Conv1D and fused biases may add in another order: the last bit of float64 only
        torch.testing.assert_close(model(**inputs).logits, outside, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, outside, rtol=1e-12, atol=1e-12)


def test_the_output_under_autocast_is_the_same_inside_and_outside():
    for model in (bert(dtype=torch.float32), gpt2(dtype=torch.float32), llama(dtype=torch.float32)):
        inputs = {key: value for key, value in batch_for(model, SHORT).items() if key != "labels"}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outside = model(**inputs).logits
            with ClippingEngine(model, 1.0):
                inside = model(**inputs).logits
        assert inside.dtype == outside.dtype
        torch.testing.assert_close(
            inside, outside, rtol=2e-2, atol=2e-2
        )  # bf16 has 8 bits, some sums differ in order


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_deep_copy_made_inside_uses_its_own_weights(name):
    model = BUILDERS[name]()
    inputs = {
        key: value for key, value in alone(batch_for(model, SHORT), 0).items() if key != "labels"
    }
    with ClippingEngine(model, 1.0):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        inside = twin(**inputs).logits
    reference = copy.deepcopy(model)
    reference.load_state_dict(twin.state_dict())
    torch.testing.assert_close(inside, reference(**inputs).logits, rtol=1e-12, atol=1e-12)


# -- models it cannot serve ---


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=repr,
)
def test_batch_statistics_are_refused_by_name(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    assert_not_entered(model, r"`1` is a .*GroupNorm or nn\.LayerNorm")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}},
    ],
    ids=str,
)
def test_rotary_embeddings_that_read_the_longest_example(parameters):
    model = llama()
    model.config.rope_parameters = parameters
    assert_not_entered(model, "(dynamic|longrope) rotary")


def big_bird(attention_type: str) -> BigBirdForSequenceClassification:
    """Sparse from 29 positions on."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, block_size=4, num_random_blocks=1, attention_type=attention_type,
        max_position_embeddings=128,
    )  # fmt: skip
    model = BigBirdForSequenceClassification(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("attention_type", "depends"), [("block_sparse", True), ("original_full", False)]
)
def test_block_sparse_attention_depends_on_the_padding_and_is_refused(attention_type, depends):
    model = big_bird(attention_type).eval()
    batch = batch_for(model, (26, 60))
    beside = per_example_loss(model, batch)[0]
    by_itself = per_example_loss(big_bird(attention_type).eval(), alone(batch, 0))[0]
    assert torch.isclose(by_itself, beside, rtol=1e-9) != depends
    if depends:
        assert_not_entered(big_bird(attention_type), "attention_type='original_full'")
    else:
        with ClippingEngine(model, 1.0):
            pass


def test_sorting_and_crowding_models_are_refused():
    model = bert()
    model.config.model_type = "reformer"
    assert_not_entered(model, "Reformer sorts positions")
    config = NllbMoeConfig(
        d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=61, num_experts=2,
        encoder_layers=1, decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    assert_not_entered(NllbMoeForConditionalGeneration(config), "router` is a NllbMoeTop2Router")


@pytest.mark.parametrize(
    ("option", "value", "trainable"),
    [
        ("max_norm", 1.0, True),
        ("max_norm", 1.0, False),  # still rewrites the rows that an example looks up
        ("scale_grad_by_freq", True, True),
        ("sparse", True, True),
    ],
)
def test_embedding_options_that_couple_examples(option, value, trainable):
    model = nn.Sequential(nn.Embedding(5, 4, **{option: value}), nn.Linear(4, 1))
    model[0].requires_grad_(trainable)
    assert_not_entered(model, option)


def test_time_first_input_is_refused_by_shape():
    model = nn.Linear(4, 1)
    with ClippingEngine(model, 1.0) as engine:
        losses = model(torch.randn(5, 3, 4)).squeeze(2).sum(0)
        with pytest.raises(UnsupportedLossError, match="5 examples of the forward, got 3"):
            engine.backward(losses)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["hook", "parametrization"])
@pytest.mark.parametrize("examples", [2, 3])
def test_weight_norm_is_exact_or_refused(kind, examples):
    """Its weight is computed again at each forward. The plain rule would clip and sum a gradient
    that belongs to no parameter."""
    from torch.nn.utils import parametrizations, weight_norm

    torch.manual_seed(0)
    model = (weight_norm if kind == "hook" else parametrizations.weight_norm)(nn.Linear(4, 3))
    (loss,) = model(x(1)).square().sum(1)
    expected = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())))
    )
    with ClippingEngine(model, 1e9) as engine:
        try:
            engine.backward(model(x(1).expand(examples, -1)).square().sum(1))
        except (UnaccountedGradientError, UnsupportedModelError):
            return
        sums = engine.collect()
    for name, gradient in expected.items():
        torch.testing.assert_close(sums[name], examples * gradient)


# -- bf16 ---


@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_contributions_under_bf16_autocast(name):
    """One example moves the sum by at most C. Norms are those of the numbers that are summed, and
    sums are float64."""
    model = BUILDERS[name](dtype=torch.float32)
    batch = batch_for(model, (30, 7, 30, 2))
    clipping_norm = 0.05

    def sums(factors: Tensor) -> dict[str, Tensor]:
        with ClippingEngine(model, clipping_norm) as engine:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = per_example_loss(model, batch)
            assert bool(
                (engine.backward(losses * factors)[torch.isfinite(factors)] > clipping_norm).all()
            )
            return engine.collect()

    everyone = sums(torch.ones(4))
    assert {value.dtype for value in everyone.values()} == {torch.float64}
    for removed in range(4):
        factors = torch.ones(4)
        factors[removed] = torch.nan  # removes the example and changes no other number
        without = sums(factors)
        moved = norm_of({key: everyone[key] - without[key] for key in everyone})
        assert 0.99 * clipping_norm < moved <= clipping_norm * (1 + 1e-3)


def test_contributions_of_a_bf16_model():
    model = bert(dtype=torch.bfloat16)
    batch = batch_for(model, (12,))
    (norm,), sums = engine_result(model, batch, 0.05)
    assert float(norm) > 0.05
    assert {value.dtype for value in sums.values()} == {torch.float64}
    assert 0.99 * 0.05 < norm_of(sums) <= 0.05 * (1 + 1e-3)
