"""Go on with what a checkpoint trained, or refuse a resume that trains other parameters.

What a checkpoint holds is loaded by name and by place: weights that are missing are passed over,
and the optimizer's state goes to whatever has its place now. A step with the state of another
parameter reads memory that is not its own, or moves weights by the moments of others.

PEFT saves the prompts of an adapter alone, and not the network that makes them (P-tuning, prefix
projection). So checkpoints hold the trained weights of such adapters beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_dp.errors import ConfigError
from hf_dp.tuners.base import refuse_other_options
from hf_dp.tuners.selection import SelectionConfig

_WEIGHTS = "adapter_model.safetensors"
_PROMPTS = "_prompt_weights.safetensors"  # "_": nothing that is published, nor a model's weights
_ANEW = "or start a new run in a new output_dir."

# What optimizers keep of each number of a parameter, by their names for it.
_OF_EACH_NUMBER = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer sum square_avg grad_avg acc_delta "
    "prev step_size mu_product_avg variance z state1 state2".split()
)

Shapes = dict[str, tuple[int, ...]]


def refuse_other_adapter(model: nn.Module, checkpoint: str | Path, in_shards: bool) -> None:
    """Raise ConfigError where a checkpoint's adapter is not what ``model`` trains.

    Args: in_shards: whether the model is sharded. Its adapter is not whole then, and only what was
        selected is compared.
    """
    configs = model.peft_config if isinstance(model, PeftModel) else {"default": None}
    for name, config in configs.items():
        # PEFT saves the adapter "default" beside all others' folders.
        folder = Path(checkpoint) if name == "default" else Path(checkpoint, name)
        if isinstance(config, SelectionConfig) and (folder / _WEIGHTS).exists():
            then = type(config).from_pretrained(str(folder))
            if set(then.parameters or ()) != set(config.parameters or ()):
                refuse_other_options(then, config)
                raise ConfigError(
                    f"Cannot resume: peft_config chooses other parameters than those that "
                    f"selection.json in {folder.name!r} lists. Use the model that the run was "
                    f"started with, {_ANEW}"
                )
        if not in_shards:
            kept: dict[str, Tensor] = {}
            if config is not None:  # as it would be saved, so that the names are those of the file
                kept = get_peft_model_state_dict(model, adapter_name=name)
            _refuse_other_shapes(_shapes(kept), _shapes_in(folder / _WEIGHTS), folder)


def _refuse_other_shapes(now: Shapes, then: Shapes, folder: Path) -> None:
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise ConfigError(
                f"Cannot resume: `peft_config` makes {key!r} of shape {now.get(key)}, but in the "
                f"checkpoint {folder.name!r} it has {then.get(key)} (None: it is not there). Set "
                f"peft_config as adapter_config.json there says, {_ANEW}"
            )


def _shapes(weights: dict[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _shapes_in(path: Path) -> Shapes:
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as stored:
        return {key: tuple(stored.get_slice(key).get_shape()) for key in list(stored.keys())}


def save_prompts(model: nn.Module, checkpoint: str | Path) -> None:
    """Write into a checkpoint all that trains of an adapter that consists of prompts."""
    if _is_of_prompts(model):
        kept = {name: p.detach().cpu().contiguous() for name, p in _trained(model).items()}
        save_file(kept, Path(checkpoint, _PROMPTS))


@torch.no_grad()
def load_prompts(model: nn.Module, checkpoint: str | Path) -> bool:
    """Load what :func:`save_prompts` wrote. Return whether the model's adapter is one of prompts.

    Raises: ConfigError for a checkpoint without it.
    """
    if not _is_of_prompts(model):
        return False
    path = Path(checkpoint, _PROMPTS)
    if not path.exists():
        raise ConfigError(
            f"Cannot resume: the checkpoint {path.parent.name!r} has no {path.name}, so it holds "
            f"prompts and not what makes them. Resume from another checkpoint, {_ANEW}"
        )
    kept, trained = load_file(path), _trained(model)
    _refuse_other_shapes(_shapes(trained), _shapes(kept), path.parent)
    for name, parameter in trained.items():
        parameter.copy_(kept[name])
    return True


def _is_of_prompts(model: nn.Module) -> bool:
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_other_state(optimizer: Any, checkpoint: str | Path) -> None:
    """Raise ConfigError where the state that an optimizer loaded is of parameters of other shapes.

    Optimizers that keep a projection of the gradient (GaLore, APOLLO; a group has its ``rank``)
    are passed over there: their state has a shape of its own.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    projected = [group for group in inner.param_groups if "rank" in group]
    passed_over = {id(parameter) for group in projected for parameter in group["params"]}
    for parameter, state in inner.state.items():
        for name, value in state.items():
            if id(parameter) not in passed_over and not _fits(name, value, parameter):
                raise ConfigError(
                    f"Cannot resume: the optimizer's {name!r} in {Path(checkpoint).name!r} has the "
                    f"shape {tuple(value.shape)}, but the parameter in its place now has "
                    f"{tuple(parameter.shape)}. Train the same parameters as the run did, {_ANEW}"
                )


def _fits(name: str, value: object, parameter: Tensor) -> bool:
    """Return whether a state could be one of this parameter; unknown ones do."""
    own = tuple(parameter.shape)
    known = {
        **dict.fromkeys(_OF_EACH_NUMBER, (own, (2, *own))),  # AdEMAMix keeps two averages in one
        "exp_avg_sq_row": (own[:-1],),  # of Adafactor
        "exp_avg_sq_col": ((*own[:-2], *own[-1:]),),
    }
    if not isinstance(value, Tensor) or name not in known:
        return True
    return tuple(value.shape) in known[name]
