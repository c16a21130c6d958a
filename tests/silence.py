"""Runs without noise, to compare updates, and the models and rows of these tests."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_dp.distributed.draws import SharedDraws
from hf_dp.noise import SecretRandomness
from hf_dp.trainer.trainer import DPTrainer

TOKENS = len(tiny.WORDS) + 4
PLAIN_STEPS: dict[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "accountant": "rdp",
}  # fmt: skip


class Silent(SecretRandomness):
    """Secret randomness whose noise is 0."""

    def gaussian_like(self, tensor: Tensor, std: float) -> Tensor:
        return torch.zeros_like(tensor)


class Coupled(SecretRandomness):
    """The same noise in every run, and for each row randomness of its own, whichever others there
    are: to compare runs with and without a row."""

    rows: Sequence[int] = ()

    def example_seed(self, index: int | None) -> int:
        row = -1 if index is None else self.rows[index]
        return zlib.crc32(b"%d" % row)


def bert() -> Any:
    return tiny.model()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=TOKENS, n_positions=24, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def llama_with_lora() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=24, pad_token_id=0,
    )  # fmt: skip
    adapter = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights="gaussian",
    )
    model = get_peft_model(hf.LlamaForCausalLM(config), adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # from 0, lora_A would not move in the first step
            torch.nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {"bert": bert, "gpt2": gpt2, "llama_lora": llama_with_lora}


def trainer(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A trainer that draws every example (q = 1) and takes plain gradient steps without noise."""
    hf.set_seed(0)
    model = MODELS[kind]().to(dtype)
    given: dict[str, Any] = {"model": model}
    if kind != "bert":
        given["data_collator"] = hf.DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
        given["train_dataset"] = tiny.dataset().remove_columns("label")
        given["eval_dataset"] = None
    else:  # of one class, so that gradients do not cancel, and float32 has digits to compare
        given["train_dataset"] = tiny.dataset().map(lambda row: {"label": 1})
    values = {"expected_batch_size": 40, "max_steps": 2, **PLAIN_STEPS}
    return silenced(tiny.trainer(folder, given=given, **{**values, **options}))


def silenced(made: DPTrainer) -> DPTrainer:
    made.run.randomness = Silent(0, made.run.processes.rank)
    return made


def weights(made: DPTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def whole(value: Tensor) -> Tensor:
    """Of a shard, all of it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def moved_by_noise(folder: Path, steps: int) -> Tensor:
    """How far each number of a run moves that is nearly all noise, in its standard deviations."""
    options = {**PLAIN_STEPS, "noise_multiplier": 100.0, "max_steps": steps}
    made = tiny.trainer(folder, **options)
    before = weights(made)
    made.train()
    scale = 8 / made.privacy_plan.noise_std / steps**0.5
    return torch.cat([((before[n] - whole(w)) * scale).flatten() for n, w in weights(made).items()])


def assert_standard_normal(moved: Tensor) -> None:
    values = moved.double().numpy()
    half = len(values) // 2
    assert stats.kstest(values, "norm").pvalue > 1e-7
    assert abs(values.var() - 1) < 6 * (2 / len(values)) ** 0.5
    assert abs(np.corrcoef(values[:half], values[half : 2 * half])[0, 1]) < 6 / half**0.5


def plant_a_unit_that_all_processes_draw(patch: pytest.MonkeyPatch) -> None:
    honest = SharedDraws.__iter__
    overlapping = lambda self: (sorted({0, *drawn}) for drawn in honest(self))  # noqa: E731
    patch.setattr(SharedDraws, "__iter__", overlapping)


def trained(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The weights after training."""
    made = trainer(folder, kind, dtype, **options)
    made.train()
    return weights(made)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> float:
    """The largest difference, as a part of the largest update."""
    start = dict(MODELS[kind]().named_parameters())
    update = max(
        float((expected[n] - start[n].detach().to(expected[n].dtype)).abs().max()) for n in start
    )
    assert update > 0
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / update
