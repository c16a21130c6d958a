"""What chooses what trains, and DP-FP, in several processes: as in one, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import outcomes
from silence import silenced, weights
from transformers import set_seed

from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import ParamConfig, PvalConfig

FROST = {"unfreeze_ratio": 0.5, "selection_iterations": 1, "selection_sample_rate": 1.0}
DP_FP = {"privacy_mode": "dp_fp", "dp_fp_variant": "published"}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "frost": (lambda: FrostConfig(**FROST, task_type="SEQ_CLS"), {}),
    "frost by 2-norms": (lambda: FrostConfig(**FROST, magnitude="mg", norm_order=2, task_type="SEQ_CLS"), {}),
    "frost twice": (lambda: FrostConfig(**FROST, num_selections=2, task_type="SEQ_CLS"), {}),
    "param": (lambda: ParamConfig(unfreeze_ratio=0.3, selection_sample_rate=1.0, task_type="SEQ_CLS"), {}),
    "pval": (lambda: PvalConfig(unfreeze_ratio=0.3, task_type="SEQ_CLS"), {}),
    "dp_fp as published": (None, {**DP_FP, "noise_multiplier": 1.0, "target_epsilon": None, "num_micro_batches": 1}),
    "private encoder": (None, {**DP_FP, "dp_fp_variant": "private_encoder"}),
}  # fmt: skip
QUICK = ("frost by 2-norms", "private encoder")


def trained(folder: Path, peft: Any, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The weights after a run that draws every example and has no noise."""
    set_seed(0)
    values = {
        "expected_batch_size": 40, "per_device_train_batch_size": 8, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_steps": 2, "target_epsilon": 8.0,
    }  # fmt: skip
    given = {
        "model": tiny.model().double(),
        "peft_config": peft() if peft else None,
        "train_dataset": tiny.dataset().map(lambda row: {"label": 1}),
    }
    made = tiny.trainer(folder, given=given, **{**values, **options, **more})
    silenced(made).train()
    return weights(made)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in METHODS]
)
def test_two_processes_do_what_one_does(method, tmp_path):
    peft, options = METHODS[method]
    alone = trained(tmp_path / "one", peft, options)
    ended = outcomes(2, lambda: trained(tmp_path / "two", peft, options))
    assert not any(each.exit for each in ended), ended[0].trace + ended[1].trace
    first, second = (each.result for each in ended)
    assert first.keys() == alone.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one.ledger.to_list() == two.ledger.to_list()
    assert disagreements(two) == []


def test_processes_of_rgp_share_their_carriers(tmp_path):
    def train():
        config = RgpConfig(rank=2, task_type="SEQ_CLS")
        made = tiny.trainer(tmp_path, given={"peft_config": config}, accountant="rdp", max_steps=2)
        torch.manual_seed(made.run.processes.rank)  # carriers start at random
        made.train()
        return weights(made)

    first, second = (each.result for each in outcomes(2, train))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_dp_fp_is_refused_by_name(tmp_path):
    def train():
        options = {**DP_FP, "dp_fp_variant": "frozen", "target_epsilon": 8.0}
        tiny.trainer(tmp_path, **options).train()

    for each in outcomes(2, train):
        assert "Expected one process with dp_fp_variant='frozen', got 2" in each.message
    assert not (tmp_path / "ledger.jsonl").exists() or not read_run(tmp_path).ledger.steps()
