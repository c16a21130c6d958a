"""Bottleneck adapters as a PEFT method.

An adapter stands after the output projection of a sublayer, before the residual connection, and
computes ``h + up(act(down(h)))``. PEFT has no such method, so a saved adapter loads only where
``hf_dp`` is imported.

References: Houlsby et al. 2019, arXiv 1902.00751; Pfeiffer et al. 2021, arXiv 2005.00247.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_dp._borrowed import register_method
from hf_dp._validate import integer, invalid, one_of
from hf_dp.errors import UnsupportedModelError

# By model_type, the ends of the names of the output projections: (attention, feed-forward).
_BERT = (["attention.output.dense"], ["output.dense"])
OUTPUTS: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(
        ("bert", "roberta", "electra", "camembert", "xlm-roberta", "deberta", "deberta-v2"), _BERT
    ),
    **dict.fromkeys(("vit", "deit", "dinov2"), (["attention.o_proj"], ["mlp.fc2"])),
    "distilbert": (["attention.out_lin"], ["ffn.lin2"]),
    "albert": (["attention.dense"], ["ffn_output"]),
    "mpnet": (["attention.attn.o"], ["output.dense"]),
    "modernbert": (["attn.Wo"], ["mlp.Wo"]),
    "gpt2": (["attn.c_proj"], ["mlp.c_proj"]),
    "opt": (["self_attn.out_proj"], ["fc2"]),
    "bart": (["self_attn.out_proj", "encoder_attn.out_proj"], ["fc2"]),
    "t5": (["SelfAttention.o", "EncDecAttention.o"], ["DenseReluDense.wo"]),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"),
        (["self_attn.o_proj"], ["mlp.down_proj"]),
    ),
}
STYLES = ("houlsby", "pfeiffer")


@dataclass
class AdapterConfig(PeftConfig):
    """Bottleneck adapters, after Houlsby et al. or Pfeiffer et al.

    In the style ``houlsby`` they come after attention and feed-forward, in the style ``pfeiffer``
    after feed-forward alone.

    Args:
        bottleneck_size: width of the adapter; DP-FROST uses 16, 48 and 96 (after Yu et al. 2022).
        style: ``houlsby`` or ``pfeiffer``.
        activation: the name of one of transformers' activations.
        target_modules: ends of the names of the modules to adapt. Needed for a model whose type is
            not in the table; overrides the table for the others.
        modules_to_save: modules that train in full. With ``task_type="SEQ_CLS"`` the head of a
            classifier is one of them.

    Raises: InvalidArgumentError naming the argument.
    """

    bottleneck_size: int = field(default=16)
    style: str = field(default="houlsby")
    activation: str = field(default="gelu")
    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = "ADAPTER"  # type: ignore[assignment]
        integer("bottleneck_size", self.bottleneck_size, 1)
        one_of("style", self.style, STYLES)
        one_of("activation", self.activation, tuple(ACT2FN))


class AdapterLayer(nn.Module, BaseTunerLayer):
    """A projection and the adapter after it."""

    adapter_layer_names = ("adapter_down", "adapter_up")
    other_param_names = ("bottleneck_size",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: AdapterConfig):
        super().__init__()
        self.base_layer = base_layer
        self.adapter_down, self.adapter_up = nn.ModuleDict(), nn.ModuleDict()
        self.adapter_act = nn.ModuleDict()
        self.bottleneck_size: dict[str, int] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: AdapterConfig) -> None:
        """Add an adapter that changes nothing yet. ``up`` starts at zero, so that a private run
        starts from the base model."""
        base = self.get_base_layer()
        weight = base.get_parameter("weight")
        width = getattr(base, "out_features", None) or getattr(base, "nf", None)
        if width is None:
            raise UnsupportedModelError(
                f"Expected a linear layer before an adapter, got {type(base).__name__}. Name "
                "linear layers in `target_modules`."
            )
        device, dtype = weight.device, weight.dtype
        if not weight.is_floating_point():  # packed, as of a quantized layer
            dtype = torch.float32
        down = nn.Linear(width, config.bottleneck_size, device=device, dtype=dtype)
        up = nn.Linear(config.bottleneck_size, width, device=device, dtype=dtype)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        self.adapter_down[adapter_name], self.adapter_up[adapter_name] = down, up
        self.adapter_act[adapter_name] = ACT2FN[config.activation]
        self.bottleneck_size[adapter_name] = config.bottleneck_size
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        hidden = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return hidden
        dtype = hidden.dtype  # PEFT keeps an adapter of 16 bits in float32
        for name in self.active_adapters:
            if name in self.adapter_down:
                down = self.adapter_down[name]
                inner = self.adapter_act[name](down(hidden.to(down.weight.dtype)))
                hidden = hidden + self.adapter_up[name](inner)
        return hidden.to(dtype)

    def __repr__(self) -> str:
        return "adapter." + super().__repr__()


class AdapterModel(BaseTuner):
    """The model that ``get_peft_model`` makes from an :class:`AdapterConfig`. An adapter is not
    linear, so it cannot be merged."""

    prefix: str = "adapter_"
    tuner_layer_cls = AdapterLayer
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(
        self, peft_config: PeftConfig, model_config: dict[str, object]
    ) -> AdapterConfig:
        assert isinstance(peft_config, AdapterConfig)
        if peft_config.target_modules is not None:
            return peft_config
        kind = str(model_config.get("model_type"))
        if kind not in OUTPUTS:
            expected = f"to be given for a model of type {kind!r}"
            advice = f"Give the ends of the names of its output projections: {OUTPUTS['gpt2']}."
            raise invalid("target_modules", None, expected, advice)
        attention, feed_forward = OUTPUTS[kind]
        if peft_config.style == "houlsby":
            peft_config.target_modules = sorted({*feed_forward, *attention})
        else:  # attention's names may also end with "output.dense"
            peft_config.target_modules = sorted(feed_forward)
            excluded = [end for end in attention if end.endswith(tuple(feed_forward))]
            if excluded and peft_config.exclude_modules:
                expected = "to be unset without `target_modules`, which then exclude attention's"
                advice = "Give `target_modules`, too."
                raise invalid("exclude_modules", peft_config.exclude_modules, expected, advice)
            peft_config.exclude_modules = excluded or peft_config.exclude_modules
        return peft_config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        assert isinstance(peft_config, AdapterConfig)
        if isinstance(target, AdapterLayer):
            target.update_layer(adapter_name, peft_config)
        else:
            layer = AdapterLayer(target, adapter_name, peft_config)
            self._replace_module(parent, target_name, layer, target)

    def _check_merge_allowed(self) -> None:
        raise UnsupportedModelError(
            "An adapter is not a linear map, so it cannot be merged into the base model. Keep the "
            "two side by side."
        )


register_method("ADAPTER", AdapterConfig, AdapterModel)
