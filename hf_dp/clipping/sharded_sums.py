"""Running sums over all processes of parameters that FSDP2 shards, each process keeping its shard.

A weighted sum is formed from this process's examples at full size. It is added to those of other
processes, and to the running sum, in float64 (:func:`hf_dp.clipping.rounding.zero_sum`). Two kinds
of parameters differ in when it is reduced over the processes:

* *scattered*: after every physical batch, one at a time, so that a process holds one sum of full
  size;
* *whole*: once, in :meth:`ShardedSums.collect`, all in one flat tensor. These are the smallest
  parameters, as many as together are negligible beside what a layer needs anyway.

Every process must take part in every reduction, in the same order. Which parameters a physical
batch used may depend on its data (experts), so the processes first agree on that.

FSDP2's own function for gradients is not public, and DTensor's copies a tensor whole first. Here it
travels in pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from hf_dp.clipping.rounding import accumulation_dtype, zero_sum
from hf_dp.clipping.sharding import placed_as
from hf_dp.distributed.processes import bucket_numbers, reduce_scatter


def scattered(parameter: DTensor, total: Tensor) -> DTensor:
    """Return the sum of all processes' totals in float64, placed as the parameter.

    Args:
        parameter: sharded by FSDP2 over a mesh, whose last dimension shards.
        total: of this process, of the parameter's full shape.
    """
    mesh = parameter.device_mesh
    (shard,) = (each for each in parameter.placements if isinstance(each, Shard))
    count = mesh.size(mesh.ndim - 1)
    rows = _by_owner(total, shard.dim, count)
    own = total.new_empty(rows.shape[1], dtype=torch.float64)
    step = max(1, bucket_numbers(own) // count)
    for part, columns in zip(own.split(step), rows.split(step, 1), strict=True):
        flat = columns.contiguous().view(-1)
        reduce_scatter(part, flat, group=mesh.get_group(mesh.ndim - 1))
    for dimension in range(mesh.ndim - 1):  # replicas exchange shards and not the whole
        dist.all_reduce(own, group=mesh.get_group(dimension))
    # Without what the shard was filled up with:
    shape = parameter.to_local().movedim(shard.dim, 0).shape
    local = own[: shape.numel()].view(shape).movedim(0, shard.dim).contiguous()
    return DTensor.from_local(
        local,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _by_owner(total: Tensor, dimension: int, count: int) -> Tensor:
    """Return a row for each of ``count`` shards, those at the end filled up with zeros."""
    slices = total.movedim(dimension, 0)
    each = -(-len(slices) // count)
    if len(slices) < count * each:
        padding = slices.new_zeros(count * each - len(slices), *slices.shape[1:])
        slices = torch.cat([slices, padding])
    return slices.reshape(count, -1)


# Numbers that the sums of whole parameters may hold on a process, together: 128 MiB in float32.
_WHOLE = 2**25


class ShardedSums:
    """The sums of sharded parameters; sums of the others and of whole ones are kept elsewhere."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._scattered = reduced_each_batch(self._sharded)
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._device: torch.device | None = None  # that of the examples; None before any
        self._due: dict[nn.Parameter, None] = {}
        self._held: dict[nn.Parameter, Tensor] = {}
        self._alike = False

    def __contains__(self, parameter: object) -> bool:
        """Return whether sums of this parameter are reduced after every physical batch."""
        return parameter in self._scattered

    def expect(self, used: Collection[nn.Parameter], device: torch.device) -> list[nn.Parameter]:
        """Agree which scattered parameters any process adds to now; return them, in order."""
        self._device = device
        self._due, self._held, self._alike = {}, {}, True
        if self._scattered:
            here = torch.tensor([p in used for p in self._scattered], device=device)
            either = torch.stack([here, ~here]).int()
            _reduce(either, self._mesh(), dist.ReduceOp.MAX)
            anywhere, not_everywhere = either.bool().tolist()
            self._due = {p: None for p, yes in zip(self._scattered, anywhere, strict=True) if yes}
            pairs = zip(anywhere, not_everywhere, strict=True)
            self._alike = not any(yes and no for yes, no in pairs)
        return list(self._due)

    def add(self, parameter: nn.Parameter, total: Tensor | None) -> None:
        """Reduce this process's weighted sum over the processes, and add the shard it keeps.

        Args:
            total: of the parameter's full shape; None for zeros.
        """
        assert isinstance(parameter, DTensor)
        del self._due[parameter]
        self._held.pop(parameter, None)
        if total is None:
            dtype = accumulation_dtype(parameter.dtype)
            total = torch.zeros(parameter.shape, dtype=dtype, device=self._device)
        reduced = scattered(parameter, total)
        known = self._sums.get(parameter)
        self._sums[parameter] = reduced if known is None else known.add_(reduced)

    def add_during_backward(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Do as :meth:`add`, in a backward pass, between collectives of FSDP2 itself.

        Their order is the same everywhere if all processes use the same parameters. Else the sum
        is held until :meth:`finish`.
        """
        if self._alike:
            self.add(parameter, total)
        else:
            self._held[parameter] = total

    def finish(self) -> None:
        """Add what is due and was not added yet."""
        for parameter in list(self._due):
            self.add(parameter, self._held.get(parameter))

    def collect(self, local: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the sums of all sharded parameters as DTensors placed as they are; reset.

        ``local`` holds this process's sums of whole parameters.
        """
        sums, self._sums = self._sums, {}
        if self._device is not None:  # else no process has run anything
            whole = [p for p in self._sharded if p not in self._scattered]
            sums |= self._reduced(whole, local)
        self._device = None
        return {p: sums[p].to(p.device) if p in sums else _zeros(p) for p in self._sharded}

    def _reduced(
        self, parameters: Sequence[nn.Parameter], local: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Return sums of parameters over all processes, by one reduction."""
        if not parameters:
            return {}
        assert self._device is not None
        flat = zero_sum([sum(p.numel() for p in parameters)], self._device)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter in local:
                part.copy_(local[parameter].flatten())
        _reduce(flat, self._mesh(), dist.ReduceOp.SUM)
        return {
            parameter: placed_as(parameter, part.view(parameter.shape)).clone()
            for parameter, part in zip(parameters, parts, strict=True)
        }

    def _mesh(self) -> DeviceMesh:
        return self._sharded[0].device_mesh  # one for all: refuse_parallelism


def reduced_each_batch(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, None]:
    """Return the *scattered* ones of trainable parameters: all but the smallest, which together
    have a limited number of numbers."""
    parameters = list(parameters)
    ordered = sorted(parameters, key=lambda p: p.numel())
    left = _WHOLE
    small = set()
    for parameter in ordered:
        left -= parameter.numel()
        if left < 0:
            break
        small.add(parameter)
    return {parameter: None for parameter in parameters if parameter not in small}


def _reduce(tensor: Tensor, mesh: DeviceMesh, operation: dist.ReduceOp.RedOpType) -> None:
    """Reduce over all processes of a mesh, in place, one dimension of it after the other."""
    for dimension in range(mesh.ndim):
        dist.all_reduce(tensor, operation, group=mesh.get_group(dimension))


def _zeros(parameter: DTensor) -> Tensor:
    return torch.zeros_like(parameter.detach(), dtype=torch.float64)
