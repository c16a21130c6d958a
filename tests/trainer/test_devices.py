"""Which device the processes of a launcher take, decided before transformers sets devices up."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from processes import outcomes

from hf_dp.errors import InvalidArgumentError
from hf_dp.trainer import launch


def facts(folder: Path, **options: Any) -> tuple[Any, ...]:
    args = tiny.arguments(folder, use_cpu=False, **options)
    dist.barrier()  # nobody leaves while another is still on its way
    return args.world_size, args.use_cpu, args.device.type, dist.get_backend()


@pytest.mark.parametrize("options", [{}, {"privacy_mode": "non_private"}], ids=["dp", "plain"])
def test_processes_without_an_accelerator_train_together_on_the_cpu(options, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "has_accelerator", lambda: False)
    no_cpu = {"ACCELERATE_USE_CPU": "false"}
    found = outcomes(2, lambda: facts(tmp_path, **options), env=lambda rank: no_cpu)
    assert [(each.trace, each.result) for each in found] == [("", (2, True, "cpu", "gloo"))] * 2


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_the_main_process_says_that_the_cpu_is_used(rank, times, monkeypatch, caplog):
    monkeypatch.setattr(launch, "has_accelerator", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    args = Namespace(use_cpu=False)
    with caplog.at_level(logging.WARNING):
        launch.use_cpu_without_accelerator(args)
        launch.use_cpu_without_accelerator(args)
    assert args.use_cpu and caplog.text.count("the 2 processes train on the CPU") == times


@pytest.mark.parametrize(("world", "accelerator"), [(None, False), ("1", False), ("2", True)])
def test_one_process_and_processes_with_accelerators_keep_their_device(
    world, accelerator, monkeypatch
):
    monkeypatch.setattr(launch, "has_accelerator", lambda: accelerator)
    if world is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world)
    args = Namespace(use_cpu=False)
    launch.use_cpu_without_accelerator(args)
    assert args.use_cpu is False


@pytest.mark.parametrize(("kind", "found"), [("cuda", True), ("xpu", True), ("mps", False)])
def test_an_accelerator_is_what_processes_can_divide(kind, found, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert launch.has_accelerator() is found
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert launch.has_accelerator() is False


def test_more_processes_than_accelerators_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    message = r"`\$LOCAL_RANK` to be below 2.*got 2.*one process for each"
    with pytest.raises(InvalidArgumentError, match=message):
        tiny.arguments(tmp_path, use_cpu=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launch.processes_without_device(Namespace(use_cpu=False)) is None
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.processes_without_device(Namespace(use_cpu=False)) is None
