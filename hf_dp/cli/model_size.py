"""Count the parameters of a base model as Li et al. do: without the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dp.errors import DataError


@dataclass(frozen=True)
class ModelSize:
    """The size of a base model, without a task's head.

    Attributes:
        parameters: all.
        without_embeddings: those of layers other than embeddings (Li et al., figures 1 and 6).
        family: the model's type; that of a distilled model is its teacher's.
    """

    parameters: int
    without_embeddings: int
    family: str


def model_size(name: str) -> ModelSize:
    """Return the size of a model, from its configuration alone.

    Args: name: a Hub name, a folder, or ``package:NAME``.

    Raises: DataError for a model whose configuration cannot be read.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModel

    from hf_dp.tasks.files import resolve_model

    try:
        config = AutoConfig.from_pretrained(resolve_model(name))
        with torch.device("meta"):  # shapes; no weights are needed
            model = AutoModel.from_config(config)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The size of the model {name!r} is not known: {str(problem).splitlines()[0]} Give a "
            "Hub name, a folder, or package:NAME."
        ) from problem
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    of_embeddings = sum(parameter.numel() for parameter in embedded)
    return ModelSize(total, total - of_embeddings, str(config.model_type).removeprefix("distil"))
