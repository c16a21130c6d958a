"""The noised loss of several processes: the sum of all losses, with one noise, the same for all."""

from __future__ import annotations

import numpy as np
import silence
import tiny
import torch
from processes import results

from hf_dp.accounting import PoissonSampledGaussian
from hf_dp.statement.record import disagreements, read

LOSS = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}


def losses_of(made) -> list[float]:
    made.train()
    return [row["noised_loss"] for row in made.state.log_history if "noised_loss" in row]


def test_a_run_of_two_processes_logs_what_one_logs(tmp_path):
    def losses(name: str, **options):
        return losses_of(
            silence.trainer(tmp_path / name, "bert", torch.float64, max_steps=2, **LOSS, **options)
        )  # every row in each step, no noise

    alone = losses("one", per_device_train_batch_size=40)
    assert len(alone) == 2 and alone[0] > 0
    for found in results(2, lambda: losses("two")):
        np.testing.assert_allclose(found, alone, rtol=1e-9)


def test_two_processes_log_the_same_noised_numbers(tmp_path):
    def train():
        return losses_of(tiny.trainer(tmp_path, accountant="rdp", max_steps=2, **LOSS))

    first, second = results(2, train)
    assert first == second and len(set(first)) == 2
    record = read(tmp_path)
    assert record.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 2, beside={"loss": 2.0}),)
    assert disagreements(record) == []
