"""Preferences in several processes: the update of one, also where FSDP2 shards the model, which then
runs twice before each backward."""

from __future__ import annotations

import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from preferences import ROWS, moved, trainer
from processes import outcomes
from silence import Silent, weights

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def trained(folder, sharded: bool = False):
    """The weights after steps with every pair and without noise; whole."""
    if sharded:  # accelerate shards on accelerators only: tell it that there are some
        init = PartialState.__init__

        def with_accelerators(self, *args, **kwargs):
            init(self, *args, **kwargs)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        PartialState.__init__ = with_accelerators
    made = trainer(
        folder,
        expected_batch_size=ROWS,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        accountant="rdp",
    )
    made.run.randomness = Silent(0, made.run.processes.rank)
    made.train()
    found = weights(made)
    whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in found.items()}
    return whole, {type(each).__name__ for each in found.values()}


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_make_the_update_of_one(sharded, tmp_path):
    expected, _ = trained(tmp_path / "one")
    start = dict(moved().named_parameters())
    update = max(float((expected[n] - start[n].detach()).abs().max()) for n in start)
    assert update > 1e-3
    env = FSDP2 if sharded else {}
    ended = outcomes(2, lambda: trained(tmp_path / "two", sharded), lambda rank: env)
    assert not any(each.exit for each in ended), [each.trace for each in ended]
    for whole, types in (each.result for each in ended):
        assert types == {"DTensor" if sharded else "Tensor"}
        assert max(float((whole[n] - expected[n]).abs().max()) for n in start) < 1e-4 * update
