"""Preferences in several processes: the update of one, also where FSDP2 shards the model, which then
runs twice before each backward."""

from __future__ import annotations

import pytest
from preferences import ROWS, moved, trainer
from processes import on_processes, where_accelerate_shards
from silence import Silent, weights


def trained(folder):
    """The weights after steps with every pair and without noise; whole."""
    made = trainer(
        folder,
        expected_batch_size=ROWS,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        accountant="rdp",
        max_steps=1,
    )
    made.run.randomness = Silent(0, made.run.processes.rank)
    made.train()
    found = weights(made)
    whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in found.items()}
    return whole, {type(each).__name__ for each in found.values()}


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_make_the_update_of_one(sharded, tmp_path):
    expected, _ = trained(tmp_path / "one")
    start = dict(moved().named_parameters())
    update = max(float((expected[n] - start[n].detach()).abs().max()) for n in start)
    assert update > 1e-3
    found = (
        where_accelerate_shards(2, "Qwen2DecoderLayer", lambda: trained(tmp_path / "two"))
        if sharded
        else on_processes(2, trained, tmp_path / "two")
    )
    for whole, types in found:
        assert types == {"DTensor" if sharded else "Tensor"}
        assert max(float((whole[n] - expected[n]).abs().max()) for n in start) < 1e-4 * update
