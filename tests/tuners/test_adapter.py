"""Bottleneck adapters: where they sit, what they compute, exact to clip, saved and loaded with
``import hf_dp``."""

import pytest
import torch
from models import ARCHITECTURES, assert_exact, collate, logits, shaken
from peft import PeftModel, get_peft_model
from transformers.activations import ACT2FN

from hf_dp.errors import InvalidArgumentError, UnsupportedModelError
from hf_dp.tuners.adapter import AdapterConfig, AdapterLayer
from tests import tiny

KNOWN = (
    "bert", "distilbert", "roberta", "albert", "electra", "modernbert", "mpnet", "gpt2_tied", "opt", "llama", "t5",
    "bart", "vit", "dinov2",
)  # fmt: skip


def adapters(model) -> dict[str, AdapterLayer]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, AdapterLayer)
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_changes_nothing_at_first_and_is_exact_to_clip(name):
    architecture = ARCHITECTURES[name]
    plain = architecture.build()
    examples = architecture.examples(plain, (5, 1, 3))
    batch = collate(plain, examples)
    before = logits(architecture, plain.eval(), batch)
    task = "SEQ_CLS" if architecture.task == "classification" else None
    model = get_peft_model(plain, AdapterConfig(bottleneck_size=4, task_type=task))
    assert torch.equal(logits(architecture, model, batch), before)
    assert not torch.allclose(logits(architecture, shaken(model), batch), before)
    assert_exact(architecture, model.train(), examples)
    with model.eval().disable_adapter():
        assert torch.equal(logits(architecture, model, batch), before)


def test_houlsby_has_two_a_block_and_pfeiffer_one():
    def built(style, **options):
        config = AdapterConfig(style=style, task_type="SEQ_CLS", **options)
        return adapters(get_peft_model(ARCHITECTURES["bert"].build(), config))

    blocks = ARCHITECTURES["bert"].build().config.num_hidden_layers
    assert len(built("houlsby")) == 2 * blocks
    assert len(built("pfeiffer")) == blocks
    assert not any("attention" in name for name in built("pfeiffer"))
    with pytest.raises(InvalidArgumentError, match="`exclude_modules` to be unset without"):
        built("pfeiffer", exclude_modules=["layer.0.output.dense"])


def test_computes_what_it_says():
    config = AdapterConfig(bottleneck_size=3, activation="relu")
    model = get_peft_model(ARCHITECTURES["bert"].build(), config)
    layer = next(iter(adapters(model).values()))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(2, 5, layer.base_layer.in_features, dtype=torch.float64)
    h = layer.base_layer(x)
    down, up = layer.adapter_down["default"], layer.adapter_up["default"]
    assert down.weight.shape == (3, layer.base_layer.out_features)
    inner = ACT2FN["relu"](h @ down.weight.mT + down.bias)
    torch.testing.assert_close(layer(x), h + inner @ up.weight.mT + up.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_of_16_bits_gets_an_adapter_in_float32_and_keeps_its_format(dtype, tmp_path):
    base = lambda: tiny.model().to(dtype).eval()  # noqa: E731
    made = get_peft_model(base(), AdapterConfig(bottleneck_size=3))
    made.save_pretrained(tmp_path)
    for model in (made, PeftModel.from_pretrained(base(), tmp_path)):
        for layer in adapters(model).values():
            assert layer.adapter_down["default"].weight.dtype == torch.float32
        assert model(input_ids=torch.tensor([[2, 5, 9]])).logits.dtype == dtype


def test_of_a_packed_weight_is_float32():
    class Packed(torch.nn.Linear):
        """Holds its weight as bitsandbytes' Linear4bit does."""

        def __init__(self):
            super().__init__(8, 8)
            packed = torch.zeros(32, 1, dtype=torch.uint8)
            self.weight = torch.nn.Parameter(packed, requires_grad=False)

    layer = AdapterLayer(Packed(), "default", AdapterConfig(bottleneck_size=2))
    assert layer.adapter_down["default"].weight.dtype == torch.float32


def test_trains_a_base_of_16_bits_privately(tmp_path):
    given = {"model": tiny.model().bfloat16(), "peft_config": AdapterConfig(bottleneck_size=4)}
    trainer = tiny.trainer(tmp_path, given=given, max_steps=1)
    trainer.train()
    assert trainer.ledger.steps() == 1


@pytest.mark.slow
def test_trains_privately_and_loads_where_hf_dp_is_imported(tmp_path):
    given = {"peft_config": AdapterConfig(bottleneck_size=4)}
    trainer = tiny.trainer(tmp_path / "run", given=given, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    text = (tmp_path / "run" / "README.md").read_text()
    assert "import hf_dp" in text and "(ADAPTER)" in text
    tiny.assert_loads_elsewhere(trainer, "import hf_dp")
    again = tiny.trainer(tmp_path / "run", given=given)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.ledger.steps() == 6


def test_refusals():
    model = get_peft_model(ARCHITECTURES["bert"].build(), AdapterConfig())
    with pytest.raises(UnsupportedModelError, match="cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(InvalidArgumentError, match="target_modules.*'convnext'"):
        get_peft_model(ARCHITECTURES["convnext"].build(), AdapterConfig())
    for name, bad in {"bottleneck_size": 0, "style": "x", "activation": "x"}.items():
        with pytest.raises(InvalidArgumentError, match=name):
            AdapterConfig(**{name: bad})
