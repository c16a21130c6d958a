"""A measurement on two processes: equal work on both sides, in rounds, in a table."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch.multiprocessing import start_processes

from hf_dp.benchmarks import processes as module
from hf_dp.benchmarks.process_modes import StockStep, spread
from hf_dp.benchmarks.processes import measure_here, measure_processes
from hf_dp.benchmarks.throughput import Protocol
from hf_dp.benchmarks.workload import Workload, build_model
from hf_dp.cli.main import main
from hf_dp.errors import HfDpError, InvalidArgumentError

TINY = Workload("tiny-bert", batch_size=2, length=6, threads=1, device="cpu", dropout=0.0)
SHORT = Protocol(rounds=3, warmups=1, repeats=1, runs=2)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_every_process_finds_the_same_rounds(way):
    first, second = on_processes(2, measure_here, TINY, way, 2, SHORT)
    assert first == second
    assert [len(run) for run in first["runs"]] == [3, 3]
    assert all(set(each) == {way, f"private_{way}"} for run in first["runs"] for each in run)
    # two runs of one step to warm up and three rounds
    assert all(len(each) == 8 and min(each) > 0 for each in first["cpu_seconds"].values())


@pytest.mark.parametrize("planted", ["forward", "update"])
def test_a_step_that_does_other_work_is_not_compared(planted, monkeypatch):
    step = module.PrivateStep.step

    def other(self, batches):
        step(self, batches)
        if planted == "forward":
            self.losses(batches[0])
        else:
            self.optimizer.step()

    monkeypatch.setattr(module.PrivateStep, "step", other)

    def act():
        with pytest.raises(HfDpError, match="private_ddp did Done.*cannot be compared") as refused:
            measure_here(TINY, "ddp", 2, SHORT)
        return str(refused.value)

    for message in on_processes(2, act):
        assert ("forwards=3" if planted == "forward" else "updates=2") in message


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2_each"])
def test_the_stock_step_is_that_of_one_process_on_all_examples(way):
    def stepped(count: int) -> list[torch.Tensor]:
        model = build_model(TINY)
        here = spread(model, way) if dist.is_initialized() else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        everyone = module.make_batch(TINY, model, 8)
        parts = {name: value.split(2) for name, value in everyone.items()}
        mine = range(4) if count == 1 else (2 * dist.get_rank(), 2 * dist.get_rank() + 1)
        batches = [{name: part[at] for name, part in parts.items()} for at in mine]
        if count == 1:
            for batch in batches:
                (StockStep(model, TINY, optimizer, way).losses(batch).mean() / 4).backward()
            optimizer.step()
        else:
            StockStep(here, TINY, optimizer, way).step(batches)
        return [getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()]

    alone = stepped(1)
    for found in on_processes(2, stepped, 2):
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capfd):
    words = ["bench", "throughput", "--model", "tiny-bert", "--device", "cpu", "--threads", "1"]
    words += ["--processes", "2", "--physical-batches", "1", "--modes", "ddp", "--rounds", "3"]
    path = tmp_path / "report.json"
    assert main([*words, "--repeats", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert list(report["modes"]) == ["ddp", "private_ddp"]
    row = report["modes"]["private_ddp"]
    by_hand = sorted(each["ddp"] / each["private_ddp"] for each in report["runs"]["ddp"][0])
    assert row["ratio"] == by_hand[1]
    assert row["cpu_ratio"] * row["cpu_seconds"] == pytest.approx(
        report["modes"]["ddp"]["cpu_seconds"]
    )
    printed = capfd.readouterr()
    assert f"{row['ratio']:.3f}" in printed.out and "2 processes, each 1 physical" in printed.out
    assert "round 3 of 3" in printed.err
    assert str(tmp_path) not in path.read_text()


def test_a_process_that_fails_is_named(monkeypatch):
    """The processes are forked here, which is quicker; what new ones are given can be sent."""

    def fork(function, arguments, nprocs):
        assert pickle.loads(pickle.dumps((function, arguments))) == (function, arguments)
        start_processes(function, arguments, nprocs, start_method="fork")

    monkeypatch.setattr(module.multiprocessing, "spawn", fork)
    with pytest.raises(HfDpError, match=r"(?s)benchmark of 'ddp' failed.*`num_examples`"):
        module._in_processes(2, TINY, "ddp", 0, SHORT, None)  # no examples


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"processes": 1}, "processes"),
        ({"physical_batches": 0}, "physical_batches"),
        ({"ways": ["book_keeping"]}, "modes"),
        ({"protocol": Protocol(profile=True)}, "processes"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, name):
    with pytest.raises(InvalidArgumentError, match=f"`{name}`"):
        measure_processes(**{"workload": TINY, "processes": 2, **change})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ours_keeps_up_at_the_real_shape(way):
    """Whole steps of RoBERTa-base, T = 128, each on one thread."""
    workload = Workload("roberta-base", threads=1, device="cpu")
    protocol = Protocol(rounds=5, warmups=1, repeats=1)
    report = measure_processes(workload, 2, [way], 2, protocol)
    row = report["modes"][f"private_{way}"]
    # What is computed does not depend on what else the machine does; the clock does.
    assert row["cpu_ratio"] >= 0.88
    assert row["verdict"] == "repeat" or row["ratio"] >= 0.88
