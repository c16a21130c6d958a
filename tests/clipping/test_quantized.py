"""Adapters on a quantized base model.

They are exact where only weights are quantized, and refused where a batch shares a rounding. The
slow tests need bitsandbytes (``hf-dp[quantized]``), which `make slow` installs.
"""

from typing import Any

import models
import peft
import pytest
import torch
from models import ARCHITECTURES, assert_equal, assert_not_entered, clipped, collate, loop
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.engine import STRATEGIES

EIGHT_BITS = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
FOUR_BITS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
}


def quantized(folder: Any, **options: Any) -> Any:
    """A tiny Llama, saved, and loaded again with bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    ARCHITECTURES["llama"].build(dtype=torch.float32, **sizes).save_pretrained(folder)
    given = {"quantization_config": BitsAndBytesConfig(**options), "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **given)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [EIGHT_BITS, FOUR_BITS], ids=["8 bits", "4 bits"])
def test_lora_is_exact_and_leaves_the_base_alone(options, strategy, tmp_path):
    base = quantized(tmp_path, **options)
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora).train()
    integers = {
        name: p.clone() for name, p in model.named_parameters() if not p.is_floating_point()
    }
    assert len(integers) == 14  # seven matrices in each of two layers
    examples = ARCHITECTURES["llama"].examples(base, (5, 1, 3, 9))
    expected = loop(model, examples)
    assert_equal(
        *clipped(model, collate(model, examples), expected.clipping_norm, strategy),
        expected,
        tolerance=1e-4,
    )
    assert all(
        torch.equal(p, integers[name]) for name, p in model.named_parameters() if name in integers
    )


@pytest.mark.slow
def test_eight_bits_with_outliers_are_refused(tmp_path):
    model = quantized(tmp_path, load_in_8bit=True)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    assert_not_entered(model, "Linear8bitLt with threshold 6.0.*llm_int8_threshold=0.0")


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "moves"), [(6.0, True), (0.0, False)])
def test_why_one_outlier_moves_the_other_examples(threshold, moves):
    """In evaluation, and on a GPU always; on a CPU bitsandbytes trains with dequantized weights."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(
        64, 64, bias=False, has_fp16_weights=False, threshold=threshold
    )
    layer.weight.data = torch.randn(64, 64)
    layer = layer.to("cpu").eval()
    x = torch.randn(4, 5, 64)
    before = layer(x)
    x[0, 0, 3] = 50.0
    assert torch.equal(layer(x)[1:], before[1:]) != moves


class Linear8bitLt(nn.Linear):
    """What of bitsandbytes' layer tells that it looks for outliers."""

    def __init__(self, threshold: float):
        super().__init__(2, 2)
        self.state = Settings(threshold=threshold)


class Derived(Linear8bitLt):
    pass


def test_a_layer_that_looks_for_outliers_is_refused():
    with ClippingEngine(nn.Sequential(Linear8bitLt(0.0), nn.Linear(2, 2)), 0.1):
        pass
    first = nn.Sequential(Linear8bitLt(6.0), nn.Linear(2, 2))
    assert_not_entered(first, "`0` is a Linear8bitLt with threshold 6.0")
    assert_not_entered(nn.Sequential(nn.Linear(2, 2), Derived(6.0)), "`1` is a Linear8bitLt")


class Settings:
    def __init__(self, **settings: Any):
        vars(self).update(settings)


@pytest.mark.parametrize("method", ["torchao", "fp8", "gptq", None])
@pytest.mark.parametrize("kind", [dict, Settings])
def test_methods_that_were_not_shown_to_leave_activations_alone_are_refused(method, kind):
    model = models.bert()
    model.config.quantization_config = kind(quant_method=method)
    assert_not_entered(model, "not been shown to leave an example's activations")
