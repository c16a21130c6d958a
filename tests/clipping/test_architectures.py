"""Compare norms and clipped sums of many architectures with a loop over single examples.

The examples are unpadded in the loop. Models that the engine refuses are refused by name. Each
architecture meets every strategy, every form and two kinds of batches; what else may matter is
spread over the architectures, so that each pair occurs and not each product.
"""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import models
import peft
import pytest
import torch
import transformers as hf
from forms import FORMS, force
from models import (
    ARCHITECTURES,
    DEVICES,
    EACH_RULE,
    EXACT,
    POSITIONS,
    VOCABULARY,
    Architecture,
    Net,
    assert_equal,
    assert_exact,
    assert_net_exact,
    assert_same_sums,
    built,
    clip_losses,
    clipped,
    collate,
    loop,
    loop_over_losses,
    on,
    poison,
    together,
)
from torch import nn
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Layout, own
from hf_dp.clipping import fallback
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import Weights
from hf_dp.clipping.rules import experts
from hf_dp.clipping.rules.experts import Routed
from hf_dp.errors import (
    HfDpError,
    UnaccountedGradientError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss

T = TypeVar("T")
PADDED, LONG = (5, 1, 3), (19, 1, 8)
# A (T, T) look-up or a (T,) one then passes for one row per example.
SQUARE = (3, 1, 3)
# Two examples, one token each, no padding, one example, and one of one token.
OTHERS = [(2, 1), (1, 1, 1), (7, 7), (6,), (1,)]
SOME = ("bert", "gpt2_tied", "gemma3", "t5", "vit")


def turn(name: str, choices: Sequence[T], by: int = 0) -> T:
    """Another choice for each architecture, so that all are taken by some."""
    return choices[(list(ARCHITECTURES).index(name) + by) % len(choices)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_the_loop(name):
    """And the oracle equals plain autograd on the padded batch: the model couples no examples."""
    architecture, model, examples = built(name, PADDED)
    with architecture.precision():
        expected, batch = loop(model, examples), collate(model, examples)
        padded = loop_over_losses(model, together(model, batch), expected.clipping_norm)
        assert_equal(padded.norms, padded.sums, expected)
        for strategy in STRATEGIES if name in SOME else STRATEGIES[:2]:
            assert_equal(*clipped(model, batch, expected.clipping_norm, strategy), expected)
    square = architecture.examples(model, SQUARE)
    assert_exact(architecture, model, square, "book_keeping", "per_example")
    examples = architecture.examples(model, turn(name, OTHERS))
    assert_exact(architecture, model, examples, turn(name, STRATEGIES))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_long_examples_in_every_form_and_in_float32(name, device, monkeypatch):
    """The float64 loop is that of the same weights; 1e-4 is the design's bound for float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of convolutions
    architecture = ARCHITECTURES[name]
    model = architecture.build(dtype=torch.float32).double()
    with architecture.precision():
        examples = architecture.examples(model, LONG)
        expected = loop(model, examples)
        batch = on(device, collate(model, examples))
        model.to(device)
        for form in FORMS:
            with monkeypatch.context() as patch:
                force(form, patch)
                norms, sums = clipped(model, batch, expected.clipping_norm)
            assert_equal(norms.cpu(), on("cpu", sums), expected)
    model.float()
    batch = on(device, collate(model, architecture.examples(model, LONG)))
    norms, sums = clipped(model, batch, expected.clipping_norm)
    assert norms.dtype == torch.float32
    assert {total.dtype for total in sums.values()} == {torch.float64}
    assert_equal(norms.cpu(), on("cpu", sums), expected, tolerance=1e-4)


OF_TOKENS = [n for n in ARCHITECTURES if ARCHITECTURES[n].task not in ("image", "choice")]
OF_DECODERS = [*(n for n in OF_TOKENS if ARCHITECTURES[n].task == "causal_lm"), "gpt2_classifier"]


@pytest.mark.parametrize(
    ("name", "side"), [*((n, "right") for n in OF_TOKENS), *((n, "left") for n in OF_DECODERS)]
)
def test_padded_by_itself_an_example_has_the_same_gradient(name, side):
    """With masks, token types and positions of its own; the loop sees no padding."""
    architecture, model, examples = built(name, PADDED)
    rows = []
    for example in examples:
        mask = torch.ones_like(example["input_ids"])
        rows.append(own({**example, "attention_mask": mask}))
        if getattr(model.config, "type_vocab_size", 0):
            rows[-1]["token_type_ids"] = mask - 1
        if side == "right" and name in OF_DECODERS:
            rows[-1]["position_ids"] = mask.cumsum(1) - 1
    padding = Padding.of(model, SimpleNamespace(padding_side=side))
    made = [padding.alone(row) for row in rows]
    assert {one["input_ids"].shape for one in made} == {(1, 8)}
    with architecture.precision():
        expected = loop(model, examples)
        batch = padding.together(made, Layout())
        assert_equal(*clipped(model, batch, expected.clipping_norm), expected)


@pytest.mark.parametrize("name", SOME[:2])
def test_repeated_examples_count_each_time(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    one, two = architecture.examples(model, (4, 2))
    assert_exact(architecture, model, [one, two, one, one])


# -- frozen parts ---


def _is_embedding(name: str) -> bool:
    words = ("embed", "wte", "wpe", "shared", "relative_attention_bias")
    return any(word in name for word in words)


def _owned_by(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> set[nn.Parameter]:
    owners = (module for module in model.modules() if wanted(module))
    return {p for module in owners for p in module.parameters(recurse=False)}


def _last_owner(model: nn.Module) -> set[nn.Parameter]:
    owners = (list(module.parameters(recurse=False)) for module in model.modules())
    return set([own for own in owners if own][-1])


SELECTIONS: dict[str, Callable[[nn.Module], set[nn.Parameter]]] = {
    "no embeddings": lambda model: {p for name, p in model.named_parameters() if not _is_embedding(name)},
    "only embeddings": lambda model: {p for name, p in model.named_parameters() if _is_embedding(name)},
    "only norms": lambda model: _owned_by(model, lambda module: "Norm" in type(module).__name__),
    "only biases": lambda model: {p for name, p in model.named_parameters() if name.endswith("bias")},
    "only the last layer": _last_owner,
}  # fmt: skip


NO_BIAS = {
    "mistral",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "qwen3_tied",
    "gemma2",
    "gemma3",
    "gemma3_untied",
    "phi3",
    "t5",
}


FROZEN = [
    (name, selection)
    for name in ARCHITECTURES
    for place, selection in enumerate(SELECTIONS)
    if name in SOME or place == turn(name, range(5))
    if not (selection == "only biases" and name in NO_BIAS)
]


@pytest.mark.parametrize(("name", "selection"), FROZEN)
def test_frozen_parts(name, selection):
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    train_only(model, SELECTIONS[selection](model))
    strategy = turn(name, STRATEGIES, list(SELECTIONS).index(selection))
    assert_exact(architecture, model, architecture.examples(model, PADDED), strategy)


def train_only(model: nn.Module, wanted: set[nn.Parameter]) -> None:
    assert wanted
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in wanted)


# -- dropout and gradient checkpointing ---

# ALBERT, DistilBERT and MPNet have no gradient checkpointing in transformers 5.
CHECKPOINTED = "bert modernbert gpt2_tied opt llama gemma3 olmoe t5 bart vit dinov2".split()
DROPOUT = [(name, checkpointing) for name in CHECKPOINTED for checkpointing in (False, True)]
DROPOUT += [(name, False) for name in ("albert", "mpnet", "convnext", "bert_masked_lm")]


@pytest.mark.parametrize(("name", "checkpointing"), DROPOUT)
def test_fixed_dropout_masks_give_the_same_sums(name, checkpointing):
    """Compare with plain autograd on the same masks. The masks are those of one forward of the
    whole batch, so the strategies also equal each other."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(dropout=0.5)
    batch = collate(model, architecture.examples(model, (5, 2, 3)))
    with architecture.precision():
        torch.manual_seed(7)
        expected = loop_over_losses(model, together(model, batch))
        if checkpointing:
            checkpoint(model)
        strategies = STRATEGIES if name in SOME else ("two_pass", turn(name, STRATEGIES))
        for strategy in set(strategies):
            norms, sums = clipped(model, batch, expected.clipping_norm, strategy, seed=7)
            assert_equal(norms, sums, expected)


def checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing


def test_dropout_is_on_in_the_test_above():
    architecture = ARCHITECTURES["vit"]
    model = architecture.build(dropout=0.5)
    batch = collate(model, architecture.examples(model, (1, 1)))
    losses = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        losses.append(together(model, batch))
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


# -- what is not finite leaves ---


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for place, name in enumerate(EACH_RULE)
        for number, strategy in enumerate(STRATEGIES)
        if name in SOME or number == place % 3
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_an_example_that_is_not_finite_leaves_no_trace(device, name, strategy):
    architecture = ARCHITECTURES[name]
    model = architecture.build(dtype=torch.float32).to(device)
    examples = architecture.examples(model, (5, 5, 3))
    poison(model, examples, 1, turn(name, [torch.nan, torch.inf], STRATEGIES.index(strategy)))
    others, everyone = (
        on(device, collate(model, each)) for each in ([examples[0], examples[2]], examples)
    )
    expected_norms, expected = clipped(model, others, 0.5, strategy)
    norms, sums = clipped(model, everyone, 0.5, strategy)
    assert norms[1] == torch.inf
    torch.testing.assert_close(norms[[0, 2]], expected_norms, rtol=1e-4, atol=0)
    assert_same_sums(sums, expected, atol=1e-4 * 0.5)


# -- exact or refused by name, never wrong ---


def exact_or_refused(
    architecture: Architecture, model: nn.Module, lengths: Any, strategy: str, match: str
) -> str | None:
    """Return the refusal, if any, which names what matches."""
    examples, refusal = architecture.examples(model, lengths), None
    try:
        clipped(model, collate(model, examples), 1.0, strategy)
    except HfDpError as error:
        refusal = str(error)
    if refusal is None:
        assert_exact(architecture, model, examples, strategy)
    else:
        assert re.search(match, refusal), refusal
    return refusal


# -- experts, whose tokens are those of all examples: (B * T, H) ---


def test_experts_as_transformers_runs_them_by_default():
    """In float32, by grouped_mm."""
    for build in (models.mixtral, models.qwen3_moe, models.olmoe):
        model = build(dtype=torch.float32, experts_implementation=None)
        assert model.config._experts_implementation == "grouped_mm"
        examples = Architecture(build, "causal_lm").examples(model, PADDED)
        expected = loop(model, examples)
        found = clipped(model, collate(model, examples), expected.clipping_norm)
        assert_equal(*found, expected, 1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_used_twice(strategy, transposed):
    config = models.olmoe().config
    both = OlmoeExperts(config).double()
    both.is_transposed = transposed
    if transposed:
        config._experts_implementation = "batched_mm"
        for name, parameter in list(both.named_parameters()):
            setattr(both, name, nn.Parameter(parameter.detach().mT.contiguous()))
    for parameter in both.parameters():
        nn.init.normal_(parameter, std=0.3)

    def twice(net, x):
        chosen = x.flatten(0, 1)[:, :8].topk(2)
        for _ in range(2):
            y = net.experts(x.flatten(0, 1), chosen.indices, chosen.values)
            x = torch.tanh(y).view(x.shape)
        return x.square().sum((1, 2))

    model = Net(twice, experts=both)
    for shape in ((3, 5, 16), (2, 1, 16)):
        assert_net_exact(model, torch.randn(shape, dtype=torch.float64), strategy)


def all_of_the_first(monkeypatch):
    def planted(left, right, places, counts, b, layout):
        return Routed(left, right, places // b * b, counts, b, layout)

    monkeypatch.setattr(experts, "Routed", planted)


def each_pair_alone(monkeypatch):
    def planted(self):
        yield self.places % self.examples, self.left[:, None], self.right[:, None]

    monkeypatch.setattr(Routed, "_segments", planted)


def unclipped(monkeypatch):
    honest, ones = Routed.add_weighted_sum, torch.ones(3, dtype=torch.float64)
    planted = lambda self, total, weights: honest(self, total, Weights(ones))  # noqa: E731
    monkeypatch.setattr(Routed, "add_weighted_sum", planted)


@pytest.mark.parametrize("plant", [all_of_the_first, each_pair_alone, unclipped])
def test_planted_errors_of_experts_are_seen(plant, monkeypatch):
    architecture, model, examples = built("olmoe", PADDED)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_exact(architecture, model, examples)


# -- modules that read the weights of their parts ---

_MIXER = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
MIXERS = {
    "mamba": models.builder(hf.MambaForCausalLM, hf.MambaConfig, **_MIXER, time_step_rank=2),
    "mamba2": models.builder(
        hf.Mamba2ForCausalLM, hf.Mamba2Config, **_MIXER, num_heads=4, head_dim=8, n_groups=1, chunk_size=4
    ),
    "qwen3_next": models.builder(
        hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, **models._MOE, head_dim=8, num_experts=4,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, linear_key_head_dim=4,
        linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=4, use_cache=False,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": models.builder(
        hf.Lfm2ForCausalLM, hf.Lfm2Config, **models.DECODER, layer_types=["conv", "full_attention"], conv_bias=True,
        use_cache=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_layers_with_a_short_convolution(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)  # float64 remains
    architecture = Architecture(MIXERS[name], "causal_lm", float32_inside=True)
    model = architecture.build()
    for lengths in (PADDED, (4, 1, 3, 2)):
        strategies = STRATEGIES if lengths == PADDED else STRATEGIES[:1]
        assert_exact(architecture, model, architecture.examples(model, lengths), *strategies)


@pytest.mark.parametrize("frozen", [False, True])
def test_lora_beside_a_short_convolution(frozen):
    """With the convolution frozen, nothing needs to run again."""
    architecture = Architecture(MIXERS["lfm2"], "causal_lm", float32_inside=True)
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    model = peft.get_peft_model(architecture.build(), config)
    for name, parameter in model.named_parameters():
        if "conv.conv." in name:
            parameter.requires_grad_(not frozen)
    whole = [each for each in model.modules() if fallback._is_whole(each)]
    assert bool(whole) == (not frozen)
    assert_exact(architecture, model, architecture.examples(model, PADDED), "book_keeping")


def encoder(dropout: float = 0.0, mask: Any = None, batch_first: bool = True) -> Any:
    torch.manual_seed(0)
    given = {"dropout": dropout, "batch_first": batch_first, "activation": torch.tanh}

    def loss(net, x):
        padding = x[..., 0] > 1 if batch_first else None
        x = net.layer(x, src_mask=mask, src_key_padding_mask=padding)
        return net.last(x).square().mean((1, 2))

    layer = nn.TransformerEncoderLayer(16, 2, 24, **given)
    return Net(loss, layer=layer, last=nn.Linear(16, 3)).double()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", [None, torch.ones(4, 4).triu(1).bool()], ids=["full", "causal"])
def test_attention_of_torch(mask, strategy):
    """As many examples as positions, too, where padding looks like a mask for all."""
    for examples in (4, 3):
        x = torch.randn(examples, 4, 16, dtype=torch.float64)
        x[..., 0, 0] = 0  # something to attend to
        assert_net_exact(encoder(mask=mask), x, strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "draws random numbers other .*self_attn.dropout = 0.0"),
        ({"batch_first": False}, "examples in their first dimension"),
    ],
)
@pytest.mark.parametrize("examples", [3, 4])
def test_attention_of_torch_that_cannot_be_split_by_example_is_refused(options, message, examples):
    model, x = encoder(**options), torch.randn(examples, 4, 16, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=message):
        clip_losses(model, lambda: model(x), 1.0)


def test_planted_attention_whose_parts_are_apart_is_refused(monkeypatch):
    monkeypatch.setattr(fallback, "_is_whole", lambda module: False)
    model, x = encoder(), torch.randn(3, 4, 16, dtype=torch.float64)
    with pytest.raises(UnaccountedGradientError, match="out_proj"):
        clip_losses(model, lambda: model(x), 1.0)


# What is frozen, and options. With all relative parts frozen nothing is left to refuse.
RELATIVE: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "everything trains": ((), {}),
    "everything trains, no norm": ((), {"norm_rel_ebd": "none"}),
    "table frozen": (("rel_embeddings", "encoder.LayerNorm"), {}),
    "table frozen, no norm": (("rel_embeddings",), {"norm_rel_ebd": "none"}),
    # Its rows are relative positions; only their number says that they are no examples.
    "only the norm of the table": (("rel_embeddings", "encoder.layer."), {}),
    "relative parts frozen": (
        ("rel_embeddings", "encoder.LayerNorm", "pos_key_proj", "pos_query_proj"), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["own projections", "shared projections"])
@pytest.mark.parametrize("trains", RELATIVE)
def test_deberta_with_relative_attention(trains, shared):
    """`rel_embeddings.weight` is used outside its module. Projections run on (1, 2k, H) rows that
    belong to no example. With two buckets the table has four rows, as many as one of the batches
    has examples; only their number says otherwise."""
    architecture = Architecture(relative_deberta, "classification")
    frozen, options = RELATIVE[trains]
    model = relative_deberta(share_att_key=shared, **options)
    all_frozen = trains == "relative parts frozen"
    frozen += ("key_proj", "query_proj") if all_frozen and shared else ()
    trained = [p for name, p in model.named_parameters() if not any(w in name for w in frozen)]
    train_only(model, set(trained))
    match = "rel_embeddings|LayerNorm|_proj|DisentangledSelfAttention"
    for lengths in (PADDED, (4, 1, 3, 2), (1, 1), (6,)):
        for strategy in STRATEGIES if len(lengths) == 4 else STRATEGIES[:1]:
            refusal = exact_or_refused(architecture, model, lengths, strategy, match)
            assert refusal is None or not all_frozen


def relative_deberta(**options: Any) -> Any:
    given = {"position_buckets": 2, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
    return models.deberta_v2(relative_attention=True, **given | options)


HALVED = {
    "llama": ("model.norm", "model.layers.0.self_attn.q_proj"),
    "gemma3": ("model.embed_tokens", "model.layers.0.self_attn.q_norm"),
    "vit": ("vit.embeddings", "vit.embeddings.patch_embeddings.projection"),
    "dinov2": ("dinov2.encoder.layer.0.layer_scale1",),
}


@pytest.mark.parametrize("name", HALVED)
def test_forward_hooks_are_applied_once(name):
    """A hook must not run again when its module does: halved twice, a norm is too small."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    for path in HALVED[name]:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: 0.5 * output)
        if not isinstance(module, nn.Embedding):  # token ids cannot be halved
            module.register_forward_pre_hook(lambda module, args: (0.5 * args[0], *args[1:]))
    assert_exact(architecture, model, architecture.examples(model, PADDED), *STRATEGIES)


# -- refused, with the reason ---


def test_a_contrastive_loss_is_refused():
    """Each pair's loss has every other pair of the batch in its denominator."""
    tower = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    }  # fmt: skip
    text = tower | {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    image = tower | {"image_size": 8, "patch_size": 4}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    with pytest.raises(UnsupportedLossError, match="No per-example loss is known for CLIPModel"):
        per_example_loss(hf.CLIPModel(config), {"labels": torch.zeros(1)})


# -- the tests can fail ---


def test_planted_coupling_is_seen():
    """A loss that reads its neighbors differs from the loop: the oracle sees examples alone."""
    architecture, model, examples = built("bert", PADDED)
    expected = loop(model, examples)
    batch = collate(model, examples)
    coupled = lambda m, b: together(m, b) * (1 + b["attention_mask"].float().mean())  # noqa: E731
    norms, _ = clipped(model, batch, 1.0, loss=coupled)
    assert (norms / expected.norms - 1).abs().min() > 1e-3


def test_planted_missing_mask_is_seen():
    architecture, model, examples = built("t5", PADDED)
    batch = collate(model, examples)
    padded, alone = together(model, batch), together(model, {**batch, "attention_mask": None})
    assert (padded / alone - 1).abs().max() > 1e-3
    assert loop(model, examples).norms.isfinite().all()


def test_without_downcasts_the_norms_of_llama_are_float64():
    """Float32 rounding, 1e-7 in a weight's gradient, would exceed the tolerance here."""
    norm = ARCHITECTURES["llama"].build().model.norm.requires_grad_(False)
    value = torch.randn(4, 16, dtype=torch.float64)
    exact = (
        norm.weight * value / (value.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    )
    rounded = float((norm(value) - exact).abs().max())
    with models.without_downcasts():
        kept = float((norm(value) - exact).abs().max())
    assert rounded > EXACT > 1e-14 > kept
    assert torch.zeros(1, dtype=torch.float64).float().dtype == torch.float32
