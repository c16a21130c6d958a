"""Bases that are read from a GGUF file: their weights are dequantized, and then ordinary ones.

transformers goes on taking such a model for a quantized one, and refuses to train and to save it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_dp.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers.quantizers import HfQuantizer

Model = TypeVar("Model", bound="nn.Module | None")
_FILE = "gguf_file"  # what a model remembers the file by, and from_pretrained calls it


def reading(gguf_file: str | None) -> dict[str, str]:
    """Return what ``from_pretrained`` of a configuration or tokenizer takes to read a GGUF file.

    Raises: ConfigError where it cannot be read here.
    """
    if gguf_file is None:
        return {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"Expected `gguf_file` to be unset without the package gguf, got {gguf_file!r}. "
            "Install what reads it: pip install gguf"
        )
    return {_FILE: gguf_file}


def with_weights(
    auto: Any, path: str, gguf_file: str | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model at ``path``, made by a class of transformers such as
    AutoModelForSequenceClassification, and what transformers says of its loading. With
    ``gguf_file`` its weights are dequantized. Raises: as :func:`reading`.
    """
    import torch
    import transformers

    if gguf_file is not None:
        options |= {**reading(gguf_file), "dtype": torch.float32}
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = auto.from_pretrained(path, output_loading_info=True, **options)
    if gguf_file is not None:
        remember_file(dequantized(model), gguf_file)
    return model, info


def dequantized(model: Model) -> Model:
    """Let a model that was read from a GGUF file be an ordinary one, which remembers that file.
    Any other is returned as it is.

    Raises: UnsupportedModelError for weights that are still packed.
    """
    for module in () if model is None else list(model.modules()):
        quantizer: HfQuantizer | None = vars(module).get("hf_quantizer")
        if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
            continue
        packed = [type(part).__name__ for part in module.modules() if _is_packed(part)]
        if packed:
            raise UnsupportedModelError(
                f"The weights of {type(module).__name__} are still packed as in its GGUF file "
                f"({packed[0]}), and cannot train. Load it with "
                "quantization_config=GgufConfig(dequantize=True)."
            )
        remember_file(module, vars(quantizer.quantization_config)[_FILE])
        quantizer.remove_quantization_config(module)
    return model


def _is_packed(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.integrations.gguf")


def remember_file(model: nn.Module, gguf_file: str) -> None:
    """Let a model remember the name of the GGUF file that its weights come from."""
    vars(model)[_FILE] = Path(gguf_file).name


def gguf_file_of(model: nn.Module) -> str | None:
    """Return the name of the GGUF file that the weights of a model, or of one inside, come from."""
    found = (vars(module).get(_FILE) for module in model.modules())
    return next(filter(None, found), None)
