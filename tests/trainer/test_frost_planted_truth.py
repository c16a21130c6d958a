"""A model in which three known matrices matter: FROST finds them at epsilon 2, chance does not."""

import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn import functional as F

from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.frost.tuner import FrostConfig, select_partitions
from hf_dp.tuners.public_choice import RandomConfig
from tests import tiny

PARTS, MATTER, WIDTH = 16, {"parts.3", "parts.7", "parts.11"}, 6
WHISPER = 0.02  # how much less the others do


class Sum(nn.Module):
    """A sum of layers, three of which count; each layer is a partition of WIDTH + 1 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(PARTS))
        self.config = SimpleNamespace(model_type="sum", to_dict=dict)

    def forward(self, x, labels=None):
        scales = [1.0 if f"parts.{i}" in MATTER else WHISPER for i in range(PARTS)]
        outputs = [scale * part(x) for scale, part in zip(scales, self.parts, strict=True)]
        return torch.cat(outputs, 1).sum(1)


class Regression(DPTrainer):
    def compute_per_example_loss(self, model, inputs):
        return F.mse_loss(model(inputs["x"]), inputs["labels"], reduction="none")

    def synthetic_batches(self):
        x, y = torch.randn(3, WIDTH), torch.randn(3)
        return [{"x": x[i : i + 1], "labels": y[i : i + 1]} for i in range(3)]


def trainer(folder, config, **options):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1000, WIDTH)).astype(np.float32)
    rows = datasets.Dataset.from_dict({"x": list(x), "labels": x.sum(1) * 3})
    given = {
        "model": Sum(), "train_dataset": rows.with_format("torch"), "eval_dataset": None, "peft_config": config,
        "data_collator": lambda items: {k: torch.stack([item[k] for item in items]) for k in items[0]},
    }  # fmt: skip
    values = {"expected_batch_size": 100, "num_train_epochs": 3, "max_steps": -1, **options}
    return tiny.trainer(folder, cls=Regression, given=given, remove_unused_columns=False, **values)


def found(folder, count=10, **noise) -> list[set[str]]:
    """What each of ``count`` selections chose."""
    config = FrostConfig(unfreeze_ratio=3 / PARTS, selection_sample_rate=0.1, **noise)
    made = trainer(
        folder, config, **({"noise_multiplier": 1.0} if noise else {"target_epsilon": 2.0})
    )
    run = made.run
    made.tuner.prepare(run)
    run.open()
    selections = [
        set(select_partitions(run, made.tuner.config)["partitions"]) for _ in range(count)
    ]
    run.stop()
    return selections


@pytest.mark.slow
def test_frost_finds_what_matters_at_epsilon_2(tmp_path, monkeypatch):
    # Ten selections of one plan; each alone is what the target pays for.
    monkeypatch.setattr("hf_dp.run.budget.Budget._would_pass", lambda self, event: False)
    selections = found(tmp_path)
    assert sum(chosen == MATTER for chosen in selections) >= 9


def test_chance_does_not(tmp_path):
    picked = []
    for seed in range(10):
        names = RandomConfig(unfreeze_ratio=3 / PARTS, selection_seed=seed).choose(Sum())
        picked.append({name.rpartition(".")[0] for name in names})
    assert all(len(chosen) == 3 for chosen in picked)
    assert sum(chosen == MATTER for chosen in picked) <= 1  # one in 560


@pytest.mark.slow
@pytest.mark.parametrize("noise", [30.0, 60.0])
def test_more_noise_finds_fewer_as_lemma_6_predicts(tmp_path, noise):
    """The share that is found, against the chance that lemma 6's spread keeps their order."""
    selections = found(tmp_path, 20, selection_noise_multiplier=noise)
    share = sum(len(chosen & MATTER) for chosen in selections) / 60
    # Fully clipped, each of about 100 drawn examples adds cbar in all, about a third of it to each
    # that matters, so with scales near q the estimate's spread (lemma 6) is noise / sqrt(T) beside
    # a magnitude of 100 / 3, in units of cbar.
    spread, gap = noise / math.sqrt(5), 100 / 3
    x = np.linspace(-8, 8 + gap / spread, 4001)
    others = norm.cdf(x) ** (PARTS - 3)  # the largest of those that do not matter stays below
    keeps = float(np.trapezoid(norm.pdf(x - gap / spread) * others, x))
    assert keeps < 0.8
    assert share == pytest.approx(
        keeps, abs=0.25
    )  # 60 draws: 0.06 is one standard deviation; measured on 90: 0.05 and 0.08
