"""The noised loss of several processes: the sum of all losses, with one noise, the same for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import silence
import tiny
import torch
from processes import on_processes, outcomes
from scipy import stats
from torch.distributed.fsdp import fully_shard
from transformers import DataCollatorWithPadding

from hf_dp import DpSgdPlan, NoisedLoss, PrivacyPlan, PrivateRun, mechanism_for
from hf_dp.accounting import PoissonSampledGaussian
from hf_dp.batches.loader import BatchOptions
from hf_dp.distributed import sums as module
from hf_dp.distributed.processes import Processes
from hf_dp.noise import SecretRandomness
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.run.gate import IndependentNoise, Release
from hf_dp.run.options import RunOptions
from hf_dp.statement.record import disagreements, read

LOSS = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}
PLANNED = PlannedRelease(
    PoissonSampledGaussian(2.0, 0.1, 1, beside={"loss": 9.0}), "training", {"sum": 0.5, "loss": 3.0}
)


def results(count: int, function) -> list[Any]:
    ended = outcomes(count, function)
    failed = [f"rank {rank}: {each.trace}" for rank, each in enumerate(ended) if each.exit]
    assert not failed, "\n".join(failed)
    return [each.result for each in ended]


# -- the noise --


def released() -> torch.Tensor:
    here = Processes.here()
    release = Release(
        PLANNED, IndependentNoise(SecretRandomness()), SimpleNamespace(processes=here)
    )
    return release.loss(torch.full((20_001,), 1.0 + here.rank, dtype=torch.float64))


def is_summed_and_noised_once(count: int) -> bool:
    found = on_processes(count, released)
    assert all(torch.equal(each, found[0]) for each in found)
    noise = (found[0] - sum(range(1, count + 1))) / (9.0 * 3.0)
    return stats.kstest(noise.numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("count", [2, 3])
def test_the_losses_of_all_processes_get_one_noise(count):
    assert is_summed_and_noised_once(count)


def test_planted_noise_of_every_process_is_seen(monkeypatch):
    honest = module._scatter_noise_gather

    def noise_everywhere(bucket, noise, processes):
        for total in bucket:
            total.add_(noise(total))
        honest(bucket, torch.zeros_like, processes)

    monkeypatch.setattr(module, "_scatter_noise_gather", noise_everywhere)
    assert not is_summed_and_noised_once(2)


# -- whole runs --


def losses_of(made) -> list[float]:
    made.train()
    return [row["noised_loss"] for row in made.state.log_history if "noised_loss" in row]


def test_a_run_of_two_processes_logs_what_one_logs(tmp_path):
    def losses(name: str, **options):
        return losses_of(
            silence.trainer(tmp_path / name, "bert", torch.float64, **LOSS, **options)
        )  # every row in each step, no noise

    alone = losses("one", per_device_train_batch_size=40)
    assert len(alone) == 3 and alone[0] > 0
    for found in results(2, lambda: losses("two")):
        np.testing.assert_allclose(found, alone, rtol=1e-9)


def test_two_processes_log_the_same_noised_numbers(tmp_path):
    def train():
        return losses_of(tiny.trainer(tmp_path, accountant="rdp", **LOSS))

    first, second = results(2, train)
    assert first == second and len(set(first)) == 4
    record = read(tmp_path)
    assert record.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 4, beside={"loss": 2.0}),)
    assert disagreements(record) == []


def looped(folder, shards: bool) -> list[float]:
    """The noised losses of a plain loop, without noise, on a model that ``fully_shard`` was called
    on."""
    model = tiny.model().double()
    if shards:
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    plan = PrivacyPlan.solve(
        num_examples=40,
        expected_batch_size=40,
        mechanism=DpSgdPlan(0.1, 1.0, loss=NoisedLoss(*LOSS.values())),
        max_steps=2,
        accountant="rdp",
    )
    private = PrivateRun(
        model,
        plan,
        folder,
        train_dataset=tiny.dataset().rename_column("label", "labels"),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        # batches that processes have unequally many of, so that one makes up examples
        options=RunOptions(batches=BatchOptions(physical_batch_size=5, quiet=True)),
    )
    private.randomness = silence.Silent(0, private.processes.rank)
    mechanism, found = mechanism_for(private), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        with private.release_step() as release:
            mechanism.set_gradients(clipped, release)
        assert mechanism.noised
        found.append(float(mechanism.noised["noised_loss"]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_sharded_model_has_the_losses_of_one_process(tmp_path):
    alone = looped(tmp_path / "one", False)
    for found in on_processes(3, looped, tmp_path / "fsdp", True):
        np.testing.assert_allclose(found, alone, rtol=1e-9)
