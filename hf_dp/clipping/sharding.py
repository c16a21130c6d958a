"""Models whose parameters are spread over processes by FSDP2, torch's ``fully_shard``.

Outside its module's forward and backward such a parameter is a DTensor, of which each process holds
a shard. Inside, the module holds another, ordinary parameter with all numbers. So the engine knows
a parameter by its module and its name, and keys everything by the DTensor.

In the self-check all processes check the same synthetic examples. FSDP2's own backward then gives
each process its shard of an example's gradient: the mean over processes, all of which have the
same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from hf_dp.errors import SelfCheckError, UnsupportedModelError


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` derived one from it."""
    found = type(module)
    if isinstance(module, FSDPModule):  # its class is derived from (FSDPModule, the module's own)
        return found.__mro__[found.__mro__.index(FSDPModule) + 1]
    return found


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` manages parameters of this model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def managed_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that ``fully_shard`` was called on, the outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def prepare_shards(model: nn.Module) -> None:
    """Let modules hold their sharded parameters, and autograd's gradients reach their ``.grad``."""
    reshard(model)
    for module in managed_modules(model):
        module.set_requires_gradient_sync(True, recurse=False)


def reshard(model: nn.Module) -> None:
    """Let modules hold their sharded parameters again.

    A forward without a backward leaves the outermost ones whole, with values that the next
    optimizer step does not change.
    """
    for module in managed_modules(model):
        module.reshard()


def passed_on(output: Tensor, module: nn.Module) -> Tensor:
    """Return an output of ``module`` for an autograd function to return as its own.

    A view, but of a module that ``fully_shard`` was called on a copy: FSDP2 warns of views there.
    """
    return output.clone() if isinstance(module, FSDPModule) else output.view_as(output)


def reset_shards(model: nn.Module) -> None:
    """Let a model start again after an error within its forward or backward."""
    inner = {
        each for outer in managed_modules(model) for each in list(_module(outer).modules())[1:]
    }
    for module in managed_modules(model):
        if module not in inner and hasattr(module, "reset_iter_state"):  # torch >= 2.13
            module.reset_iter_state()
    reshard(model)


def refuse_parallelism(model: nn.Module) -> None:
    """Raise for parameters spread over processes in any way but FSDP2's, which it names."""
    managed = {id(p) for outer in managed_modules(model) for p in _module(outer).parameters()}
    seen: set[type] = set()
    meshes: dict[object, str] = {}
    for name, module in model.named_modules():
        if type(module) not in seen:  # once for each class: every step asks
            seen.add(type(module))
            bases = {base.__name__ for base in type(module).__mro__}
            for wrapper, why in _WRAPPERS.items():
                if wrapper in bases:
                    raise _refusal(f"`{name}`" if name else "The model", why)
        for key, parameter in module._parameters.items():
            whole = f"{name}.{key}" if name else key
            if hasattr(parameter, "ds_id"):
                raise _refusal(repr(whole), _WRAPPERS["DeepSpeedEngine"])
            if isinstance(parameter, DTensor):
                _refuse_placement(whole, parameter, managed=id(parameter) in managed)
                meshes.setdefault(parameter.device_mesh, whole)
    if len(meshes) > 1:
        first, second, *_ = meshes.values()
        raise _refusal(
            f"{first!r} and {second!r}",
            "are sharded over different meshes (expert parallelism?), so their processes see "
            "different examples",
        )


_WRAPPERS = {
    "FullyShardedDataParallel": "is wrapped in FullyShardedDataParallel (FSDP1), which joins "
    "parameters of many layers in one flat tensor, so no layer sees its own",
    "DeepSpeedEngine": "belongs to DeepSpeed, whose own backward reduces gradients over processes "
    "before any example's is clipped",
}


def _refusal(what: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} {why}. Use FSDP2 alone, which shards as ZeRO-3 does: "
        "torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in accelerate's configuration, "
        "with one mesh over all processes, or one of two dimensions (replicate, shard)."
    )


def _refuse_placement(name: str, parameter: DTensor, managed: bool) -> None:
    mesh, (*before, last) = parameter.device_mesh, parameter.placements
    # FSDP2 has one dimension that shards, after one that replicates (HSDP). A second one that
    # shards, or a strided shard, is tensor parallelism.
    of_fsdp = type(last) is Shard and all(each.is_replicate() for each in before)
    if not (managed and of_fsdp):
        why = (
            f"is a DTensor placed as {parameter.placements} on a mesh of shape "
            f"{tuple(mesh.shape)}, which is not how fully_shard places data-parallel parameters: "
            "with tensor, sequence, expert or pipeline parallelism a process sees only a part of "
            "each example's gradient, so its norm is not known"
        )
        raise _refusal(repr(name), why)
    if mesh.size() != dist.get_world_size():
        over = f"over {mesh.size()} of {dist.get_world_size()} processes"
        raise _refusal(repr(name), f"is sharded {over}, so no sum over all processes is formed")


def refuse_shards_within(
    module: nn.Module, described: str, own: Collection[str], only_own: bool = False
) -> None:
    """Raise for a module to be run again by example that contains modules sharded by themselves.

    Each run would gather them, for as many examples as this process happens to have. ``own`` names
    the trainable parameters in question; ``only_own`` says that the run reads no others.
    """
    inside = [
        name
        for name, each in module.named_modules()
        if name and isinstance(each, FSDPModule)
        if not only_own or any(parameter.startswith(f"{name}.") for parameter in own)
    ]
    if inside:
        raise UnsupportedModelError(
            f"{described} has no clipping rule, so it is run again example by example, but "
            f"fully_shard was called on modules inside it ({inside[0]!r}), which each run would "
            f"gather again. Freeze its parameters {sorted(own)} (requires_grad_(False)), move them "
            "to a module of their own, or do not shard the modules inside apart from it."
        )


def _module(module: FSDPModule) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module


def averaged_gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradient of one loss by a plain backward, sharded as the parameters are.

    No parameter has or keeps a ``.grad``. Unused parameters get zeros.
    """
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in parameters.items():
        gradient, parameter.grad = parameter.grad, None
        gradients[name] = torch.zeros_like(parameter.detach()) if gradient is None else gradient
    return gradients


def held(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of_all_shards(parts: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums (n,) over the shards of each of n ``tensors`` of ``parts``, (n,), a number
    computed from each shard. What is placed alike travels together."""
    found, alike = parts.clone(), dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]]()
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            alike.setdefault((tensor.device_mesh, tensor.placements), []).append(place)
    for (mesh, placements), places in alike.items():
        partial = [Partial() if each.is_shard() else Replicate() for each in placements]
        one = DTensor.from_local(parts[places], mesh, partial, run_check=False)
        found[places] = one.full_tensor()
    return found


def placed_as(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this process's shard of a tensor that all processes hold."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to(parameter.device)


def of_one_process(total: Tensor) -> Tensor:
    """Return what one process added to a sum, where all added the same."""
    return total / dist.get_world_size() if isinstance(total, DTensor) else total


def computing_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of the parameters that FSDP2 gathers (its MixedPrecisionPolicy)."""
    found = set()
    for module in managed_modules(model):
        module.unshard()
        found |= {p.dtype for p in _module(module).parameters() if not isinstance(p, DTensor)}
        module.reshard()
    return found


def refuse_different_examples(losses: Sequence[float], device: torch.device) -> None:
    """Raise SelfCheckError unless all processes computed the same losses."""
    least = torch.tensor(losses, dtype=torch.float32, device=device)
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if bool((most - least > 1e-3 * most.abs().clamp_min(1.0)).any()):
        raise SelfCheckError(
            f"The model is sharded, but its processes checked different synthetic examples: losses "
            f"between {least.tolist()} and {most.tolist()}. Give self_check the same examples in "
            "every process."
        )
