"""What is compared: one training step's forward and backward, without noise or optimizer, in each
way to clip.

A step takes one logical batch as a list of physical ones and ends with what an optimizer would
need: the mean gradient in ``.grad`` (non-private) or the clipped sums (private). It keeps that
result until the next step starts, as training does, so that all modes hold the same at their peak.
Noise and update cost the same in all modes and are left out of all.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_dp import _validate
from hf_dp.benchmarks.workload import Batch, Workload, build_model, forward_precision
from hf_dp.clipping.engine import STRATEGIES, ClippingEngine
from hf_dp.errors import (
    HfDpError,
    UnaccountedGradientError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms.dp_fp.representation import PrivateRepresentation, find_last_layer
from hf_dp.noise import SecretRandomness
from hf_dp.tuners.frost.magnitude import MagnitudeEngine
from hf_dp.tuners.frost.partition import partitions

NON_PRIVATE = "non_private"
SELECTION = "frost_selection"
FORWARD = "dp_fp"
OPACUS = ("opacus_hooks", "opacus_ghost")
CLIPPING_NORM = 0.1  # the library's default; its value changes no operation


class Refused(HfDpError):
    """A mode cannot do this workload; the message is the row's reason."""


class Mode(ABC):
    """One way to form a gradient.

    Attributes: note: what the reader must know beside the numbers, or "".
    """

    note = ""

    def __init__(self, model: nn.Module, workload: Workload):
        self.model = model
        self.workload = workload

    @abstractmethod
    def step(self, batches: Sequence[Batch]) -> None:
        """Forward and backward of one logical batch; the result stays until the next step or
        :meth:`reset`."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the result, so that another mode can use the model; not part of what is timed."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """The result of the last step by parameter name: mean gradients, or sums of clipped
        ones."""

    def losses(self, batch: Batch) -> Tensor:
        """One loss per example, (b,)."""
        with forward_precision(self.workload):
            return per_example_loss(self.model, batch)


class NonPrivate(Mode):
    """Ordinary training: mean loss, gradients in ``.grad``, which starts at None."""

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        for batch in batches:
            (self.losses(batch).mean() / len(batches)).backward()

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


class Clipped(Mode):
    """Our engine, entered and collected once a step, as :class:`hf_dp.DPTrainer` does."""

    def __init__(self, model: nn.Module, workload: Workload, strategy: str):
        super().__init__(model, workload)
        self.strategy = strategy
        self._sums: dict[str, Tensor] = {}

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        with ClippingEngine(self.model, CLIPPING_NORM, strategy=self.strategy) as engine:
            for batch in batches:
                engine.backward(self.losses(batch))
            self._sums = engine.collect()

    def reset(self) -> None:
        self._sums = {}

    def gradients(self) -> dict[str, Tensor]:
        return self._sums


class Selecting(Mode):
    """What DP-FROST's selection does with a draw: magnitudes of partitions (mgna, order 1), of the
    model's trainable ones."""

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        self._partitions = partitions(model)

    def step(self, batches: Sequence[Batch]) -> None:
        with MagnitudeEngine(self.model, self._partitions, CLIPPING_NORM) as engine:
            for batch in batches:
                engine.backward(self.losses(batch))
            engine.magnitudes()

    def reset(self) -> None:
        pass

    def gradients(self) -> dict[str, Tensor]:
        return {}


class ForwardNoised(NonPrivate):
    """DP-FP as published: ordinary training with the representation clipped and noised."""

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        self._representation: PrivateRepresentation | None = None
        self._randomness = SecretRandomness()

    def _noised(self, vectors: Tensor) -> Tensor:
        """Return vectors with noise drawn as a run draws it. Nothing is released: rows are made
        up."""
        return vectors + self._randomness.gaussian_like(vectors, 1.0)

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        if self._representation is None:  # before the first round, which warms up
            _, layer = find_last_layer(self.model, batches[0])
            self._representation = PrivateRepresentation(layer, 1.0)
        for batch in batches:
            with self._representation.noising(self._noised):
                (self.losses(batch).mean() / len(batches)).backward()


def mode_names() -> tuple[str, ...]:
    """Every mode, also those whose package is not installed."""
    return (NON_PRIVATE, *STRATEGIES, SELECTION, FORWARD, *OPACUS)


def installed_modes() -> tuple[str, ...]:
    """The modes that can be tried here."""
    has_opacus = importlib.util.find_spec("opacus") is not None
    return tuple(name for name in mode_names() if has_opacus or name not in OPACUS)


def check_modes(names: Sequence[str]) -> tuple[str, ...]:
    """The modes to run, without repeats, with non_private (which every ratio needs) first.

    Raises: InvalidArgumentError for an unknown name, or for an Opacus mode where Opacus is not
        installed.
    """
    for name in names:
        _validate.one_of("modes", name, mode_names())
        if name not in installed_modes():
            raise _validate.invalid(
                "modes",
                name,
                "to be installed",
                "Run `pip install hf-dp[bench]`, or leave this mode out.",
            )
    return tuple(dict.fromkeys([NON_PRIVATE, *names]))


def build_mode(name: str, workload: Workload, shared: nn.Module | None = None) -> Mode:
    """One mode, ready to step.

    Args: shared: a model to use where the mode leaves it as it was; Opacus changes its model and
        gets one of its own.
    Raises: Refused.
    """
    with refusals(name):
        if name in OPACUS:
            from hf_dp.benchmarks.opacus_modes import OpacusMode

            return OpacusMode(workload, name)
        model = build_model(workload) if shared is None else shared
        if name == SELECTION:
            return Selecting(model, workload)
        if name == FORWARD:
            return ForwardNoised(model, workload)
        return (
            NonPrivate(model, workload) if name == NON_PRIVATE else Clipped(model, workload, name)
        )


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn what a mode cannot do into :class:`Refused`; a bug of our own stays the error it is.

    Opacus fails on what it cannot do with errors of any class (a missing ``_norm_sample``
    attribute, say), so any error in its modes counts. Running out of memory counts in every mode.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        ours = (UnsupportedModelError, UnsupportedLossError, UnaccountedGradientError)
        if is_out_of_memory(error):
            raise Refused("out of memory") from error
        if name in OPACUS or isinstance(error, ours):
            lines = str(error).strip().splitlines() or [""]
            raise Refused(f"{type(error).__name__}: {lines[0]}") from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "can't allocate memory",
        "out of memory",
        "ALLOC_FAILED",
    )  # torch on the CPU, CUDA, cuBLAS and cuDNN
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
