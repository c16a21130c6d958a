"""What the self-check needs of a model that FSDP2 spreads over processes.

All processes check the same synthetic examples. FSDP2's own backward then gives each process its
shard of an example's gradient: the mean over processes, all of which have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from hf_dp.clipping.sharding import managed_modules
from hf_dp.errors import SelfCheckError


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


def of_all_shards(part: Tensor, tensor: Tensor) -> Tensor:
    """Return the sum over the shards of ``tensor`` of ``part``, a number computed from each."""
    if not isinstance(tensor, DTensor):
        return part
    placements = [Partial() if each.is_shard() else Replicate() for each in tensor.placements]
    return DTensor.from_local(part, tensor.device_mesh, placements, run_check=False).full_tensor()


def placed_as(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this process's shard of a tensor that all processes hold."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    everywhere = [Replicate() for _ in range(mesh.ndim)]
    spread = DTensor.from_local(whole, mesh, everywhere, run_check=False)
    return spread.redistribute(placements=parameter.placements).to(parameter.device)


def of_one_process(total: Tensor) -> Tensor:
    """Return what one process added to a sum, where all added the same."""
    return total / dist.get_world_size() if isinstance(total, DTensor) else total


def computing_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of the parameters that FSDP2 gathers (its MixedPrecisionPolicy)."""
    found = set()
    for module in managed_modules(model):
        assert isinstance(module, nn.Module)
        module.unshard()
        found |= {p.dtype for p in module.parameters() if not isinstance(p, DTensor)}
        module.reshard()
    return found


def refuse_different_examples(losses: Sequence[float], device: torch.device) -> None:
    """Raise unless all processes computed the same losses.

    Raises: SelfCheckError.
    """
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
