"""The modes that are compared, forward and backward of one physical batch in each way to clip; and
their speed, in interleaved rounds.

A step ends with what an optimizer would need: the mean gradient in ``.grad`` (non-private) or the
clipped sums (private), which are kept until the next step starts, as in training, so that all modes
hold the same at their peak. Noise and update cost the same in all modes and are left out of all.

A shared machine speeds up and slows down over seconds, by more than the differences that matter.
Modes therefore take turns step by step. A round takes the median of several turns of each mode: a
step that lost its processor to another process does not count, but what a mode does in every step
does. Only times of the same round are divided by each other, and the order rotates.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hf_dp import _validate, errors
from hf_dp.benchmarks.workload import Batch, Workload, build_model, environment, make_batch
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.losses import base_model, per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.plans.dp_sgd import STRATEGIES

CLIPPING_NORM = 0.1  # the library's default; its value changes no operation
NON_PRIVATE, FORWARD = "non_private", "dp_fp"
OPACUS = ("opacus_hooks", "opacus_ghost")
MODES = (NON_PRIVATE, *STRATEGIES, FORWARD, *OPACUS)
# What --json prints: of a mode, and of a whole measurement.
Row = dict[str, Any]
Report = dict[str, Any]
Log = Callable[[str], None]
Timers = Mapping[str, Callable[[], float]]  # by mode, what makes a step and returns its seconds
LARGEST_IQR = 0.04  # a run with a wider spread of its ratios does not count
_WARMUPS = 2  # untimed steps of every mode
_SECONDS_OF_ROUND = 8.0  # of one mode, so that a machine's speed averages out


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
    """DP-FP as published: ordinary training with the representation clipped and noised."""

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        self._layer: nn.Module | None = None
        self._randomness = SecretRandomness()

    def step(self, batch: Batch) -> None:
        # Only here, so that other modes need no more than torch and transformers.
        from hf_dp.mechanisms.last_layer import find_last_layer, noising

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
    """Return one mode with the shared model; Opacus, which changes its model, gets its own."""
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
        if errors.is_out_of_memory(error):
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


# -- speed ---


def measure_throughput(
    workload: Workload,
    names: Sequence[str],
    rounds: int = 7,
    repeats: int | None = None,
    log: Log = lambda line: None,
) -> Report:
    """Time modes of :data:`MODES`, and non_private in any case; return what
    ``--json`` prints.

    Modes that leave the model as it was share one, so that no difference is due to memory layout.

    Args: rounds: at least 3, the fewest that have a spread. repeats: steps of every mode in a
        round; None for what takes 8 seconds.
    """
    _validate.integer("rounds", rounds, 3)
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, Row] = {}
    torch.set_num_threads(workload.threads or 1)
    shared = build_model(workload)
    batch = make_batch(workload, shared)
    for name in check_modes(names):
        log(f"warming up {name}")
        try:
            mode = build_mode(name, workload, shared)
            with refusals(name):
                mode.step(batch)
            mode.reset()
            timers[name] = partial(seconds_of_step, mode, batch)
            rows[name] = {"note": mode.note}
        except Refused as refused:
            shared.zero_grad(set_to_none=True)
            rows[name] = {"refused": str(refused)}
    refuse_without_yardstick(workload, rows[NON_PRIVATE])
    if repeats is None:
        repeats = math.ceil(_SECONDS_OF_ROUND / timers[NON_PRIVATE]())
    _validate.integer("repeats", repeats, 1)
    interleave(timers, _WARMUPS)
    log(f"rounds of {repeats} steps")
    found = interleave(timers, rounds, log, repeats)
    for name in timers:
        seconds = statistics.median(each[name] for each in found)
        ratio, iqr = spread(found, name, NON_PRIVATE)
        rows[name] |= {
            "examples_per_second": workload.per_device_train_batch_size / seconds,
            "ratio": ratio,
            "interquartile_range": iqr,
            "verdict": "counts" if iqr < LARGEST_IQR else "repeat",
        }
    return {
        "benchmark": "throughput",
        "environment": environment(workload),
        "workload": {**vars(workload)},
        "protocol": {"rounds": rounds, "repeats": repeats},
        "modes": rows,
        "rounds": found,
    }


def interleave(
    timers: Timers, rounds: int, log: Log = lambda line: None, repeats: int = 1
) -> list[dict[str, float]]:
    """Return each round's median seconds of every timer over turns that begin with the next one."""
    names = list(timers)
    results = []
    for r in range(rounds):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(r * repeats, (r + 1) * repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(timers[name]())
        results.append({name: statistics.median(each) for name, each in seconds.items()})
        log(f"round {r + 1} of {rounds}")
    return results


def spread(rounds: Sequence[Mapping[str, float]], mode: str, baseline: str) -> tuple[float, float]:
    """Return median and interquartile range of ``time of baseline / time of mode`` in a round."""
    values = [each[baseline] / each[mode] for each in rounds]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low
