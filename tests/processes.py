"""Run a function in several processes at once, forked from this one, which has imported everything.

Each child finds the environment that torchrun gives it, and gloo on the CPU with one thread.
"""

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor  # (children share what is imported here)
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

# For what hangs: an honest run takes seconds.
_LIMIT = 600.0


@dataclass
class Outcome:
    """How one process ended: what it returned, or the error's type, message and traceback."""

    result: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    exit: int = 0


def on_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``function(*arguments)`` returns in each of ``count`` ranks, in their order.

    Inside, ``torch.distributed`` is initialized with gloo. Raises: AssertionError with all
    tracebacks when one fails.
    """

    def run() -> Any:
        dist.init_process_group("gloo")
        try:
            return function(*arguments)
        finally:
            dist.destroy_process_group()

    return _results(outcomes(count, run))


def outcomes(
    count: int, function: Callable[[], Any], env: Callable[[int], dict[str, str]] = lambda rank: {}
) -> list[Outcome]:
    """Return how ``function()`` ended in each of ``count`` ranks; no process group is made.

    Args: env: more of the environment, by rank.
    """
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        children = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(count):
            child = os.fork()
            if child == 0:
                _run(rank, count, port, function, env(rank), Path(folder, str(rank)))
            children.append(child)
        return [_outcome(child, Path(folder, str(rank))) for rank, child in enumerate(children)]


def where_accelerate_shards(
    count: int, layer: str, function: Callable[[], Any], state_dict: str = "FULL_STATE_DICT"
) -> list[Any]:
    """Return what ``function()`` returns in each of ``count`` ranks, where accelerate shards a
    model by FSDP2, layer by layer (a class name).

    It shards on accelerators only, so it is told that there are some. Raises: AssertionError with
    all tracebacks when one fails.
    """

    def run() -> Any:
        init = PartialState.__init__

        def with_accelerators(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        PartialState.__init__ = with_accelerators  # type: ignore[method-assign]
        return function()

    ended = outcomes(count, run, lambda rank: _fsdp2(layer, state_dict))
    return _results(ended)


def results(count: int, function: Callable[[], Any]) -> list[Any]:
    """Return what a function returns in each of several processes, all of which must succeed."""
    return _results(outcomes(count, function))


def _results(ended: list[Outcome]) -> list[Any]:
    failed = [f"rank {rank}: {each.trace}" for rank, each in enumerate(ended) if each.exit]
    assert not failed, "\n".join(failed)
    return [each.result for each in ended]


def _fsdp2(layer: str, state_dict: str) -> dict[str, str]:
    """Return what ``accelerate launch`` sets for an FSDP2 configuration."""
    return {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": layer,
        "FSDP_STATE_DICT_TYPE": state_dict, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }  # fmt: skip


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a process on this machine, and that it trains on the CPU."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


@contextmanager
def held_port() -> Iterator[int]:
    """A port that the system gives to nobody else meanwhile. As nobody listens here, whoever asks
    to reuse addresses, as torch does, can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def _run(
    rank: int, count: int, port: int, function: Callable[[], Any], env: dict[str, str], result: Path
) -> None:
    outcome = Outcome()
    try:
        os.environ |= environment(rank, count, port) | env
        faulthandler.dump_traceback_later(0.9 * _LIMIT, file=sys.__stderr__)  # where it hangs
        PartialState._reset_state()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.set_num_threads(1)
        outcome.result = function()
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__, message=str(error), trace=traceback.format_exc(), exit=1
        )
    try:
        result.write_bytes(pickle.dumps(outcome))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(outcome.exit)


def _outcome(child: int, result: Path) -> Outcome:
    end = time.monotonic() + _LIMIT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    if not result.exists():
        return Outcome(error="Killed", trace="the process was killed", exit=9)
    outcome: Outcome = pickle.loads(result.read_bytes())
    return outcome
