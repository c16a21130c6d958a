"""A model whose weights lie in shards on several processes is published whole."""

from __future__ import annotations

import pytest
import silence
import torch
from loopback_hub import USER
from safetensors.torch import load

from tests.distributed.test_sharded_runs import sharded

NAME = f"{USER}/model"


@pytest.mark.parametrize(
    "state_dict", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)]
)
def test_shards_are_put_together(hub, tmp_path, state_dict):
    def run() -> int:
        options = {"save_strategy": "no", "max_steps": 1, "hub_model_id": NAME}
        trainer = silence.trainer(tmp_path / "run", "gpt2", torch.float32, **options)
        trainer.train()
        trainer.push_to_hub(not_private=True)  # the noise of these runs is known
        return sum(parameter.numel() for parameter in trainer.model.parameters())

    count, _ = sharded(2, "gpt2", run, state_dict)
    (commit,) = hub.pushes(NAME)
    weights = load(commit.files["model.safetensors"])
    assert sum(weight.numel() for weight in weights.values()) == count
