"""The modes that are compared: forward and backward of one training step, in each way to clip.

A step takes one logical batch as a list of physical ones. It ends with what an optimizer would
need: the mean gradient in ``.grad`` (non-private) or the clipped sums (private). The result is kept
until the next step starts, as in training, so that all modes hold the same at their peak. Noise and
update cost the same in all modes and are left out of all.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hf_dp import _validate
from hf_dp.benchmarks.explicit_modes import LeeKifer, Loop, Vmap
from hf_dp.benchmarks.mode import CLIPPING_NORM, BenchmarkMode, Refused
from hf_dp.benchmarks.workload import Batch, Workload, build_model
from hf_dp.clipping.engine import STRATEGIES, ClippingEngine
from hf_dp.errors import (
    UnaccountedGradientError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from hf_dp.mechanisms.dp_fp.representation import PrivateRepresentation, find_last_layer
from hf_dp.noise import SecretRandomness
from hf_dp.run.memory import is_out_of_memory
from hf_dp.tuners.frost.magnitude import MagnitudeEngine
from hf_dp.tuners.frost.partition import partitions

NON_PRIVATE = "non_private"
LOOP, LEE_KIFER, VMAP = "loop", "lee_kifer", "vmap"
SELECTION = "frost_selection"
FORWARD = "dp_fp"
OPACUS = ("opacus_hooks", "opacus_ghost")


class NonPrivate(BenchmarkMode):
    """Ordinary training: a mean loss, and gradients in ``.grad``, which starts at None."""

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        for batch in batches:
            (self.losses(batch).mean() / len(batches)).backward()

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


class Clipped(BenchmarkMode):
    """Our engine, entered and collected once a step, as in :class:`hf_dp.DPTrainer`."""

    def __init__(self, model: nn.Module, workload: Workload, strategy: str):
        super().__init__(model, workload)
        self.strategy = strategy
        self._sums: dict[str, Tensor] = {}
        self._forms: dict[str, str] = {}

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        ratio = self.workload.memory_ratio
        assert ratio is not None
        with ClippingEngine(
            self.model, CLIPPING_NORM, strategy=self.strategy, memory_ratio=ratio
        ) as engine:
            for batch in batches:
                engine.backward(self.losses(batch, self.workload.chunked_loss))
            self._sums, self._forms = engine.collect(), engine.forms

    def reset(self) -> None:
        self._sums = {}

    def gradients(self) -> dict[str, Tensor]:
        return self._sums

    def forms(self) -> Counter[tuple[tuple[int, ...], str]]:
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return Counter((shapes[name], form) for name, form in self._forms.items())


class Selecting(BenchmarkMode):
    """The selection of DP-FROST on one sample: magnitudes (mgna, order 1) of all partitions."""

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


# Beside the engine's strategies.
_OTHERS: dict[str, type[BenchmarkMode]] = {
    LOOP: Loop,
    LEE_KIFER: LeeKifer,
    VMAP: Vmap,
    SELECTION: Selecting,
    FORWARD: ForwardNoised,
}


def mode_names() -> tuple[str, ...]:
    """Return every mode, also those whose package is not installed."""
    return (NON_PRIVATE, *STRATEGIES, *_OTHERS, *OPACUS)


def installed_modes() -> tuple[str, ...]:
    """Return the modes that can be tried here."""
    has_opacus = importlib.util.find_spec("opacus") is not None
    return tuple(name for name in mode_names() if has_opacus or name not in OPACUS)


def check_modes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modes to run, without repeats, with non_private first, which every ratio needs.

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


def build_mode(name: str, workload: Workload, shared: nn.Module | None = None) -> BenchmarkMode:
    """Return one mode, ready to step.

    Args:
        shared: a model to use where the mode leaves it as it was. Opacus changes its model and gets
            one of its own.

    Raises: Refused.
    """
    with refusals(name):
        if name in OPACUS:
            from hf_dp.benchmarks.opacus_modes import OpacusMode

            return OpacusMode(workload, name)
        model = build_model(workload) if shared is None else shared
        if name in STRATEGIES:
            return Clipped(model, workload, name)
        return (
            NonPrivate(model, workload) if name == NON_PRIVATE else _OTHERS[name](model, workload)
        )


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn what a mode cannot do into :class:`Refused`; leave a bug of our own the error it is.

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
