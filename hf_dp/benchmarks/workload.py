"""The fixed choices of one measurement, the model and batch that follow from them, and the machine.

They are the same for every mode, so that all modes do equal work. Options that ``hf-dp train`` has
have its names and defaults. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hf_dp import _validate
from hf_dp._arguments import argument
from hf_dp._version import __version__
from hf_dp.benchmarks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The fixed choices of one measurement.

    ``dropout`` is a probability, the same everywhere.

    Raises: InvalidArgumentError naming the field.
    """

    model: str
    per_device_train_batch_size: int = argument(8, "examples of a step, one physical batch")
    max_length: int = argument(128, "tokens of each example")
    bf16: bool = argument(False, "bfloat16 autocast of the forward, float32 weights")
    gradient_checkpointing: bool = argument(False, "non-reentrant, in every mode")
    clipping_memory_ratio: float = argument(
        1.05, "memory that book_keeping may take for speed, over non_private"
    )
    chunked_loss: bool = argument(
        False, "clipping modes form a language model's loss by blocks of the vocabulary"
    )
    use_cpu: bool = argument(False, "the CPU, also where there is a CUDA device")
    threads: int | None = argument(None, "torch's intra-op threads (default: torch's own choice)")
    dropout: float = 0.1

    def __post_init__(self) -> None:
        import torch

        from hf_dp.plans.dp_sgd import check_memory_ratio

        _validate.one_of("model", self.model, SHAPES)
        if self.threads is None:
            object.__setattr__(self, "threads", torch.get_num_threads())
        _refuse_below(self, per_device_train_batch_size=1, max_length=2, threads=1)
        check_memory_ratio("clipping_memory_ratio", self.clipping_memory_ratio)
        if self.max_length > self.shape.positions:
            raise _validate.invalid(
                "max_length",
                self.max_length,
                f"to be at most {self.shape.positions}, the positions of {self.model}",
                "Choose fewer.",
            )

    @property
    def shape(self) -> Shape:
        """Return the model's sizes."""
        return SHAPES[self.model]

    @property
    def device(self) -> str:
        """Return where the work is done: ``cuda`` where there is a device, or ``cpu``."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How speed is timed.

    Raises: InvalidArgumentError naming the field.
    """

    rounds: int = argument(7, "timings of every mode in a run, interleaved, at least 3")
    warmups: int = argument(2, "untimed steps of every mode before a run")
    repeats: int | None = argument(
        None, "steps of every mode in a round, in turns (default: what takes 8 seconds)"
    )
    runs: int = argument(1, "repeat the whole and state whether the runs agree")

    def __post_init__(self) -> None:
        # Three rounds are the fewest that have a spread.
        _refuse_below(self, rounds=3, warmups=1, repeats=1, runs=1)


def _refuse_below(work: Any, **least: int) -> None:
    for name, minimum in least.items():
        if getattr(work, name) is not None:
            _validate.integer(name, getattr(work, name), minimum)


def build_model(workload: Workload, tied: bool = True) -> nn.Module:
    """Return the model with random weights, in training mode; untied, a tied head gets its own."""
    import torch

    torch.manual_seed(0)
    with torch.device(workload.device):
        model: Any = workload.shape.build(workload.dropout, tied)
    if workload.gradient_checkpointing:
        # The newer name where transformers has it; both are non-reentrant unless told otherwise.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    trained: nn.Module = model.to(workload.device).train()
    return trained


def made_up(model: nn.Module, examples: int, length: int) -> Batch:
    """Return random tokens, (b, T), or images, and labels, the same in each call."""
    import torch

    from hf_dp.run.synthetic import synthetic_examples

    with torch.random.fork_rng():
        torch.manual_seed(1)
        alone = synthetic_examples(model, [length] * examples, [length] * examples)
    device = next(model.parameters()).device
    return {name: torch.cat([each[name] for each in alone]).to(device) for name in alone[0]}


def make_batch(workload: Workload, model: nn.Module) -> Batch:
    """Return a physical batch, every example of full length."""
    return made_up(model, workload.per_device_train_batch_size, workload.max_length)


@contextmanager
def threads_of(workload: Workload) -> Iterator[None]:
    """Set torch's number of threads to the workload's, inside the context."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(workload.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(workload: Workload) -> dict[str, Any]:
    """Return versions of what is installed, device, and load; no path, user or host name."""
    import torch

    versions = {"hf_dp": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "opacus"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = platform.processor() or platform.machine()
    if workload.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
            device = names[0].strip() if names else device
    return {
        **versions,
        "device": device,
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
