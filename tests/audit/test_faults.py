"""The faults that audits are tried on are faults."""

import pytest
import tiny
import torch
from faults import FAULTS, planted

CLIPPING = (
    "gradients are not clipped",
    "clipped to twice C",
    "the head is not clipped",
    "each layer is clipped to C",
)
C = 0.01


def sum_of_one(folder) -> float:
    """The norm of what one example adds to a clipped sum, in units of C."""
    trainer = tiny.trainer(folder, per_example_max_grad_norm=C, max_steps=1)
    trainer.create_optimizer()
    loader = trainer.get_train_dataloader()
    batches = loader.collate_fn(loader.dataset.__getitems__([3]))
    sums = trainer.mechanism.clip(batches).values
    return float(torch.cat([value.flatten() for value in sums.values()]).double().norm()) / C


def test_an_example_adds_c_without_a_fault(tmp_path):
    with planted("none"):
        assert sum_of_one(tmp_path) == pytest.approx(0.9862, rel=1e-3)


@pytest.mark.parametrize("name", CLIPPING)
def test_an_example_adds_more_than_c_with_a_fault_in_clipping(name, tmp_path):
    with planted(name):
        assert sum_of_one(tmp_path) > 1.01


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in CLIPPING])
def test_other_faults_leave_a_run_that_ends(name, tmp_path):
    with planted(name):
        trainer = tiny.trainer(tmp_path, max_steps=3)
        trainer.train()
    assert trainer.state.global_step == 3
