"""Refusal of modules and settings through which one example changes another's gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hf_dp.clipping.sharding import managed_modules, module_of
from hf_dp.errors import DataError, UnsupportedModelError

Hook = Callable[[nn.Module, tuple[object, ...], dict[str, Any]], None]


def refuse_coupling(model: nn.Module) -> None:
    """Raise for anything known to couple the examples of a batch, or to spread one of them."""
    refuse_parallelism(model)
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if tracks or isinstance(module, _BatchNorm):
            raise UnsupportedModelError(
                f"`{name}` is a {type(module).__name__}: it uses statistics of the whole batch, so "
                "one example's gradient depends on the others. Replace it with nn.GroupNorm or "
                "nn.LayerNorm before creating the trainer."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise UnsupportedModelError(
                        f"`{name}` is a {type(module).__name__} with "
                        f"{option}={getattr(module, option)!r}: it changes weights, reads counts "
                        "that examples share, or makes gradients sparse. Build it without."
                    )
        if _is_a(module, "NllbMoeTop2Router"):
            raise UnsupportedModelError(
                f"`{name}` is a NllbMoeTop2Router: each of its experts takes tokens of the whole "
                "batch until it is full, so one example crowds out another's tokens. Choose a "
                "model without expert capacity."
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = f"`{name}`" if name else "The model"
            raise UnsupportedModelError(
                f"{where} is a {type(module).__name__}, which saves a state of its own "
                "(get_extra_state), and hf_dp cannot see whether it is computed from examples. "
                "Replace the module, or keep what it holds in buffers."
            )
        # LLM.int8 multiplies features that are large in *any* example of the batch in 16 bits.
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if _is_a(module, "Linear8bitLt") and threshold > 0:
            raise UnsupportedModelError(
                f"`{name}` is a Linear8bitLt with threshold {threshold}: which features are in 8 "
                "bits depends on the largest activation of all examples. Load the model with "
                "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
            )
    # Those of its modules, too: a model of one's own around a backbone may have none itself.
    configs = {id(c): c for each in model.modules() if (c := getattr(each, "config", None))}
    for config in configs.values():
        parts = getattr(config, "sub_configs", None) or {}
        for one in (config, *(getattr(config, name, None) for name in parts)):
            _refuse_config(one)


class Buffers:
    """Gives the buffers of a model back the values that they had before a forward.

    The self-check refuses a forward that changes one. But a forward may do so for some examples
    alone (a maximum that is rarely exceeded), and what it stores would be saved without noise, and
    would move the gradients of later examples. A change is seen by the buffer's version, without
    waiting for a device; writes by ``.data`` are not seen. What a caller changes between a backward
    and the next forward of the whole model stays. Copies are kept from step to step, and made again
    only of what changed.
    """

    _of: ClassVar[WeakKeyDictionary[nn.Module, Buffers]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._owned: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Buffers:
        """Return those of a model, as they are now."""
        found = cls._of.setdefault(model, cls())
        found.keep(model)
        return found

    def keep(self, model: nn.Module) -> None:
        """Take what is there now as what is to be given back."""
        self._owned = [(each._buffers, dict(each._buffers)) for each in model.modules()]
        trained = {_memory(p) for p in model.parameters() if p.requires_grad}
        before, self._kept = self._kept, {}
        for each in (b for _, own in self._owned for b in own.values() if b is not None):
            known = before.get(id(each))
            if known is not None and known[0] is each and known[2] == _version(each):
                self._kept[id(each)] = known
            elif id(each) not in self._kept and _memory(each) not in trained:
                self._kept[id(each)] = (each, each.detach().clone(), _version(each))

    def restore(self, graph: bool = False) -> None:
        """Undo what changed since. Args: graph: whether a graph may still need what is there, so
        that copies are put in its place."""
        changed = [key for key, (b, _, then) in self._kept.items() if _version(b) != then]
        copies: dict[int, Tensor] = {}
        for key in changed:
            buffer, value, _ = self._kept[key]
            if graph or not _can_be_written(buffer):
                copies[key] = value.clone()  # the next forward may write into it
            else:
                with torch.no_grad():
                    buffer.copy_(value)
                self._kept[key] = (buffer, value, _version(buffer))
        for now, own in self._owned:
            given_back = {name: copies.get(id(b), b) for name, b in own.items()}
            if now.keys() != own.keys() or any(now[name] is not given_back[name] for name in own):
                now.clear()
                now.update(given_back)


def _can_be_written(buffer: Tensor) -> bool:
    """Return whether each number of a tensor has a place of its own."""
    dense = buffer.layout is torch.strided and not buffer.is_inference()
    return dense and 0 not in buffer.stride()


def _version(tensor: Tensor) -> int:
    # (An inference tensor cannot be written to outside of inference mode.)
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> object:
    """Return what tensors that share memory have in common."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse
        return id(tensor)


def batch_check(module: nn.Module) -> Hook | None:
    """Return a hook before a module's forward that raises DataError for a batch whose rows would
    move each other's results, by its columns alone. None for a class that needs no such look."""
    return _refuse_lookup if any(_is_a(module, name) for name in _BY_SEPARATORS) else None


# They look up all separators of a batch and give each row three, in order, so a row with four moves
# its neighbor's question.
_BY_SEPARATORS = ("LongformerForQuestionAnswering", "LongformerForMultipleChoice")


def _refuse_lookup(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
    given: dict[str, Any] = bound.arguments
    if given.get("global_attention_mask") is None and given.get("input_ids") is not None:
        raise DataError(
            f"Without a column `global_attention_mask`, {type(module).__name__} looks up the "
            "separators of all rows at once, so one row can move where its neighbor's question "
            "ends. Give each row a `global_attention_mask` as long as its `input_ids`: 1 for "
            "tokens that attend to all others (the question's, say), 0 for the rest."
        )


def _is_a(module: nn.Module, class_name: str) -> bool:
    """Return whether a module's class or a base of it has this name, without importing it."""
    return any(base.__name__ == class_name for base in type(module).__mro__)


def _refuse_config(config: object) -> None:
    quantization: object = getattr(config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else vars(quantization or object)
    method = settings.get("quant_method")
    method = getattr(method, "value", method)
    # tests/clipping/test_quantized.py runs bitsandbytes.
    if quantization is not None and method != "bitsandbytes":
        raise UnsupportedModelError(
            f"The base model is quantized by {method!r}, which has not been shown to leave an "
            "example's activations independent of the others. Quantize it with bitsandbytes "
            "(load_in_4bit=True, or load_in_8bit=True with llm_int8_threshold=0.0), or load it "
            "dequantized."
        )
    # Both take effect only above some length, which short synthetic examples do not reach.
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UnsupportedModelError(
            "The config sets attention_type='block_sparse': which positions an example attends to "
            "depends on the length its batch is padded to. Set attention_type='original_full'."
        )
    if getattr(config, "model_type", None) == "reformer":
        raise UnsupportedModelError(
            "Reformer sorts positions into chunks together with the padding, so an example's "
            "gradient depends on the longest example of its batch. Choose another architecture."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = all(isinstance(value, dict) for value in rope.values())
    for each in rope.values() if by_layer else [rope]:
        kind = each.get("rope_type", each.get("type"))
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"The model uses {kind} rotary embeddings, whose frequencies depend on the longest "
                "example of the batch. Set a fixed rope type (default, linear, yarn) in the config."
            )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "The config sets output_router_logits=True: the load-balancing loss of a mixture of "
            "experts averages over the batch and couples examples. Set it to False; DPTrainer's "
            "router_balance=0.01 balances experts by noised loads."
        )


def refuse_parallelism(model: nn.Module) -> None:
    """Raise for parameters spread over processes in any way but FSDP2's, which it names."""
    managed = {id(p) for outer in managed_modules(model) for p in module_of(outer).parameters()}
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
