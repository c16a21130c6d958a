"""What is measured: models of published sizes, the choices of one measurement, and the machine.

Models have random weights and are built from a configuration: speed and memory of dense layers do
not depend on the values of the weights. The choices are the same for every mode. Importing this
module loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_dp import _validate
from hf_dp._arguments import argument
from hf_dp._version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
_DROPOUTS = (
    "resid_pdrop embd_pdrop attn_pdrop attention_dropout hidden_dropout_prob "
    "attention_probs_dropout_prob"
).split()


@dataclass(frozen=True)
class Shape:
    """One model: sizes of Radford et al. 2019, Liu et al. 2019 and Wang et al. 2020 (MiniLM)."""

    model: str  # its class in transformers
    positions: int  # the most tokens of an example
    sizes: Mapping[str, int]  # of its configuration, where they are not the default
    tied: bool = False  # whether output head and input embedding are one trainable parameter
    lora: Mapping[str, Any] = field(default_factory=dict)  # PEFT's; none trains everything

    def build(self, dropout: float, tied: bool = True) -> nn.Module:
        """Return the model; ``tied=False`` gives a tied head a weight of its own."""
        import transformers

        cls = getattr(transformers, self.model)
        untied = {} if tied and self.model != "LlamaForCausalLM" else {"tie_word_embeddings": False}
        config = cls.config_class(**self.sizes, **untied, use_cache=False)
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, dropout)
        model: nn.Module = cls(config)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **self.lora))
        return model


def _gpt2(layers: int, hidden: int, heads: int, most: int = 1024, **more: int) -> Shape:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": most}
    return Shape("GPT2LMHeadModel", most, sizes | more, tied=True)


def _layers(
    model: str, most: int, layers: int, hidden: int, heads: int, inner: int, **more: int
) -> Shape:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner, "max_position_embeddings": most}
    return Shape(model, most, sizes | more)


_BERT, _ROBERTA = "BertForSequenceClassification", "RobertaForSequenceClassification"
# Two of RoBERTa's positions are for padding.
_OF_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_GPT2 = _gpt2(12, 768, 12)
_LLAMA = _layers("LlamaForCausalLM", 4096, 12, 768, 12, 2048, vocab_size=32000)
_LLAMA_1B = _layers(
    "LlamaForCausalLM", 4096, 16, 2048, 32, 8192, vocab_size=128256, num_key_value_heads=8
)
_QWEN_7B = _layers(
    "Qwen2ForCausalLM", 4096, 28, 3584, 28, 18944, vocab_size=152064, num_key_value_heads=4
)
_OLMOE = _layers(
    "OlmoeForCausalLM",
    4096,
    8,
    512,
    8,
    512,
    vocab_size=32000,
    num_experts=16,
    num_experts_per_tok=4,
)
_OF_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
_LORA = {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}

SHAPES: Mapping[str, Shape] = {
    "gpt2": _GPT2,
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-lora": replace(_GPT2, tied=False, lora=_LORA),  # the tied weight is frozen
    "llama-small": _LLAMA,
    "llama-small-lora": replace(_LLAMA, lora={"r": 16, "target_modules": ["q_proj", "v_proj"]}),
    "llama-1b": _LLAMA_1B,
    "qwen-7b-lora": replace(_QWEN_7B, lora={"r": 16, "target_modules": "all-linear"}),
    "olmoe-small": _OLMOE,
    "olmoe-small-lora": replace(_OLMOE, lora={"r": 8, "target_parameters": _OF_EXPERTS}),
    "roberta-base": _layers(_ROBERTA, 512, 12, 768, 12, 3072, **_OF_ROBERTA),
    "roberta-large": _layers(_ROBERTA, 512, 24, 1024, 16, 4096, **_OF_ROBERTA),
    "minilm": _layers(_BERT, 512, 6, 384, 12, 1536),
    # for tests
    "tiny": _gpt2(2, 16, 2, 32, vocab_size=64, bos_token_id=0, eos_token_id=0),
    "tiny-bert": _layers(_BERT, 32, 2, 16, 2, 32, vocab_size=64),
}


@dataclass(frozen=True)
class Workload:
    """The fixed choices of one measurement."""

    model: str
    per_device_train_batch_size: int = argument(8, "examples of a step, one physical batch")
    max_length: int = argument(128, "tokens of each example")
    bf16: bool = argument(False, "bfloat16 autocast of the forward, float32 weights")
    gradient_checkpointing: bool = argument(False, "non-reentrant, in every mode")
    chunked_loss: bool = argument(
        False, "clipping modes form a language model's loss by blocks of the vocabulary"
    )
    use_cpu: bool = argument(False, "the CPU, also where there is a CUDA device")
    threads: int | None = argument(None, "torch's intra-op threads (default: torch's own choice)")
    dropout: float = 0.1

    def __post_init__(self) -> None:
        import torch

        _validate.one_of("model", self.model, SHAPES)
        if self.threads is None:
            object.__setattr__(self, "threads", torch.get_num_threads())
        for name, least in (("per_device_train_batch_size", 1), ("max_length", 2), ("threads", 1)):
            _validate.integer(name, getattr(self, name), least)
        if self.max_length > self.shape.positions:
            expected = f"to be at most {self.shape.positions}, the positions of {self.model}"
            raise _validate.invalid("max_length", self.max_length, expected)

    @property
    def shape(self) -> Shape:
        """Return the model's sizes."""
        return SHAPES[self.model]

    @property
    def device(self) -> str:
        """Return where the work is done: ``cuda`` where there is a device, or ``cpu``."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"


def build_model(workload: Workload, tied: bool = True) -> nn.Module:
    """Return the model with random weights, in training mode; untied, a tied head gets its own."""
    import torch

    torch.manual_seed(0)
    with torch.device(workload.device):
        model: Any = workload.shape.build(workload.dropout, tied)
    if workload.gradient_checkpointing:
        # The newer name where transformers has it; both are non-reentrant unless told otherwise.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    trained: nn.Module = model.to(workload.device).train()
    return trained


def make_batch(workload: Workload, model: nn.Module) -> Batch:
    """Return a physical batch of random tokens, (b, T), and labels, the same in each call."""
    import torch

    from hf_dp.run.synthetic import synthetic_examples

    lengths = [workload.max_length] * workload.per_device_train_batch_size
    with torch.random.fork_rng():
        torch.manual_seed(1)
        alone = synthetic_examples(model, lengths, lengths)
    device = next(model.parameters()).device
    return {name: torch.cat([each[name] for each in alone]).to(device) for name in alone[0]}


def environment(workload: Workload) -> dict[str, object]:
    """Return versions of what is installed, and the device; no path, user or host name."""
    import torch

    found: dict[str, object] = {"hf_dp": __version__}
    for name in ("torch", "transformers", "peft", "opacus"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    device = platform.processor() or platform.machine()
    if workload.device == "cuda":
        device = torch.cuda.get_device_name()
    return {**found, "device": device, "processors": os.cpu_count()}
