"""Training some of a model's own parameters, as an adapter that stock PEFT loads without hf_dp.

Despite its name, PEFT's ``LNTuningConfig`` belongs to a tuner that trains a full copy of any module
and swaps it in. A :class:`SelectionConfig` says *which parameters* train; :class:`SelectionModel`
turns that into copies of the modules that own them. What is saved is a plain ``LNTuningConfig``
with the trained parameters. Beside it, ``selection.json`` records how they were chosen.

Two things go beyond stock PEFT. First, parameters of a copied module that were not selected remain
the frozen parameters of the base, and are not saved. Second, the copies of a tied parameter are one
parameter while it trains. Each of them is saved, so that stock PEFT, which does not tie them,
computes the same result.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from huggingface_hub import hf_hub_download
from peft import LNTuningConfig, LNTuningModel, PeftConfig
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn

from hf_dp._borrowed import register_method
from hf_dp._validate import in_unit_interval, invalid
from hf_dp.errors import ConfigError, UnsupportedModelError
from hf_dp.plans.selection import SelectionPlan
from hf_dp.tuners.frost.select import Partition, partitions, refuse_too_small

FILE_NAME = "selection.json"
# What PEFT itself trains in full, by task type.
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_STOCK = [item.name for item in fields(LNTuningConfig)]


@dataclass
class SelectionConfig(LNTuningConfig):
    """Which of a model's own parameters train; subclasses say how they are chosen.

    A new head (``task_type`` SEQ_CLS, TOKEN_CLS, QUESTION_ANS) and ``modules_to_save`` always
    train, and are not candidates.

    Args: parameters: names of the chosen parameters in the base model; None until they are chosen.

    Raises: ConfigError for ``target_modules`` (``parameters`` decides them).
    """

    parameters: list[str] | None = field(default=None)

    method: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = self.method.upper()
        if self.target_modules is not None:
            raise ConfigError(
                f"Expected `target_modules` to be unset for {type(self).__name__}, got "
                f"{self.target_modules!r}. Remove it: the method itself chooses what trains."
            )

    def choose(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters to train, chosen by looking at the model alone.

        Raises: ConfigError when the choice needs private rows.
        """
        raise NotImplementedError

    def candidates(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the trainable parameters that may be selected, by name.

        Two kinds are left out. Parameters of the head and of ``modules_to_save`` always train.
        Those that a module made of other modules owns stay frozen (ViT's class token, or the bias
        that a masked language model's head shares with its decoder): PEFT copies layers, and a
        whole copy of such a module would lack the attributes that other modules read.
        """
        out = always_trained(model, self) | outside_layers(model)
        named = model.named_parameters()
        found = {name: each for name, each in named if each.requires_grad and each not in out}
        if not found:
            expected = "to find parameters that it may select"
            advice = "Everything outside the head is frozen. Unfreeze some parameters first."
            raise invalid("peft_config", type(self).__name__, expected, advice)
        return found

    def details(self) -> dict[str, object]:
        """Return what ``selection.json`` holds: the method, its options and what it chose."""
        own = {key: value for key, value in asdict(self).items() if key not in _STOCK}
        saved = self.modules_to_save
        return {
            "method": self.method,
            "task_type": getattr(self.task_type, "value", self.task_type),
            "modules_to_save": sorted(saved) if isinstance(saved, set) else saved,
            **own,
        }

    def save_pretrained(self, save_directory: str, **kwargs: object) -> None:
        """Write ``adapter_config.json``, with which stock PEFT loads the adapter, and
        ``selection.json``."""
        values = {name: getattr(self, name) for name in _STOCK if name != "peft_type"}
        LNTuningConfig(**values).save_pretrained(save_directory, **kwargs)
        self.write_details(save_directory)

    def write_details(self, folder: str) -> None:
        """Write ``selection.json`` alone."""
        text = json.dumps(self.details(), indent=2) + "\n"
        Path(folder, FILE_NAME).write_text(text, encoding="utf-8")

    def options(self) -> dict[str, object]:
        """Return the user's options, without what was chosen; a resumed run must have the same."""
        made = ("parameters", "made")
        values = {name: value for name, value in self.details().items() if name not in made}
        heads = _HEADS.get(self.task_type or "", ())  # PEFT adds them when it wraps the model
        return values | {"modules_to_save": sorted(_saved(self) - set(heads))}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> Self:
        """Read the selection saved beside an adapter, in a folder or a Hub repository.

        Raises: ConfigError when there is none, or when another method made it.
        """
        folder = pretrained_model_name_or_path
        path = Path(folder, subfolder or "", FILE_NAME)
        if not os.path.isdir(folder):
            path = Path(hf_hub_download(folder, FILE_NAME, subfolder=subfolder, **kwargs))
        try:
            values = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"Expected a readable {FILE_NAME} in {folder!r}, got: {problem}. Name the folder "
                "of an adapter that hf_dp saved."
            ) from problem
        method = values.pop("method", None)
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if method != cls.method or unknown:
            raise ConfigError(
                f"Expected {FILE_NAME} in {folder!r} to come from the "
                f"method {cls.method!r}, got {method!r} (unknown: {unknown}). Read it with that "
                "method's configuration, by the version of hf_dp that wrote it."
            )
        return cls(**values)


@dataclass
class RatioConfig(SelectionConfig):
    """A selection of at most ``unfreeze_ratio`` of all numbers that may be selected.

    Args: unfreeze_ratio: gamma in (0, 1].
    """

    unfreeze_ratio: float = field(default=0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("unfreeze_ratio", self.unfreeze_ratio, one=True)

    def candidate_partitions(self, model: nn.Module) -> list[Partition]:
        """Return the partitions that may be selected."""
        found = partitions(model, self.candidates(model).values())
        refuse_too_small(found, self.unfreeze_ratio)
        return found


@dataclass
class PrivateConfig(RatioConfig):
    """A selection by noisy numbers over Poisson samples of the private rows.

    Args:
        selection_budget_ratio: 1 - r_eps in (0, 1), which share of target_epsilon training leaves
            to the selection.
        selection_sample_rate: q_ps.
        selection_clipping_norm: c; by default the run's ``per_example_max_grad_norm``.
        selection_noise_multiplier: sigma_ps. Set it if and only if the run sets
            ``noise_multiplier``.
    """

    selection_budget_ratio: float = field(default=0.1)
    selection_sample_rate: float = field(default=0.02)
    selection_clipping_norm: float | None = field(default=None)
    selection_noise_multiplier: float | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("selection_budget_ratio", self.selection_budget_ratio)

    def selection_plan(
        self, clipping_norm: float, quantity: str, iterations: int, norm_order: int
    ) -> SelectionPlan:
        """Return what the selection will release. Args: clipping_norm: the run's."""
        own, noise = self.selection_clipping_norm, self.selection_noise_multiplier
        return SelectionPlan(
            quantity=quantity,
            sample_rate=self.selection_sample_rate,
            iterations=iterations,
            clipping_norm=clipping_norm if own is None else own,
            norm_order=norm_order,
            noise_multiplier=noise,
            budget_ratio=self.selection_budget_ratio if noise is None else None,
        )


Config = TypeVar("Config", bound=SelectionConfig)


def register(cls: type[Config], tuner: type[BaseTuner] | None = None) -> type[Config]:
    """Let ``get_peft_model`` and YAML find a method by its name; a class decorator.

    Args: tuner: the class that ``get_peft_model`` builds; by default :class:`SelectionModel`.
    """
    register_method(cls.method.upper(), cls, tuner or SelectionModel)
    return cls


class InPlace(LNTuningModel):
    """Stands where PEFT looks for the adapter of a method that has none."""

    prefix: str = "mask_"

    def __init__(self, *args: object, **kwargs: object):
        raise UnsupportedModelError(
            "This method trains in place, not as an adapter. Pass its configuration to "
            "DPTrainer(peft_config=...)."
        )


class SelectionModel(LNTuningModel):
    """Trains the selected parameters in copies of the modules that own them; PEFT makes it."""

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        config = self.peft_config[adapter_name]
        assert isinstance(config, SelectionConfig)
        if config.parameters is None:
            config.parameters = list(config.choose(model))
        targets = target_modules(model, config.parameters) or DUMMY_TARGET_MODULES
        names = dict(model.named_parameters())
        chosen = {names[name] for name in config.parameters}
        config.target_modules = targets
        with warnings.catch_warnings():
            # Copies need no in_features.
            warnings.filterwarnings("ignore", "Unsupported layer type")
            super().inject_adapter(
                model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, state_dict
            )
        # PEFT shortens long lists, and mistakes a lone "wte" for a changed vocabulary.
        config.target_modules = targets
        self._join(model, adapter_name, chosen)
        self._train_only_selected()

    # LNTuning's own method leaves the wrappers of modules_to_save in a merged model. Its checkpoint
    # would then load without the head.
    _unload_and_optionally_merge = BaseTuner._unload_and_optionally_merge

    def _check_tied_modules(self, model: nn.Module, peft_config: PeftConfig) -> None:
        """Give no warning, since the copies of a tied parameter are one parameter here."""

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        if isinstance(new_module, LNTuningLayer):
            super()._replace_module(parent, child_name, new_module, child)
        else:
            # This goes back to an ordinary layer or head. Stock PEFT would look for its `weight`,
            # which not every layer has.
            setattr(parent, child_name, new_module)

    @staticmethod
    def _join(model: nn.Module, adapter_name: str, chosen: set[nn.Parameter]) -> None:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for layer in model.modules():
            if not isinstance(layer, LNTuningLayer) or adapter_name not in layer.ln_tuning_layers:
                continue
            copy = layer.ln_tuning_layers[adapter_name]
            for path, original in layer.base_layer.named_modules():
                twin = copy.get_submodule(path)
                for name, parameter in original.named_parameters(recurse=False):
                    new = parameter
                    if parameter in chosen:
                        new = copies.setdefault(parameter, getattr(twin, name))
                    setattr(twin, name, new)

    def _train_only_selected(self) -> None:
        """Freeze what was not selected, in a copy the base's own: PEFT makes a whole one train."""
        for layer in self.model.modules():
            if isinstance(layer, LNTuningLayer):
                layer.base_layer.requires_grad_(False)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        self._train_only_selected()

    def set_requires_grad(
        self, adapter_names: str | Sequence[str], requires_grad: bool = True
    ) -> None:
        super().set_requires_grad(adapter_names, requires_grad)
        self._train_only_selected()

    def enable_adapter_layers(self) -> None:
        super().enable_adapter_layers()
        self._train_only_selected()

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        found = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        # A copy's parameters that are the base's own are not saved.
        for path, layer in model.named_modules():
            if not isinstance(layer, LNTuningLayer) or adapter_name not in layer.ln_tuning_layers:
                continue
            base = dict(layer.base_layer.named_parameters(remove_duplicate=False))
            copy = layer.ln_tuning_layers[adapter_name]
            for name, parameter in copy.named_parameters(remove_duplicate=False):
                if base[name] is parameter:
                    found.pop(f"{path}.ln_tuning_layers.{adapter_name}.{name}", None)
        return found


def target_modules(model: nn.Module, parameters: Sequence[str]) -> list[str] | str:
    """Return the layers that own these parameters, all of a tied one, in the form PEFT takes them.

    Raises: InvalidArgumentError for a name that is not that of a parameter; UnsupportedModelError
        for a parameter that does not belong to a single layer.
    """
    names = dict(model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    outside = outside_layers(model)
    for name in parameters:
        if name not in names:
            advice = "See `hf-dp partitions MODEL`."
            raise invalid("parameters", name, "to be a parameter of the model", advice)
        if names[name] in outside:
            raise UnsupportedModelError(
                f"{name!r} belongs to a module made of other modules, not to a single layer, so it "
                "cannot be copied and swapped. Leave it out."
            )
    wanted = {names[name] for name in parameters}
    owners = [
        path for path, module in modules.items() if wanted & set(module.parameters(recurse=False))
    ]
    # PEFT matches the items of a list with the ends of names: "head" also matches "decoder.head".
    ends = tuple(f".{name}" for name in owners)
    others = set(modules) - set(owners)
    if not any(path.endswith(ends) for path in others):
        return owners
    return "|".join(re.escape(path) for path in owners)


def outside_layers(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a module with children owns, alone or together with a layer."""
    return {
        p
        for module in model.modules()
        if any(module.children())
        for p in module.parameters(recurse=False)
    }


def always_trained(model: nn.Module, config: SelectionConfig) -> set[nn.Parameter]:
    """Return the parameters of the modules that PEFT trains in full, whatever is selected."""
    ends = (*_saved(config), *_HEADS.get(config.task_type or "", ()))
    return {
        parameter
        for path, module in model.named_modules(remove_duplicate=False)
        if path.endswith(ends) and ends
        for parameter in module.parameters()
    }


def _saved(config: SelectionConfig) -> set[str]:
    """Return what the user names in ``modules_to_save``."""
    saved = config.modules_to_save or ()
    return {saved} if isinstance(saved, str) else set(saved)
