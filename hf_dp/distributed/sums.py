"""One noisy sum from the sums of several processes.

Each process holds a clipped sum over its own examples. Their total gets its noise once, element by
element: the totals are scattered over the processes, the one that owns an element draws its noise,
and the noisy elements are gathered. No process holds another's sum, nor a total without noise that
it does not own; and all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hf_dp.distributed.processes import Processes, others_present

# Numbers that travel together: large enough for the bandwidth of a network, and small beside the
# sums of a model. Between processes on CPUs a quarter, which stays in a cache: gloo then takes half
# the time.
BUCKET = 2**23

# Newer versions of torch warn of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Noise = Callable[[Tensor], Tensor]  # of the shape, type and device of its argument


@torch.no_grad()
def add_up_with_noise(sums: Sequence[Tensor], noise: Noise, processes: Processes) -> None:
    """Replace this process's sums, in place, by those of all processes with noise.

    Args:
        sums: in the same order everywhere. A sharded one (DTensor) was added up before, and is
            noised where it lies; any other one is this process's own.
        noise: draws independent noise, once for each element of the total.
    """
    for total in sums:
        if isinstance(total, DTensor):
            _add_to_shard(total, noise)
    own = [total for total in sums if not isinstance(total, DTensor)]
    for bucket in _buckets(own):
        if processes.alone:
            _add_noise(bucket, noise)
        else:
            _scatter_noise_gather(bucket, noise, processes)


def reduce_scatter(owned: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``owned`` with this process's part of the sum of all processes' ``flat``.

    What travels is of flat's type and is added in that of ``owned``: a reduction of float32 numbers
    would round each sum as its partners make it. (With gloo this also takes half the time.)

    Args: flat: one-dimensional, as many parts as processes. group: of processes; None for all.
    """
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    torch.sum(received.view(-1, len(owned)), 0, dtype=owned.dtype, out=owned)


def _buckets(sums: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list into lists of one type and device, of at most a bucket's numbers each; larger
    tensors into views of parts."""
    bucket: list[Tensor] = []
    size = 0
    for part in (part for total in sums for part in _parts(total)):
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (part.dtype, part.device)
        if bucket and (not alike or size + part.numel() > bucket_numbers(part)):
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.numel()
    if bucket:
        yield bucket


def _parts(total: Tensor) -> Sequence[Tensor]:
    if total.numel() > bucket_numbers(total) and total.is_contiguous():
        return total.view(-1).split(bucket_numbers(total))
    return [total]


def bucket_numbers(tensor: Tensor) -> int:
    """Return how many numbers travel together at most, where this tensor is."""
    return max(1, BUCKET // 4) if tensor.device.type == "cpu" else BUCKET


def _add_noise(bucket: list[Tensor], noise: Noise) -> None:
    """Draw the noise of a bucket at once: a GPU starts two kernels and not two for each tensor."""
    if len(bucket) == 1:
        bucket[0].add_(noise(bucket[0]))
        return
    sizes = [total.numel() for total in bucket]
    drawn = noise(bucket[0].new_empty(sum(sizes))).split(sizes)
    parts = [part.view(total.shape) for part, total in zip(drawn, bucket, strict=True)]
    torch._foreach_add_(bucket, parts)


def _scatter_noise_gather(bucket: list[Tensor], noise: Noise, processes: Processes) -> None:
    sizes = [total.numel() for total in bucket]
    padding = -sum(sizes) % processes.count
    flat = torch.cat([*(total.reshape(-1) for total in bucket), bucket[0].new_zeros(padding)])
    owned = flat.new_empty(len(flat) // processes.count)
    with others_present():
        reduce_scatter(owned, flat)
        owned.add_(noise(owned))
        _all_gather(flat, owned)
    for total, part in zip(bucket, flat.split([*sizes, padding]), strict=False):
        total.copy_(part.view(total.shape))


def _add_to_shard(total: DTensor, noise: Noise) -> None:
    """Noise this process's shard; where several processes hold a copy of it, one of them draws."""
    local, mesh = total.to_local(), total.device_mesh
    drawn = noise(local)
    for dimension, placement in enumerate(total.placements):
        if isinstance(placement, Replicate) and mesh.size(dimension) > 1:
            group = mesh.get_group(dimension)
            with others_present():
                dist.broadcast(drawn, src=dist.get_global_rank(group, 0), group=group)
    local.add_(drawn)
