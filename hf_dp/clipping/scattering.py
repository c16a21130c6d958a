"""Sums from all processes to the processes that keep shards of them.

FSDP2's own function for gradients is not public, and DTensor's handles one tensor at a time, which
it copies whole first. Here the sums of several parameters travel together, in pieces of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hf_dp.distributed.sums import bucket_numbers, reduce_scatter


def scattered(parameters: Sequence[DTensor], totals: Sequence[Tensor]) -> list[DTensor]:
    """Return the sums of all processes' totals in float64, each placed as its parameter.

    Args:
        parameters: sharded by FSDP2 over one mesh, whose last dimension shards.
        totals: of this process, of the parameters' full shapes; one dtype and device.
    """
    mesh = parameters[0].device_mesh
    count = mesh.size(mesh.ndim - 1)
    rows = [_by_owner(total, _dimension(p), count) for p, total in zip(parameters, totals)]
    lengths = [row.shape[1] for row in rows]
    own = totals[0].new_empty(sum(lengths), dtype=torch.float64)
    step = max(1, bucket_numbers(own) // count)
    for start in range(0, len(own), step):
        part = own[start : start + step]
        reduce_scatter(part, _columns(rows, start, len(part)), group=mesh.get_group(mesh.ndim - 1))
    for dimension in range(mesh.ndim - 1):  # replicas exchange shards and not the whole
        dist.all_reduce(own, group=mesh.get_group(dimension))
    return [_placed(part, p) for part, p in zip(own.split(lengths), parameters, strict=True)]


def _dimension(parameter: DTensor) -> int:
    (shard,) = (each for each in parameter.placements if isinstance(each, Shard))
    return shard.dim


def _by_owner(total: Tensor, dimension: int, count: int) -> Tensor:
    """Return a row for each of ``count`` shards, those at the end filled up with zeros."""
    slices = total.movedim(dimension, 0)
    each = -(-len(slices) // count)
    if len(slices) < count * each:
        padding = slices.new_zeros(count * each - len(slices), *slices.shape[1:])
        slices = torch.cat([slices, padding])
    return slices.reshape(count, -1)


def _columns(rows: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Return ``length`` columns of all rows side by side, from ``start`` on, as one flat tensor."""
    parts = []
    for row in rows:
        part = row[:, max(0, start) : max(0, start + length)]
        if part.shape[1]:
            parts.append(part)
        start -= row.shape[1]
    return torch.cat(parts, 1).view(-1)


def _placed(flat: Tensor, parameter: DTensor) -> DTensor:
    """Return this process's shard, without what it was filled up with, as a DTensor."""
    dimension = _dimension(parameter)
    shape = parameter.to_local().movedim(dimension, 0).shape
    local = flat[: shape.numel()].view(shape).movedim(0, dimension).contiguous()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
