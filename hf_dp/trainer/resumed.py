"""Go on with what a checkpoint trained, or refuse a resume that trains other parameters.

What a checkpoint holds is loaded by name and by place: weights that are missing are passed over,
and the optimizer's state goes to whatever has its place now. A step with the state of another
parameter reads memory that is not its own, or moves weights by the moments of others.

PEFT saves the prompts of an adapter alone, and not the network that makes them (P-tuning, prefix
projection). So checkpoints hold the trained weights of such adapters beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_dp.errors import ConfigError
from hf_dp.tuners.selection import SelectionConfig

_WEIGHTS = "adapter_model.safetensors"
_PROMPTS = "_prompt_weights.safetensors"  # "_": nothing that is published, nor a model's weights
_DEFAULT = "default"  # the adapter that PEFT saves beside all others' folders
_ANEW = "or start a new run in a new output_dir."

# What optimizers keep of each number of a parameter, by their names for it.
_OF_EACH_NUMBER = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer sum square_avg grad_avg acc_delta "
    "prev step_size mu_product_avg variance z state1 state2".split()
)

Shape = tuple[int, ...]


def refuse_other_adapter(model: nn.Module, checkpoint: str | Path, in_shards: bool) -> None:
    """Raise ConfigError where a checkpoint's adapter is not what ``model`` trains.

    Args: in_shards: whether the model is sharded. Its adapter is not whole then, and only what was
        selected is compared.
    """
    adapters = model.peft_config if isinstance(model, PeftModel) else {}
    if not adapters and Path(checkpoint, _WEIGHTS).exists():
        raise ConfigError(
            f"Cannot resume: the checkpoint {Path(checkpoint).name!r} holds an adapter, and "
            f"`peft_config` is None. Set peft_config as adapter_config.json there says, {_ANEW}"
        )
    for name, config in adapters.items():
        folder = Path(checkpoint) if name == _DEFAULT else Path(checkpoint, name)
        if not in_shards and not (folder / _WEIGHTS).exists():
            raise ConfigError(
                f"Cannot resume: the checkpoint {Path(checkpoint).name!r} holds no adapter "
                f"{name!r}, which `peft_config` makes. Leave peft_config unset, {_ANEW}"
            )
        if isinstance(config, SelectionConfig):
            _refuse_other_selection(config, folder)
        if not in_shards:
            _refuse_other_weights(model, name, folder)


def _refuse_other_selection(now: SelectionConfig, folder: Path) -> None:
    """Raise ConfigError where ``selection.json`` lists other parameters than were chosen now."""
    then = type(now).from_pretrained(str(folder))
    if set(then.parameters or ()) == set(now.parameters or ()):
        return
    old, new = then.options(), now.options()
    changed = [name for name in new if old.get(name) != new[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"Cannot resume: `{name}` of peft_config is {new[name]!r}, but {old.get(name)!r} in "
            f"{folder.name!r}, and other parameters were chosen by it. Set {name}="
            f"{old.get(name)!r} in peft_config, {_ANEW}"
        )
    raise ConfigError(
        f"Cannot resume: `parameters` of peft_config are {len(now.parameters or ())} others than "
        f"the {len(then.parameters or ())} that selection.json in {folder.name!r} lists. Use the "
        f"model that the run was started with, {_ANEW}"
    )


def _refuse_other_weights(model: Any, name: str, folder: Path) -> None:
    """Raise ConfigError for an adapter of other names or shapes than the one in a folder."""
    # As it would be saved, so that the names are those of the file.
    kept = get_peft_model_state_dict(model, adapter_name=name)
    _refuse_other_shapes(_shapes(kept), dict(_shapes_in(folder / _WEIGHTS)), folder)


def _refuse_other_shapes(now: dict[str, Shape], then: dict[str, Shape], folder: Path) -> None:
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise ConfigError(
                f"Cannot resume: `peft_config` makes {_shown(now.get(key))} of {key!r}, but the "
                f"checkpoint {folder.name!r} holds {_shown(then.get(key))}. Set peft_config as "
                f"adapter_config.json there says, {_ANEW}"
            )


def _shapes(weights: dict[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _shapes_in(path: Path) -> Iterator[tuple[str, Shape]]:
    with safe_open(path, framework="pt") as stored:
        for key in stored.keys():  # noqa: SIM118 (it is no mapping)
            yield key, tuple(stored.get_slice(key).get_shape())


def _shown(shape: Shape | None) -> str:
    return "nothing" if shape is None else f"a weight of shape {shape}"


def save_prompts(model: Any, checkpoint: str | Path) -> None:
    """Write into a checkpoint all that trains of an adapter that consists of prompts."""
    if _is_of_prompts(model):
        save_file(
            {name: p.detach().cpu().contiguous() for name, p in _trained(model).items()},
            Path(checkpoint, _PROMPTS),
        )


@torch.no_grad()
def load_prompts(model: Any, checkpoint: str | Path) -> bool:
    """Load what :func:`save_prompts` wrote. Return whether the model's adapter is one of prompts.

    Raises: ConfigError for a checkpoint without it.
    """
    if not _is_of_prompts(model):
        return False
    path = Path(checkpoint, _PROMPTS)
    if not path.exists():
        raise ConfigError(
            f"Cannot resume: the checkpoint {path.parent.name!r} has no {path.name}, so it holds "
            "prompts and not what makes them. An earlier version of hf_dp wrote it. Finish the run "
            f"with that version, {_ANEW}"
        )
    kept, trained = load_file(path), _trained(model)
    _refuse_other_shapes(_shapes(trained), _shapes(kept), path.parent)
    for name, parameter in trained.items():
        parameter.copy_(kept[name])
    return True


def _is_of_prompts(model: Any) -> bool:
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_other_state(optimizer: Any, checkpoint: str | Path) -> None:
    """Raise ConfigError where the state that an optimizer loaded is of parameters of other shapes.

    Optimizers that keep a projection of the gradient (GaLore, APOLLO; a group has its ``rank``)
    are passed over there: their state has a shape of its own.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    for group in inner.param_groups:
        if "rank" in group:
            continue
        for parameter in group["params"]:
            for name, value in inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and not _fits(name, value, parameter):
                    raise ConfigError(
                        f"Cannot resume: the optimizer's {name!r} in {Path(checkpoint).name!r} has "
                        f"the shape {tuple(value.shape)}, but the parameter in its place now has "
                        f"{tuple(parameter.shape)}. Train the same parameters as the run did "
                        f"(peft_config, or what is frozen), {_ANEW}"
                    )


def _fits(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether a state could be one of this parameter; unknown ones do."""
    shape, own = tuple(value.shape), tuple(parameter.shape)
    if name == "exp_avg_sq_row":  # of Adafactor
        return shape == own[:-1]
    if name == "exp_avg_sq_col":
        return shape == (*own[:-2], *own[-1:])
    # AdEMAMix keeps two averages in one.
    return name not in _OF_EACH_NUMBER or shape in (own, (2, *own))
