"""The modes that are compared: forward and backward of one physical batch, in each way to clip.

A step ends with what an optimizer would need: the mean gradient in ``.grad`` (non-private) or the
clipped sums (private), which are kept until the next step starts, as in training, so that all modes
hold the same at their peak. Noise and update cost the same in all modes and are left out of all.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hf_dp import _validate, errors
from hf_dp.benchmarks.workload import Batch, Workload, build_model
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.losses import base_model, per_example_loss
from hf_dp.mechanisms.last_layer import find_last_layer, noising
from hf_dp.noise import SecretRandomness
from hf_dp.plans.dp_sgd import STRATEGIES
from hf_dp.run.shortage import is_out_of_memory

CLIPPING_NORM = 0.1  # the library's default; its value changes no operation
NON_PRIVATE, FORWARD = "non_private", "dp_fp"
OPACUS = ("opacus_hooks", "opacus_ghost")
MODES = (NON_PRIVATE, *STRATEGIES, FORWARD, *OPACUS)
# What --json prints: of a mode, and of a whole measurement.
Row = dict[str, Any]
Report = dict[str, Any]


class Refused(errors.HfDpError):
    """A mode cannot run this workload; the message is the reason, for its row."""


class NonPrivate:
    """Ordinary training: a mean loss, and gradients in ``.grad``, which starts at None."""

    note = ""  # what the reader must know beside the numbers

    def __init__(self, model: nn.Module, workload: Workload):
        self.model = model
        self.workload = workload

    def step(self, batch: Batch) -> None:
        """Run forward and backward; the result stays until the next step or :meth:`reset`."""
        self.reset()
        self.losses(batch).mean().backward()

    def reset(self) -> None:
        """Drop the result, so that another mode can use the model; this is not timed."""
        self.model.zero_grad(set_to_none=True)

    def losses(self, batch: Batch, chunked: bool = False) -> Tensor:
        """Return one loss per example, (b,)."""
        bf16 = self.workload.bf16
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=bf16):
            return per_example_loss(self.model, batch, chunked)


class Clipped(NonPrivate):
    """Our engine, entered and collected once a step, as in :class:`hf_dp.DPTrainer`."""

    def __init__(self, model: nn.Module, workload: Workload, strategy: str):
        super().__init__(model, workload)
        self.strategy = strategy
        self.sums: dict[str, Tensor] = {}

    def step(self, batch: Batch) -> None:
        self.reset()
        with ClippingEngine(self.model, CLIPPING_NORM, strategy=self.strategy) as engine:
            engine.backward(self.losses(batch, self.workload.chunked_loss))
            self.sums = engine.collect()

    def reset(self) -> None:
        self.sums = {}


class ForwardNoised(NonPrivate):
    """DP-FP as published: ordinary training with the representation clipped and noised. Nothing is
    released: rows are made up."""

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        self._layer: nn.Module | None = None
        self._randomness = SecretRandomness()

    def step(self, batch: Batch) -> None:
        if self._layer is None:  # before the first round, which warms up
            _, self._layer = find_last_layer(self.model, batch)
        gaussian = self._randomness.gaussian_like
        with noising(self._layer, 1.0, lambda vectors: vectors + gaussian(vectors, 1.0)):
            super().step(batch)


class OpacusMode(NonPrivate):
    """Opacus (>= 1.6), by per-example gradients or by fast gradient clipping (``opacus_ghost``), as
    its maintainers advise: with ``wrap_model=False`` and position ids given in full.

    It refuses a trainable tied weight in ghost mode, so there the head gets a weight of its own,
    and the row says so. The optimizer is told to skip noise and update, as in the other modes.
    """

    def __init__(self, workload: Workload, name: str):
        from opacus import PrivacyEngine

        self.ghost = name == "opacus_ghost"
        untie = self.ghost and workload.shape.tied
        self.note = "untied head (Opacus ghost refuses tied weights)" if untie else ""
        super().__init__(build_model(workload, tied=not untie), workload)
        # Opacus takes its sample rate from a loader; nothing here reads either.
        loader = DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=1)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = PrivacyEngine(accountant="rdp").make_private(
                module=self.model,
                optimizer=torch.optim.SGD(trained, lr=0.0),
                data_loader=loader,
                criterion=nn.CrossEntropyLoss(),
                noise_multiplier=0.0,
                max_grad_norm=CLIPPING_NORM,
                grad_sample_mode="ghost" if self.ghost else "hooks",
                poisson_sampling=False,
                wrap_model=False,
            )
        self.hooks, self.optimizer = made[:2]

    def step(self, batch: Batch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.reset()
            losses = self.losses(_explicit(self.model, batch))
            if self.ghost:
                from opacus.utils import fast_gradient_clipping_utils as ghost

                ghost.DPTensorFastGradientClipping(self.hooks, self.optimizer, losses).backward()
            else:
                losses.mean().backward()
            self.optimizer.signal_skip_step(True)
            self.optimizer.step()

    def reset(self) -> None:
        for p in self.optimizer.params:
            p.grad = p.grad_sample = p.summed_grad = None


def _explicit(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with contiguous (b, T) position and type ids: Opacus cannot split a lookup
    that examples share. RoBERTa makes its position ids from each example's tokens."""
    base: Any = base_model(model)
    accepted = inspect.signature(type(base).forward).parameters
    b, length = batch["input_ids"].shape
    extra = {}
    if "position_ids" in accepted and base.config.model_type != "roberta":
        extra["position_ids"] = torch.arange(length, device=batch["input_ids"].device).repeat(b, 1)
    if "token_type_ids" in accepted and hasattr(base.config, "type_vocab_size"):
        extra["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return {**batch, **extra}


def check_modes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modes to run, without repeats, with non_private first, which every ratio needs."""
    has_opacus = importlib.util.find_spec("opacus") is not None
    for name in names:
        if _validate.one_of("modes", name, MODES) in OPACUS and not has_opacus:
            advice = "Run `pip install hf-dp[bench]`, or leave this mode out."
            raise _validate.invalid("modes", name, "to be installed", advice)
    return tuple(dict.fromkeys([NON_PRIVATE, *names]))


def build_mode(name: str, workload: Workload, shared: nn.Module | None = None) -> NonPrivate:
    """Return one mode, ready to step, with the shared model; Opacus, which changes its model, gets
    its own."""
    with refusals(name):
        if name in OPACUS:
            return OpacusMode(workload, name)
        model = build_model(workload) if shared is None else shared
        if name in STRATEGIES:
            return Clipped(model, workload, name)
        return (ForwardNoised if name == FORWARD else NonPrivate)(model, workload)


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn what a mode cannot do into :class:`Refused`: known inabilities of ours, want of memory,
    and any error of Opacus, whose refusals are of any class."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        ours = (
            errors.UnsupportedModelError,
            errors.UnsupportedLossError,
            errors.UnaccountedGradientError,
        )
        if is_out_of_memory(error):
            raise Refused("out of memory") from error
        if name in OPACUS or isinstance(error, ours):
            lines = str(error).strip().splitlines() or [""]
            raise Refused(f"{type(error).__name__}: {lines[0]}") from error
        raise


def refuse_without_yardstick(workload: Workload, row: Row) -> None:
    """Raise HfDpError for work that non-private training, whose row it is, cannot do."""
    if "refused" in row:
        raise errors.HfDpError(
            f"Non-private training of `model` {workload.model!r} at `per_device_train_batch_size` "
            f"{workload.per_device_train_batch_size} cannot run: {row['refused']}. Choose smaller "
            "ones, or a smaller `max_length`."
        )


def seconds_of_step(mode: NonPrivate, batch: Batch) -> float:
    """Return the wall-clock seconds of one step; leave the model without gradients."""
    gc.collect()  # what another mode left is not collected in this one's time
    # CUDA kernels run after the call that started them has returned.
    wait = torch.cuda.synchronize if mode.workload.device == "cuda" else torch.cpu.synchronize
    wait()
    start = time.perf_counter()
    mode.step(batch)
    wait()
    seconds = time.perf_counter() - start
    mode.reset()
    return seconds
