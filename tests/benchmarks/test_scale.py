"""The model of bytes and memory is what a step does: counted around real steps, ours and stock.

Times are predictions and cannot be checked here, but for what follows from the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

from hf_dp.benchmarks import scale
from hf_dp.benchmarks.process_modes import PrivateStep, StockStep, make_optimizer, spread
from hf_dp.benchmarks.scale import Held, Machine, Sizes, Traffic, expected_most, predict
from hf_dp.benchmarks.workload import Workload
from hf_dp.cli.main import main
from hf_dp.clipping import sharded_sums
from hf_dp.clipping.sharded_sums import ShardedSums
from hf_dp.errors import InvalidArgumentError

WORKLOAD = Workload("tiny-bert", batch_size=2, length=4, threads=1, device="cpu")
BATCHES = 3  # physical ones of each process
MESSAGES = 100  # bytes: what processes tell each other is no more in one call


def model() -> nn.Module:
    """A model of whose tensors each can be cut into four equal parts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    tables = {"vocab_size": 64, "max_position_embeddings": 32, "type_vocab_size": 4}
    return BertForSequenceClassification(
        BertConfig(num_hidden_layers=3, num_labels=4, **sizes, **tables)
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(8).view(2, 4) + 5
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.tensor([0, 1]),
    }


class Collectives(TorchDispatchMode):
    """Counts what goes through collectives, in bytes of whole tensors, messages apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Traffic()
        self.scattered: list[tuple[int, int]] = []  # bytes in, bytes out
        self.watch: Any = lambda: None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func.name().split("::")
        if space == "c10d":
            self._count(name, args)
        self.watch()
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "_allgather_base_":
            self.found += Traffic(gathered=args[0].nbytes, calls=1)
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):  # FSDP2's, ours between CPUs
            self.found += Traffic(args[1].nbytes, calls=1)
            self.scattered.append((args[1].nbytes, args[1].nbytes // dist.get_world_size()))
        elif name == "allreduce_":
            reduced = sum(each.nbytes for each in args[0])
            if reduced != 8:  # the number of physical batches
                self.found += Traffic(reduced=reduced, reductions=1)
        else:
            assert name == "allgather_" and args[1][0].nbytes < MESSAGES, name


def storage(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(found.values())


@contextmanager
def whole_sums(found: list[int]) -> Iterator[None]:
    """Note what the sums of full size take when they are collected."""
    collect = ShardedSums.collect

    def noted(self, local):
        found.append(storage(local.values()))
        return collect(self, local)

    ShardedSums.collect = noted
    try:
        yield
    finally:
        ShardedSums.collect = collect


def sharded_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's own objects for the parameters of a model; a group has its as long as the model."""
    return [
        param
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]


def unsharded(parameters: list[Any]) -> int:
    """Bytes of the parameters that FSDP2 holds whole now."""
    return sum(
        param._unsharded_param.untyped_storage().nbytes()
        for param in parameters
        if hasattr(param, "_unsharded_param")
    )


def counted(way: str, private: bool, folder: Any) -> tuple[Traffic, Held, Sizes]:
    """Traffic and memory of the second step in this process."""
    plain = model()
    sizes = Sizes.of(plain)
    spread_model = spread(plain, way)
    optimizer = make_optimizer(plain)
    step = (
        PrivateStep(plain, WORKLOAD, optimizer, str(folder), 6)
        if private
        else StockStep(spread_model, WORKLOAD, optimizer, way)
    )
    step.step([batch()] * BATCHES)  # makes the state of the optimizer
    held: dict[str, int] = {}
    whole: list[int] = []
    gathered = [0]

    def update() -> None:
        parameters = list(plain.parameters())
        held["parameters"] = storage(parameters)
        held["gradients"] = storage(p.grad for p in parameters)
        state = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held["optimizer"] = storage(state)

    step.update = update
    counter = Collectives()
    if way == "fsdp2":
        parameters = sharded_parameters(plain)
        counter.watch = lambda: gathered.append(unsharded(parameters))
    with counter, whole_sums(whole):
        step.step([batch()] * BATCHES)
    if private and way == "fsdp2":
        exchanged = max((2 * size + own for size, own in counter.scattered), default=0)
        held |= {"whole": whole[0], "bucket": max(exchanged, whole[0])}
    elif private:
        held["bucket"] = max((size + 2 * own for size, own in counter.scattered), default=0)
    return counter.found, Held(**held, gathered=max(gathered)), sizes


@pytest.mark.parametrize(
    ("way", "at_the_end", "processes"),
    [
        pytest.param(way, at_the_end, processes, marks=[pytest.mark.slow] * slow)
        for way, at_the_end in [("ddp", 2**25), ("fsdp2", 2**25), ("fsdp2", 2000), ("fsdp2", 0)]
        for processes in (1, 2, 4)
        # All numbers of processes in the bucket between the extremes; two stand for them elsewhere.
        for slow in [processes != 2 and at_the_end != 2000]
    ],
)
def test_ours_sends_and_holds_what_the_model_says(
    way, at_the_end, processes, tmp_path, monkeypatch
):
    monkeypatch.setattr(sharded_sums, "_WHOLE", at_the_end)
    for traffic, held, sizes in on_processes(processes, lambda: counted(way, True, tmp_path)):
        if way == "ddp":
            expected = scale.private_ddp_traffic(sizes)
            memory = scale.private_ddp_memory(sizes, processes)
        else:
            expected = scale.private_fsdp2_traffic(sizes, BATCHES)
            memory = scale.private_fsdp2_memory(sizes, processes)
        assert traffic.sent(processes) == expected.sent(processes)
        if processes > 1:  # one process exchanges nothing under DDP
            assert traffic == expected
            assert_held(held, memory)


@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stock_fsdp2_sends_what_the_model_says(processes, tmp_path):
    for traffic, held, sizes in on_processes(processes, lambda: counted("fsdp2", False, tmp_path)):
        expected = scale.stock_fsdp2_traffic(sizes, BATCHES)
        assert traffic.sent(processes) == expected.sent(processes)
        if processes > 1:
            assert traffic == expected
        memory = scale.stock_fsdp2_memory(sizes, processes, BATCHES)
        assert_held(replace(held, whole=memory.whole), memory)


def assert_held(held: Held, memory: Held) -> None:
    """All as the model says, but gathered layers: the next one may not be there yet."""
    assert replace(held, gathered=0.0) == replace(memory, gathered=0.0)
    assert 0.6 * memory.gathered <= held.gathered <= memory.gathered


# -- draws and times --


@pytest.mark.parametrize(("mean", "processes", "batch"), [(30.0, 4, 1), (30.0, 4, 8), (2.0, 16, 3)])
def test_the_largest_draw_is_that_of_a_simulation(mean, processes, batch):
    draws = np.random.default_rng(0).poisson(mean, (20_000, processes))
    most = np.ceil(draws / batch).max(1)
    tolerance = 5 * most.std() / math.sqrt(len(most))
    assert abs(expected_most(mean, processes, batch) - most.mean()) < tolerance


def test_smaller_physical_batches_round_up_less():
    examples = [batch * expected_most(100.0, 8, batch) for batch in (1, 4, 16, 64)]
    assert examples == sorted(examples)


def test_one_process_sends_nothing_and_waits_for_nobody():
    report = predict("tiny-bert", Machine(relative_speed=1.0), 20.0, 4, counts=(1,))
    for (row,) in report["ways"].values():
        assert row["stock_sent"] == row["private_sent"] == 0
        released = report["machine"]["seconds_per_record"]
        released += report["sizes"]["trained"] / report["machine"]["noise_per_second"]
        assert row["private_seconds"] - row["stock_seconds"] == pytest.approx(released, abs=1e-6)


def test_more_processes_are_never_better_for_one():
    report = predict("roberta-base")
    assert [row["processes"] for row in report["draws"]] == list(scale.COUNTS)
    for rows in report["ways"].values():
        for kind in ("stock_sent", "private_sent", "stock_seconds"):
            assert [row[kind] for row in rows] == sorted(row[kind] for row in rows)
    private = [row["private_seconds"] for row in report["ways"]["fsdp2"]]
    assert private == sorted(private)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"mean": -1.0}, "examples"), ({"batch": 0}, "batch_size"), ({"name": "tinny"}, "model")],
)
def test_wrong_numbers_are_refused(change, name):
    with pytest.raises(InvalidArgumentError, match=f"`{name}`"):
        predict(**{"name": "tiny-bert", **change})
    with pytest.raises(InvalidArgumentError, match="`bandwidth`"):
        Machine(bandwidth=0.0)


# -- the page --

PAGE = Path(scale.__file__).parents[1] / "distributed" / "README.md"


def test_the_page_shows_what_the_command_prints(capsys):
    assert main(["bench", "scale", "--model", "roberta-base"]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text()


@pytest.mark.parametrize("mean", [16, 64, 256, 1024])
def test_the_page_shows_the_largest_draws(mean):
    cells = " | ".join(f"{expected_most(mean, count) / mean:.3f}" for count in (2, 8, 64, 1024))
    assert f"| {mean:,} | {cells} |" in PAGE.read_text()
