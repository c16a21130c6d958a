"""The models of classification: an encoder of texts or images with a head, or one that fills in a
word."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_dp._arguments import argument
from hf_dp.errors import ConfigError, DataError, UnsupportedModelError
from hf_dp.tasks.files import loading, resolve_model
from hf_dp.tasks.models import StartArguments, labels_of, without_weights
from hf_dp.tasks.templates import Infilling

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

COLORS = 3


@dataclass
class ModelArguments(StartArguments):
    """Which model starts, and how it classifies texts."""

    infilling: dict | str | None = argument(
        None,
        "Classify by filling in a word: sst2, mnli, qnli or qqp for the papers' "
        "templates; in YAML also {template: '<S1> It was [MASK] .', label_words: {negative: "
        "terrible, positive: great}}. Default: a new head.",
    )


@dataclass
class ImageModelArguments(StartArguments):
    """Which model starts, and whether its head is kept."""

    new_head: bool = argument(
        False,
        "Replace the head of the base by a random one, also where it has the same "
        "classes. A head with other classes is always replaced.",
    )


def load_classifier(
    arguments: ModelArguments, text_columns: Sequence[str], names: Sequence[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer: with a new head, or with a template in the tokenizer.

    Raises: ConfigError for a template that takes another number of texts, or for random weights;
        DataError for what cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    infilling = _infilling(arguments, text_columns)
    path = resolve_model(arguments.model_name_or_path)
    advice = "Give a Hub name, a folder with config.json, weights and tokenizer, or package:NAME."
    with loading(f"The model {arguments.model_name_or_path!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(path)
        if infilling is not None:
            from hf_dp.tasks.infilling import load_infilling

            return load_infilling(path, tokenizer, infilling, names)
        auto, labels = AutoModelForSequenceClassification, labels_of(names)
        if arguments.from_scratch:
            return without_weights(auto, path, **labels), tokenizer
        model, info = auto.from_pretrained(path, output_loading_info=True, **labels)
    model.newly_initialized = sorted(info["missing_keys"])
    return model, tokenizer


def _infilling(arguments: ModelArguments, text_columns: Sequence[str]) -> Infilling | None:
    """Return the template and its label words, or None for a head. Raises: ConfigError."""
    if arguments.infilling is None:
        return None
    infilling = Infilling.of(arguments.infilling)
    template = infilling.template
    if template.texts != len(text_columns):
        raise ConfigError(
            f"The template {template.text!r} takes {template.texts} text column(s), but "
            f"`text_columns` names {list(text_columns)}. Name as many."
        )
    if arguments.from_scratch:
        raise ConfigError(
            "`from_scratch` does not go with `infilling`: random weights know no words. Use a head."
        )
    return infilling


def load_image_classifier(
    arguments: ImageModelArguments, names: Sequence[str]
) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Return model and image processor. The head is new, unless the base has these classes.

    Raises: ConfigError without Pillow; DataError for what cannot be loaded; UnsupportedModelError
        for a model that does not take images in RGB, or whose head is not known.
    """
    from hf_dp.run.synthetic import image_config

    require_pillow()
    name = arguments.model_name_or_path
    advice = "Give a Hub name, or a folder with config.json, weights and preprocessor_config.json."
    with loading(f"The image classifier {name!r}", advice):
        path = resolve_model(name)
        processor = load_processor(path)
        model = _image_model(path, names, arguments.from_scratch, arguments.new_head)
    channels = getattr(image_config(model), "num_channels", COLORS)
    if channels != COLORS:
        raise UnsupportedModelError(
            f"Expected a model that takes images in RGB, but {name!r} has num_channels {channels}. "
            "Choose another model."
        )
    return model, processor


def require_pillow() -> None:
    """Raise ConfigError where images cannot be decoded."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "Images are decoded with Pillow, which is not installed. Install it with: pip install "
            "'hf-dp[images]'"
        )


def load_processor(path: str) -> BaseImageProcessor:
    """Return the image processor of a model; the same one whether or not torchvision is here."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def _image_model(
    path: str, names: Sequence[str], from_scratch: bool, new_head: bool
) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForImageClassification

    auto = AutoModelForImageClassification
    if from_scratch:
        return without_weights(auto, path, **labels_of(names))
    own = AutoConfig.from_pretrained(path)
    config = AutoConfig.from_pretrained(path, **labels_of(names))
    # A head of another size is made anew; what else does not fit is refused below.
    model, info = auto.from_pretrained(
        path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
    )
    head = _head_parameters(model)
    other = sorted({name for name, *_ in info["mismatched_keys"]} - head)
    if other:
        raise DataError(
            f"The weights in {path!r} do not fit its config.json: {', '.join(other)} have other "
            "shapes. Use the configuration with which they were saved."
        )
    known = [own.id2label[index] for index in range(own.num_labels)]
    renewed = head if new_head or known != list(names) else set()
    if renewed:
        fresh = auto.from_config(config)
        with torch.no_grad():
            for name in renewed:
                model.get_parameter(name).copy_(fresh.get_parameter(name))
    model.newly_initialized = sorted(renewed | set(info["missing_keys"]))
    return model


def _head_parameters(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters of a classifier's head. Raises: UnsupportedModelError."""
    from hf_dp.run.checks import head_of

    heads = head_of(model).items()
    names = {f"{part}.{name}" for part, module in heads for name, _ in module.named_parameters()}
    if not names:
        raise UnsupportedModelError(
            f"Expected a model with a head beside its backbone, but {type(model).__name__} has "
            f"nothing beside {model.base_model_prefix!r}. Choose another model."
        )
    return names
