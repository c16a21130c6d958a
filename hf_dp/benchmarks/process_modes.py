"""The steps that are compared on several processes: stock DDP or FSDP2, and ours in its place.

Both train one model with one optimizer, so that no difference is due to memory layout. A step is a
whole one: a logical batch in physical ones, the sum over processes, the update. Ours is that of a
private run, :class:`hf_dp.PrivateRun`: clipping, ledger, noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from transformers import default_data_collator

from hf_dp.benchmarks.mode import CLIPPING_NORM, BenchmarkMode
from hf_dp.benchmarks.workload import Batch, Workload, forward_precision
from hf_dp.losses import base_model
from hf_dp.mechanisms.base import mechanism_for
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.options import RunOptions
from hf_dp.run.private_run import PrivateRun

# stock -> what it is; ours is measured beside each.
WAYS = {
    "ddp": "DistributedDataParallel, gradients reduced once a step (no_sync)",
    "fsdp2": "fully_shard on each layer and the whole, gradients reduced once a step "
    "(set_requires_gradient_sync), as Trainer accumulates them",
    "fsdp2_each": "the same, gradients reduced after each physical batch (sync_each_batch of "
    "accelerate): no process holds gradients of full size, as ours holds no sums of full size",
}
_MOST_STEPS = 10**6  # of a measurement; they are planned, so that none is refused


class Replicated(DistributedDataParallel):
    """DDP whose wrapped model is found as PEFT's is, so that the loss knows its task."""

    def get_base_model(self) -> nn.Module:
        """Return the transformers model inside."""
        return base_model(self.module)


def spread(model: nn.Module, way: str) -> nn.Module:
    """Return a model as stock training holds it in this process, one of several."""
    if way == "ddp":
        return Replicated(model)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):  # the layers
            for layer in module:
                fully_shard(layer)
    fully_shard(model)
    return model


def make_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer of both steps."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


@dataclass
class Done:
    """What was done since the last look, as the model and the optimizer saw it."""

    forwards: int = 0
    examples: int = 0
    updates: int = 0

    @classmethod
    def watching(cls, model: nn.Module, optimizer: Optimizer) -> Done:
        """Return a counter of a model's forwards and an optimizer's updates."""
        done = cls()

        def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            done.forwards += 1
            done.examples += len(kwargs["input_ids"])

        def update(*_: Any) -> None:
            done.updates += 1

        model.register_forward_pre_hook(see, with_kwargs=True)
        optimizer.register_step_post_hook(update)
        return done

    def take(self) -> Done:
        """Return what was done, and begin anew."""
        found = Done(**vars(self))
        self.forwards = self.examples = self.updates = 0
        return found


class Step(BenchmarkMode):
    """A whole step; nothing of it is left but the update."""

    def __init__(self, model: nn.Module, workload: Workload, optimizer: Optimizer):
        super().__init__(model, workload)
        self.optimizer = optimizer

    def update(self) -> None:
        """Let the optimizer take the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reset(self) -> None:
        pass

    def gradients(self) -> dict[str, Tensor]:
        return {}


class StockStep(Step):
    """Gradient accumulation as users have it.

    Args: way: of :data:`WAYS`: says whether processes exchange gradients in the last backward or in
        each.
    """

    def __init__(self, model: nn.Module, workload: Workload, optimizer: Optimizer, way: str):
        super().__init__(model, workload, optimizer)
        self.each = way == "fsdp2_each"

    def step(self, batches: Sequence[Batch]) -> None:
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last or self.each else _unsynced(self.model):
                (self.losses(batch).mean() / len(batches)).backward()
        self.update()


class PrivateStep(Step):
    """The lines of ``DPTrainer.training_step`` with a run of its own.

    Args: folder: for the ledger. examples: of all processes in a logical batch.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, optimizer: Optimizer, folder: str, examples: int
    ):
        super().__init__(model, workload, optimizer)
        rows = [{"row": index} for index in range(100 * examples)]  # no more than a length
        plan = PrivacyPlan(
            len(rows), float(examples), _MOST_STEPS, 1e-6, DpSgdPlan(CLIPPING_NORM, 1.0)
        )
        self.run = PrivateRun(
            model,
            plan,
            folder,
            train_dataset=rows,
            data_collator=default_data_collator,
            forward_context=partial(forward_precision, workload),
            options=RunOptions(other_training="public_rows"),  # all rows are made up
        )
        self._mechanism = mechanism_for(self.run)
        self.run.open()
        self.run.book.start(plan.steps)

    def step(self, batches: Sequence[Batch]) -> None:
        self.run.begin_step()
        clipped = self._mechanism.clip(batches)
        with self.run.release_step() as release:
            self._mechanism.set_gradients(clipped, release)
        self.update()


@contextmanager
def _unsynced(model: nn.Module) -> Iterator[None]:
    """Let backward inside add to this process's gradients only."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
