"""What the engine refuses, in which words, and what it leaves behind."""

import copy
import re
from typing import Any

import pytest
import torch
import transformers as hf
from models import (
    BUILDERS,
    DEVICES,
    ENCODER,
    SHORT,
    Net,
    alone,
    assert_net_exact,
    assert_not_entered,
    assert_refused,
    batch_for,
    bert,
    builder,
    clipped,
    llama,
    mixtral,
    norm_of,
    on,
    qwen3_moe,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.engine import CLIPPINGS, STRATEGIES
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
    said = r"`clipping_norm` to be .*, got " + re.escape(repr(value))
    with pytest.raises(InvalidArgumentError, match=said):
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda losses, n=n: losses.repeat(2)[:n], f"the 3 examples of the forward, got {n}") for n in (1, 2, 4)),
        (lambda losses: losses.sum(), r"\(b,\)"),
        (lambda losses: losses[:, None], r"\(b,\)"),
        (lambda losses: losses.long(), r"\(b,\)"),
    ],
)  # fmt: skip
def test_losses_must_be_one_float_per_example_of_the_forward(change, said):
    model = linear()
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedLossError, match=said):
        engine.backward(change(model(x()).squeeze(1)))


@pytest.mark.parametrize("after", [False, True], ids=["first", "after_another"])
def test_an_empty_batch_adds_nothing(after):
    model = linear()
    with ClippingEngine(model, 1.0) as engine:
        if after:
            engine.backward(model(x()).squeeze(1))
            engine.collect()
        assert engine.backward(torch.zeros(0)).shape == (0,)
        assert not any(value.any() for value in engine.collect().values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_examples_that_do_not_count_add_exactly_nothing(clipping, strategy):
    """Not even where their gradients are not finite; they have no norm, and are in no count."""
    rows, counted = x(6), torch.tensor([True, False, True, True, False, False])
    rows[4] = torch.inf
    used: list[Tensor] = []

    def sums(rows: Tensor, counted: Any, of: int) -> tuple[Tensor, list[Tensor]]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p)
        with ClippingEngine(model, 0.5, clipping, strategy) as engine:
            engine.measure(watch=lambda _, keep: used.append(keep))
            losses = model(rows.double()).squeeze(1)
            norms = engine.backward(losses, counted, rows_per_unit=of)
            return norms, list(engine.collect().values())

    norms, found = sums(rows, counted, 1)
    expected_norms, expected = sums(rows[counted], True, 1)
    torch.testing.assert_close([norms, *found], [expected_norms, *expected], rtol=1e-12, atol=0)
    assert used[0].tolist() == counted.tolist()
    assert not any(each.any() for each in sums(rows, torch.zeros(3, dtype=torch.bool), 2)[1])
    with pytest.raises(InvalidArgumentError, match="`counted` to say for each unit"):
        sums(rows, counted, 2)


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


def test_a_stale_gradient_is_refused():
    model = linear()
    model.bias.grad = torch.zeros(1)
    with (
        ClippingEngine(model, 0.1) as engine,
        pytest.raises(UnaccountedGradientError, match="zero_grad"),
    ):
        engine.backward(model(x()).squeeze(1))


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
    # What an earlier block left uncollected is no part of these sums: it may have failed.
    torch.testing.assert_close(engine.collect()["weight"], once.collect()["weight"])


def forwards(model: nn.Module) -> dict[str, object]:
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_the_model_is_restored(name, fails):
    model = BUILDERS[name]()
    model.train()
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    patched = next(module for module in linears if not module._forward_pre_hooks)
    original = patched.forward
    patched.forward = lambda *args: original(*args)
    before, hooks = forwards(model), len(model._forward_pre_hooks)
    if fails:
        with pytest.raises(KeyError), ClippingEngine(model, 1.0):
            raise KeyError
    else:
        clipped(model, batch_for(model, SHORT), 1.0)
    assert forwards(model) == before
    assert len(model._forward_pre_hooks) == hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_the_output_is_the_same_inside_and_outside(name):
    """Conv1D and fused biases may add in another order."""
    model = BUILDERS[name](dtype=torch.float32)
    inputs = without_labels(batch_for(model, SHORT))

    def outputs() -> list[Tensor]:
        plain = model(**inputs).logits
        with torch.no_grad():
            without = model(**inputs).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [plain, without, model(**inputs).logits]

    outside = outputs()
    with ClippingEngine(model, 1.0):
        inside = outputs()
    for one, other, tolerance in zip(inside, outside, (1e-5, 1e-5, 2e-2), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_output_in_float64_is_the_same_inside_and_outside(name):
    """Sums in another order differ in the last bit."""
    model = BUILDERS[name]()
    inputs = without_labels(batch_for(model, SHORT))
    outside = model(**inputs).logits
    with ClippingEngine(model, 1.0):
        torch.testing.assert_close(model(**inputs).logits, outside, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, outside, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_deep_copy_made_inside_uses_its_own_weights(name):
    model = BUILDERS[name]()
    inputs = without_labels(alone(batch_for(model, SHORT), 0))
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


def resnet(frozen: bool) -> Any:
    """Frozen, batch normalization still mixes examples in training, and stores statistics."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))
    if frozen:
        model.resnet.requires_grad_(False)
    return model


def rotary(**parameters: Any) -> Any:
    model = llama()
    model.config.rope_parameters = parameters
    return model


def reformer() -> Any:
    model = bert()
    model.config.model_type = "reformer"
    return model


def nllb_moe() -> Any:
    config = hf.NllbMoeConfig(
        d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=61, num_experts=2,
        encoder_layers=1, decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    return hf.NllbMoeForConditionalGeneration(config)


def embedding(trainable: bool = True, **options: Any) -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4, **options), nn.Linear(4, 1))
    model[0].requires_grad_(trainable)
    return model


GROUP_NORM = r"`1` is a .*GroupNorm or nn\.LayerNorm"
DYNAMIC, FIXED = {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default"}
NOT_ENTERED = {
    "nothing trains": (nn.ReLU, "no trainable"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), GROUP_NORM),
    "synchronized batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), GROUP_NORM),
    "tracked instance norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True)), GROUP_NORM,
    ),
    "ResNet": (lambda: resnet(False), "BatchNorm2d.*statistics of the whole batch"),
    "ResNet, frozen": (lambda: resnet(True), "BatchNorm2d.*statistics of the whole batch"),
    "dynamic RoPE": (lambda: rotary(**DYNAMIC), "dynamic rotary"),
    "dynamic RoPE, old name": (lambda: rotary(type="dynamic", factor=2.0), "dynamic rotary"),
    "longrope": (lambda: rotary(**DYNAMIC | {"rope_type": "longrope"}), "longrope rotary"),
    "dynamic RoPE in some layers": (lambda: rotary(full=FIXED, sliding=DYNAMIC), "dynamic rotary"),
    "dynamic RoPE below a head of one's own": (lambda: nn.Sequential(rotary(**DYNAMIC)), "dynamic rotary"),
    "Reformer": (reformer, "Reformer sorts positions"),
    "NLLB-MoE": (nllb_moe, "router` is a NllbMoeTop2Router"),
    "Mixtral's balance": (lambda: mixtral(output_router_logits=True), "load-balancing loss .* couples examples"),
    "Qwen3's balance": (lambda: qwen3_moe(output_router_logits=True), "load-balancing loss .* couples examples"),
    "max_norm": (lambda: embedding(max_norm=1.0), "max_norm"),
    # It still rewrites the rows that an example looks up.
    "max_norm, frozen": (lambda: embedding(False, max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (lambda: embedding(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse": (lambda: embedding(sparse=True), "sparse"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_ENTERED)
def test_models_that_couple_examples_are_refused_as_the_engine_is_entered(case):
    build, said = NOT_ENTERED[case]
    assert_not_entered(build(), said)


def big_bird(attention_type: str) -> Any:
    """Sparse from 29 positions on."""
    blocks = {"block_size": 4, "num_random_blocks": 1, "attention_type": attention_type}
    sizes = ENCODER | {"max_position_embeddings": 128}
    return builder(hf.BigBirdForSequenceClassification, hf.BigBirdConfig, **sizes, **blocks)()


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
    names, parameters = zip(*model.named_parameters())
    expected = dict(zip(names, torch.autograd.grad(loss, parameters)))
    with ClippingEngine(model, 1e9) as engine:
        try:
            engine.backward(model(x(1).expand(examples, -1)).square().sum(1))
        except (UnaccountedGradientError, UnsupportedModelError):
            return
        sums = engine.collect()
    for name, gradient in expected.items():
        torch.testing.assert_close(sums[name], examples * gradient)


# -- bf16 ---


@pytest.mark.parametrize("of_model", [False, True], ids=["autocast", "model"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_contributions_in_bf16(name, device, of_model):
    """One example adds at most C: norms are those of the numbers that are summed, in float64."""
    model = BUILDERS[name](dtype=torch.bfloat16 if of_model else torch.float32).to(device)
    for length in (30, 12, 2):
        with ClippingEngine(model, 0.05) as engine:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=not of_model):
                losses = per_example_loss(model, on(device, batch_for(model, (length,))))
            assert float(engine.backward(losses)) > 0.05
            sums = engine.collect()
        assert {value.dtype for value in sums.values()} == {torch.float64}
        assert 0.99 * 0.05 < norm_of(sums) <= 0.05 * (1 + 1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama"])
def test_one_row_of_a_padded_batch_moves_the_sum_by_at_most_the_clipping_norm(name, device):
    """Under autocast, for each row that is left out."""
    model = BUILDERS[name](dtype=torch.float32).to(device)
    batch = on(device, batch_for(model, (30, 7, 30, 2)))

    def sums(left_out: int | None) -> dict[str, Tensor]:
        factors = torch.ones(4, device=device)
        if left_out is not None:
            factors[left_out] = 0  # adds nothing and changes no other number
        with ClippingEngine(model, 0.05) as engine:
            with torch.autocast(device, dtype=torch.bfloat16):
                losses = per_example_loss(model, batch)
            assert bool((engine.backward(losses * factors)[factors > 0] > 0.05).all())
            return engine.collect()

    everyone = sums(None)
    assert {value.dtype for value in everyone.values()} == {torch.float64}
    for row in range(4):
        without = sums(row)
        moved = norm_of({key: everyone[key] - without[key] for key in everyone})
        assert 0.99 * 0.05 < moved <= 0.05 * (1 + 1e-3)
