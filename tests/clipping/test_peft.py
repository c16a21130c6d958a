"""Parameter-efficient tuning with stock PEFT is exact against the loop, or refused by name.

The base model is left alone.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import (
    ARCHITECTURES,
    VOCABULARY,
    Architecture,
    Batch,
    Expected,
    Net,
    assert_equal,
    assert_net_exact,
    assert_same_sums,
    clipped,
    collate,
    loop,
    loop_over_losses,
    poison,
    shaken,
    single,
    together,
    token_mean,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp import clipping as library
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_loss

LENGTHS = ((5, 1, 3), (2, 1), (6,))
VIRTUAL = 3


class Case:
    """A base of the zoo and what PEFT adds to it."""

    def __init__(self, base: str, config: Callable[..., Any], **options: Any):
        self.architecture: Architecture = ARCHITECTURES[base]
        self.config, self.options = config, options

    def build(self, dropout: float = 0.0, dtype: Any = torch.float64, **more: Any) -> Any:
        """The adapted model in float64. Args: dtype: of the base, before it is adapted."""
        torch.manual_seed(0)
        base = self.architecture.build(dropout=dropout, dtype=dtype)
        model = peft.get_peft_model(base, self.config(**self.options | more))
        return shaken(model).double().train()

    def examples(self, model: Any, lengths: Sequence[int]) -> list[Batch]:
        return self.architecture.examples(model.get_base_model(), lengths)


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "lora_dropout": 0.0} | options)


BERT = {"task_type": "SEQ_CLS", "target_modules": ["query", "output.dense"]}
GPT2 = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PROMPT = {"num_virtual_tokens": VIRTUAL}
PREFIX = PROMPT | {"num_layers": 2, "token_dim": 16, "num_attention_heads": 2}

LINEAR = "LoRA on Linear, and the classifier"
EXACT = {
    LINEAR: Case("bert", lora, **BERT),
    "LoRA on Conv1D": Case("gpt2_tied", lora, **GPT2),
    "LoRA on Conv1D, head untied": Case("gpt2_untied", lora, **GPT2),
    "LoRA on Linear, RMSNorm base": Case("llama", lora, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"]),
    "LoRA on every Linear": Case("modernbert", lora, task_type="SEQ_CLS", target_modules="all-linear"),
    "LoRA on flattened positions": Case("opt", lora, task_type="CAUSAL_LM", target_modules=["fc1", "q_proj"]),
    "LoRA on Embedding": Case("bert", lora, **BERT | {"target_modules": ["word_embeddings"]}),
    "LoRA on a tied Embedding": Case("gpt2_tied", lora, **GPT2 | {"target_modules": ["wte"]}),
    "LoRA on a shared layer": Case("albert", lora, task_type="SEQ_CLS", target_modules=["query", "ffn"]),
    "LoRA on Conv2d": Case("vit", lora, target_modules=["projection", "q_proj"], modules_to_save=["classifier"]),
    "LoRA of experts": Case("mixtral", lora, task_type="CAUSAL_LM", target_modules=["q_proj"], target_parameters=EXPERTS),
    "LoRA of one parameter of experts": Case("olmoe", lora, task_type="CAUSAL_LM", target_parameters=EXPERTS[:1]),
    "LoRA and every bias": Case("bert", lora, **BERT, bias="all"),
    "LoRA with a bias of its own": Case("bert", lora, **BERT, lora_bias=True),
    "rsLoRA": Case("bert", lora, **BERT, use_rslora=True, r=4),
    "LoRA and saved modules": Case("gpt2_untied", lora, **GPT2, modules_to_save=["lm_head", "ln_f", "wpe"]),
    "IA3 on Linear": Case(
        "bert", peft.IA3Config, task_type="SEQ_CLS", target_modules=["key", "intermediate.dense"],
        feedforward_modules=["intermediate.dense"],
    ),
    "IA3 on Conv1D": Case(
        "gpt2_tied", peft.IA3Config, task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"],
        feedforward_modules=["c_fc"], fan_in_fan_out=True,
    ),
    "LN tuning": Case("bert", peft.LNTuningConfig, task_type="SEQ_CLS", target_modules=["LayerNorm"]),
    "LN tuning on RMSNorm": Case("llama", peft.LNTuningConfig, task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
    "prompt tuning, classifier": Case("bert", peft.PromptTuningConfig, task_type="SEQ_CLS", **PROMPT),
    "prompt tuning, language model": Case("gpt2_tied", peft.PromptTuningConfig, task_type="CAUSAL_LM", **PROMPT),
    "prompt tuning, RoPE": Case("llama", peft.PromptTuningConfig, task_type="CAUSAL_LM", **PROMPT),
    "prefix tuning, language model": Case("gpt2_tied", peft.PrefixTuningConfig, task_type="CAUSAL_LM", **PREFIX),
    "prefix tuning, projected": Case(
        "gpt2_tied", peft.PrefixTuningConfig, task_type="CAUSAL_LM", **PREFIX, prefix_projection=True, encoder_hidden_size=6
    ),
    "Uni-LoRA": Case("bert", peft.UniLoraConfig, task_type="SEQ_CLS", target_modules=["query", "value"], r=2, theta_d_length=16),
    "prefix tuning, classifier": Case("gpt2_classifier", peft.PrefixTuningConfig, task_type="SEQ_CLS", **PREFIX),
}  # fmt: skip

# Each with the words of a refusal, should there be one.
EXACT_OR_REFUSED = {
    "DoRA": (Case("bert", lora, **BERT, use_dora=True), "lora|Dora"),
    "DoRA on Conv1D": (Case("gpt2_tied", lora, **GPT2, use_dora=True), "lora|Dora"),
    "DoRA on Embedding": (Case("bert", lora, **BERT | {"target_modules": ["word_embeddings"]}, use_dora=True), "lora|Dora"),
    "LoRA on position embeddings": (Case("bert", lora, **BERT | {"target_modules": ["position_embeddings"]}), "lora"),
    "LoRA and some rows of the embedding": (
        Case("bert", lora, **BERT, trainable_token_indices={"word_embeddings": [7, 9]}), "token_adapter|trainable_tokens",
    ),
    "VeRA": (Case("bert", peft.VeraConfig, task_type="SEQ_CLS", target_modules=["query", "value"], r=4), "vera_lambda"),
    "AdaLoRA": (Case("bert", peft.AdaLoraConfig, task_type="SEQ_CLS", target_modules=["query"], init_r=4, total_step=10), "lora_"),
    "LoHa": (Case("bert", peft.LoHaConfig, task_type="SEQ_CLS", target_modules=["query"], r=2), "hada_"),
    "LoKr": (Case("bert", peft.LoKrConfig, task_type="SEQ_CLS", target_modules=["query"], r=2), "lokr_"),
    "OFT": (Case("bert", peft.OFTConfig, task_type="SEQ_CLS", target_modules=["query"], oft_block_size=4), "oft_|OFTRotation"),
    "FourierFT": (Case("bert", peft.FourierFTConfig, task_type="SEQ_CLS", target_modules=["query"], n_frequency=5), "fourierft_"),
    "p-tuning": (
        Case("bert", peft.PromptEncoderConfig, task_type="SEQ_CLS", **PROMPT, encoder_hidden_size=8), "PromptEncoder|Linear"
    ),
    "p-tuning, LSTM": (
        Case(
            "gpt2_tied", peft.PromptEncoderConfig, task_type="CAUSAL_LM", **PROMPT, encoder_hidden_size=8,
            encoder_reparameterization_type="LSTM", encoder_dropout=0.0,
        ),
        "LSTM",
    ),
}  # fmt: skip


# -- losses of models whose logits begin with virtual tokens ---


def is_prompted(model: Any) -> bool:
    config = model.active_peft_config
    return config.peft_type in ("PROMPT_TUNING", "P_TUNING") and config.task_type == "CAUSAL_LM"


def batch_loss(model: Any, batch: Batch) -> Tensor:
    """(b,); the last virtual token predicts the first real one, as in PEFT's own loss."""
    if not is_prompted(model):
        return together(model, batch)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_mean(logits[:, VIRTUAL - 1 : -1], batch["labels"])


def own_loss(model: Any, example: Batch) -> Tensor:
    """Return one example's loss, written out for some classes. AdaLoRA adds a penalty on its
    weights to the model's own loss."""
    if example["labels"].dim() == 1:
        inputs = {name: value for name, value in example.items() if name != "labels"}
        return F.cross_entropy(model(**inputs).logits, example["labels"])
    if not is_prompted(model):
        return single(model, example)
    logits = model(input_ids=example["input_ids"]).logits[0, VIRTUAL - 1 : -1]
    return F.cross_entropy(logits, example["labels"][0])


def expectation(case: Case, model: Any, lengths: Sequence[int]) -> Expected:
    return loop(model, case.examples(model, lengths), own_loss)


def result(
    case: Case, model: Any, lengths: Sequence[int], clipping_norm: float, strategy: str
) -> Any:
    batch = collate(model, case.examples(model, lengths))
    return clipped(model, batch, clipping_norm, strategy, loss=batch_loss)


# -- exact ---


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    case = EXACT[name]
    model = case.build()
    for lengths in LENGTHS:
        with case.architecture.precision():
            expected = expectation(case, model, lengths)
            for strategy in STRATEGIES if lengths == LENGTHS[0] else STRATEGIES[:1]:
                found = result(case, model, lengths, expected.clipping_norm, strategy)
                assert_equal(*found, expected)


@pytest.mark.parametrize("name", EXACT_OR_REFUSED)
def test_exact_or_refused_by_name(name):
    """DoRA runs its LoRA layers on an identity matrix of (16, 16): sixteen one-token examples."""
    case, words = EXACT_OR_REFUSED[name]
    model = case.build()
    for lengths in (*LENGTHS, (1,) * 16):
        expected = expectation(case, model, lengths)
        for strategy in STRATEGIES if lengths == LENGTHS[0] else STRATEGIES[:1]:
            try:
                found = result(case, model, lengths, expected.clipping_norm, strategy)
            except HfDpError as error:
                found, refusal = None, str(error)
            if found is not None:
                assert_equal(*found, expected)
            else:
                assert re.search(words, refusal), refusal


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [LINEAR, "LoRA on Conv1D", "LoRA on Embedding", "LoRA on Conv2d"])
def test_lora_dropout_with_fixed_masks(name, strategy):
    """Against plain autograd on the same masks, so the strategies also equal each other."""
    case = EXACT[name]
    model = case.build(dropout=0.5, lora_dropout=0.5)
    batch = collate(model, case.examples(model, (5, 2, 3)))

    def by_autograd(seed: int) -> Expected:
        torch.manual_seed(seed)
        return loop_over_losses(model, batch_loss(model, batch))

    expected, c = by_autograd(7), by_autograd(7).clipping_norm
    assert_equal(*clipped(model, batch, c, strategy, loss=batch_loss, seed=7), expected)
    assert not torch.allclose(by_autograd(8).norms, expected.norms)


@pytest.mark.parametrize("name", [LINEAR, "LoRA on Conv1D", "IA3 on Conv1D"])
def test_gradient_checkpointing_of_a_frozen_base(name):
    """The embedding's output requires gradients; otherwise none reach the adapters."""
    case = EXACT[name]
    model = case.build()
    expected = expectation(case, model, (5, 1, 3))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    for strategy in STRATEGIES:
        assert_equal(*result(case, model, (5, 1, 3), expected.clipping_norm, strategy), expected)


@pytest.mark.parametrize(
    ("name", "strategy"),
    zip(
        [LINEAR, "LoRA on Embedding", "IA3 on Conv1D", "prefix tuning, language model"],
        [*STRATEGIES, STRATEGIES[0]],
        strict=True,
    ),
)
def test_an_example_that_is_not_finite_leaves_no_trace(name, strategy):
    case = EXACT[name]
    model = case.build()
    examples = case.examples(model, (5, 5, 3))
    poison(model, examples, 1, torch.nan)
    _, expected = clipped(model, collate(model, [examples[0], examples[2]]), 0.5, strategy)
    norms, sums = clipped(model, collate(model, examples), 0.5, strategy)
    assert torch.isinf(norms).tolist() == [False, True, False]
    assert_same_sums(sums, expected, atol=1e-9)


def test_hf_dp_knows_the_loss_of_a_prompted_language_model():
    """Its logits begin with the virtual tokens, which have no labels."""
    case = EXACT["prompt tuning, language model"]
    model = case.build()
    examples = case.examples(model, (5, 2, 3))
    expected = torch.stack([model(**example).loss for example in examples])  # in float32
    found = per_example_loss(model, collate(model, examples))
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


# -- the base is left alone ---


def state(model: nn.Module) -> dict[str, Any]:
    """Return what must not change: modules with their own forward or hooks, and every value."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found[f"module {name}"] = (module.__dict__.get("forward"), *hooks)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        found[name] = value.requires_grad, value.grad, value.detach().clone().numpy().tobytes()
    return found


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    assert state(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name", [LINEAR, "LoRA on Conv1D", "IA3 on Linear", "prefix tuning, language model"]
)
def test_the_base_is_left_alone(name, strategy):
    case = EXACT[name]
    model = case.build()
    before = state(model)
    _, sums = result(case, model, (5, 1, 3), 0.1, strategy)
    assert_untouched(model, before)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert list(sums) == trainable
    assert 0 < len(trainable) < len(list(model.parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_module_has_its_own_forward_inside(strategy):
    model = EXACT[LINEAR].build()
    with ClippingEngine(model, 1.0, strategy=strategy):
        for module in model.modules():
            if not any(p.requires_grad for p in module.parameters()):
                assert "forward" not in module.__dict__


# -- a quantized base: a layer whose weight is integers and has no gradient ---


class Int8Linear(nn.Module):
    """A layer as bitsandbytes' look to the engine. Its integer weight is dequantized in the forward
    and never trained."""

    def __init__(self, width: int):
        super().__init__()
        weight = torch.randint(-127, 128, (width, width), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.rand(width, 1, dtype=torch.float64) / 64)

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weight.to(value.dtype) * self.scale)


class Adapted(nn.Module):
    """The quantized layer beside a low-rank update of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.base = Int8Linear(width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.base(value) + 2 * self.up(self.down(value))


def quantized(net: Any, input_ids: Tensor) -> Tensor:
    value = net.embedding(input_ids)
    value = value + torch.tanh(net.first(value))
    value = torch.softmax(value @ value.mT, -1) @ net.second(net.norm(value))
    return net.head(value).mean(1).square().sum(1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_on_a_quantized_base(strategy):
    torch.manual_seed(0)
    frozen = {"embedding": nn.Embedding(VOCABULARY, 8), "norm": nn.LayerNorm(8)}
    for part in frozen.values():
        part.requires_grad_(False)
    parts = {"first": Adapted(8), "second": Adapted(8), "head": nn.Linear(8, 3)}
    model = Net(quantized, **frozen, **parts)
    for part in model.modules():
        if not list(part.children()) and not isinstance(part, Int8Linear):
            part.double()  # model.double() leaves integers, but says so for buffers only
    before = state(model)
    assert_net_exact(model, torch.randint(0, VOCABULARY, (4, 6)), strategy)
    assert_untouched(model, before)
    assert model.first.base.weight.dtype == torch.int8


# -- each kind that PEFT has is what the page says ---

PAGE = (Path(library.__file__).parents[1] / "tuners" / "README.md").read_text()
ROWS = dict(re.findall(r"^\| (exact[^|]*|refused[^|]*|not tried[^|]*) \| ([^|]*) \|$", PAGE, re.M))
KINDS = {status: re.findall(r"`(\w+)`", names) for status, names in ROWS.items()}
OWN = {  # options beside target_modules and r
    "adalora": {"init_r": 4, "total_step": 10},
    "boft": {"boft_block_size": 4},
    "c3a": {"block_size": 4},
    "cartridge": PROMPT,
    "fourierft": {"n_frequency": 5},
    "ia3": {"feedforward_modules": []},
    "ln_tuning": {"target_modules": ["LayerNorm"]},
    "oft": {"oft_block_size": 4, "r": 0},
    "p_tuning": {**PROMPT, "encoder_hidden_size": 8},
    "prefix_tuning": PREFIX,
    "prompt_tuning": PROMPT,
    "road": {"group_size": 4},
    "trainable_tokens": {"target_modules": ["word_embeddings"], "token_indices": [7, 9]},
    "unilora": {"theta_d_length": 16},
    "vblora": {"num_vectors": 4, "vector_length": 4, "topk": 2},
    "waveft": {"n_frequency": 5},
}


def test_the_page_names_each_kind_once():
    """Kinds come with new versions of PEFT."""
    named = [kind for kinds in KINDS.values() for kind in kinds]
    assert len(KINDS) == 7 and len(named) == len({*named})
    assert {each.value.lower() for each in peft.PeftType} <= {*named}


OF_DECODERS = {
    "multitask_prompt_tuning": Case("gpt2_tied", peft.MultitaskPromptTuningConfig, task_type="CAUSAL_LM", num_tasks=2, **PREFIX),
    "adaption_prompt": Case("llama", peft.AdaptionPromptConfig, task_type="CAUSAL_LM", adapter_layers=2, adapter_len=3),
    "poly": Case("llama", peft.PolyConfig, task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, n_tasks=2, n_skills=2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_DECODERS)
def test_it_is_what_the_page_says_of_decoders(kind):
    case = OF_DECODERS[kind]
    model, (status,) = case.build(), [s for s, kinds in KINDS.items() if kind in kinds]

    def loss(model: Any, batch: Batch) -> Tensor:
        task = {} if kind == "adaption_prompt" else {"task_ids": batch["input_ids"][:, 0] % 2}
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}, **task).logits
        labels = batch["labels"][:, 1:]  # behind virtual tokens, if there are any
        return token_mean(logits[:, -1 - labels.shape[1] : -1], labels)

    examples = case.examples(model, (5, 2, 3))
    expected = loop(model, examples, lambda model, example: loss(model, example)[0])
    if "refused" in status:
        with pytest.raises(HfDpError):
            clipped(model, collate(model, examples), 1.0, STRATEGIES[0], loss=loss)
    else:
        batch, norm = collate(model, examples), expected.clipping_norm
        assert_equal(*clipped(model, batch, norm, STRATEGIES[0], loss=loss), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "kind"),
    [(status, kind) for status, kinds in KINDS.items() for kind in kinds if "not" not in status],
)
def test_it_is_what_the_page_says(status, kind):
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind.upper()]
    usual = {"target_modules": ["query", "value"], "r": 2}
    fields = {field.name for field in dataclasses.fields(config)}
    options = {name: value for name, value in usual.items() if name in fields}
    case = Case("bert", config, task_type="SEQ_CLS", **options | OWN.get(kind, {}))
    # PSOFT computes its start in float32.
    model = case.build(dtype=torch.float32 if kind == "psoft" else torch.float64)
    for lengths in LENGTHS:
        expected = expectation(case, model, lengths)
        if "refused" in status:
            with pytest.raises(HfDpError):
                result(case, model, lengths, expected.clipping_norm, STRATEGIES[0])
            continue
        found = result(case, model, lengths, expected.clipping_norm, STRATEGIES[0])
        if "float32" not in status:
            assert_equal(*found, expected)
            continue
        for name, total in expected.sums.items():
            assert float((found[1][name] - total).abs().max()) <= 1e-6 * float(total.abs().max())
