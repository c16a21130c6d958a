"""Show what is left between a measurement and its bound: time by operator, beside non-private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.profiler import ProfilerActivity, profile

from hf_dp.benchmarks.mode import BenchmarkMode
from hf_dp.benchmarks.workload import Batch

TOP = 12


def operator_seconds(
    mode: BenchmarkMode, batches: Sequence[Batch], steps: int = 2
) -> dict[str, float]:
    """Return the self time of every operator in one step: seconds on the CPU, or of its kernels."""
    on_cuda = mode.workload.on_cuda
    mode.step(batches)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    ) as profiler:
        for _ in range(steps):
            mode.step(batches)
    mode.reset()
    events = profiler.key_averages()
    micro = {e.key: e.self_device_time_total if on_cuda else e.self_cpu_time_total for e in events}
    return {name: value / steps / 1e6 for name, value in micro.items()}


def left_over(
    mode: Mapping[str, float], non_private: Mapping[str, float], top: int = TOP
) -> list[tuple[str, float, float]]:
    """Return (operator, seconds more than non-private, seconds in this mode) of one step.

    The ``top`` largest differences are returned, in falling order.
    """
    more = {name: seconds - non_private.get(name, 0.0) for name, seconds in mode.items()}
    more |= {name: -seconds for name, seconds in non_private.items() if name not in mode}
    names = sorted(more, key=lambda name: abs(more[name]), reverse=True)[:top]
    return [
        (name, more[name], mode.get(name, 0.0))
        for name in sorted(names, key=lambda name: -more[name])
    ]
