"""The models of tasks: where they start, what is checked and frozen before private training, and
classifiers: an encoder of texts or images with a head, or one that fills in a word."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import argument
from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, DataError, UnsupportedModelError
from hf_dp.tasks.labels import labels_of
from hf_dp.tasks.sources import loading, resolve_model
from hf_dp.tasks.templates import Infilling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import (
        BaseImageProcessor,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

logger = logging.getLogger(__name__)

COLORS = 3


@dataclass
class StartArguments:
    """Which model starts."""

    model_name_or_path: str = argument(
        MISSING,
        "Hub name, local folder, or package:NAME for a model inside an installed Python package.",
    )
    from_scratch: bool = argument(
        False, "Start from random weights of this architecture, to see what pretraining gives."
    )
    freeze: list[str] = argument(
        [],
        "Prefixes of parameter names to freeze, for example bert.embeddings, "
        "vit.embeddings or transformer.wte.",
    )
    without_dropout: list[str] = argument(
        [],
        "Dropouts to turn off, for example pos_dropout (DeBERTa) or layerdrop: ends of "
        "names of modules, or attributes of modules that hold a probability.",
    )


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


# Where an adapter's folder says so: PEFT writes no config.json, and a tokenizer or an image
# processor keeps a key that it does not know.
_NAMES_FILES, _NAMES_KEY = ("tokenizer_config.json", "preprocessor_config.json"), "class_names"


def keep_class_names(
    processor: PreTrainedTokenizerBase | BaseImageProcessor, names: Sequence[str]
) -> None:
    """Let a tokenizer or an image processor, which is saved with an adapter, say the classes."""
    # An image processor saves its attributes, and a tokenizer what it was made with.
    vars(processor).get("init_kwargs", vars(processor))[_NAMES_KEY] = list(names)


def kept_class_names(folder: str) -> list[str] | None:
    """Return the classes that an adapter was trained with, in the order of their ids.

    None where its folder does not say them.
    """
    for name in _NAMES_FILES:
        file = Path(folder, name)
        kept = json.loads(file.read_text("utf-8")).get(_NAMES_KEY) if file.exists() else None
        if kept is not None:
            return list(kept)
    return None


def without_weights(auto: Any, path: str, **options: Any) -> PreTrainedModel:
    """Return a model of the architecture at ``path`` with random weights.

    Args: auto: the class of transformers that makes it, AutoModelForSequenceClassification.
    """
    from transformers import AutoConfig

    model = auto.from_config(AutoConfig.from_pretrained(path, **options))
    model.config.name_or_path = ""  # the card must not name the path as the base of this model
    return model


def architecture(
    name: str, auto: Callable[[PretrainedConfig], Any], advice: str = "", **options: object
) -> PreTrainedModel:
    """Return a model by its name as it would be built, on the meta device: it has no weights.

    Args: auto: which class of transformers makes it, by its configuration.

    Raises: DataError, with this advice.
    """
    import torch
    from transformers import AutoConfig

    with loading(f"The model {name!r}", advice):
        config = AutoConfig.from_pretrained(resolve_model(name), **options)
        with torch.device("meta"):
            model = auto(config).from_config(config)
    model.tie_weights()
    return model


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Stop parameters whose name starts with one of ``prefixes`` from training.

    Raises: ConfigError for a prefix that no parameter has.
    """
    for prefix in prefixes:
        matched = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        if not matched:
            raise ConfigError(
                f"`freeze` names {prefix!r}, but no parameter of the model starts with it. "
                f"Names look like {next(name for name, _ in model.named_parameters())!r}."
            )
        for parameter in matched:
            parameter.requires_grad_(False)


def turn_off_dropout(model: nn.Module, names: Sequence[str]) -> None:
    """Set probabilities to 0: of dropouts whose name ends with one of ``names``, and of modules
    with an attribute of this name.

    Raises: ConfigError for a name that no module has.
    """
    for name in names:
        found = 0
        for path, module in model.named_modules():
            attribute = "p" if f".{path}".endswith(f".{name}") else name
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
                found += 1
        if not found:
            known = [path for path, module in model.named_modules() if hasattr(module, "p")]
            raise ConfigError(
                f"`without_dropout` names {name!r}, but no dropout of the model ends with it, and "
                f"no module has such a probability. Its first dropouts are {known[:5]}."
            )


def check_positions(
    model: PreTrainedModel, max_length: int, max_target_length: int | None = None
) -> None:
    """Raise InvalidArgumentError if a model has fewer positions than ``max_length`` tokens.

    Dummy tokens are used. Otherwise the first long private row that is sampled would end the run,
    and so reveal that it exists.

    Args: max_target_length: of what the decoder of an encoder-decoder reads, in tokens.
    """
    import torch

    pad = getattr(model.config, "pad_token_id", None) or 0
    tokens = torch.full((1, max_length), 5 if pad != 5 else 6)
    if valid := getattr(model, "valid_input_ids", None):
        tokens = valid(tokens)
    decoder = {}
    if getattr(model.config, "is_encoder_decoder", False):
        decoder["decoder_input_ids"] = tokens[:, :1].expand(1, max_target_length or max_length)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **decoder}
    if cause := _failure(model, inputs):
        expected = "to be no more tokens than the model has positions"
        raise invalid("max_length", max_length, expected, f"Its forward fails: {cause}")


def check_pixels(model: PreTrainedModel, shape: Sequence[int]) -> None:
    """Raise DataError if a model does not take images of this size; made-up ones are used.

    Args: shape: of one image's pixels, (3, H, W).
    """
    import torch

    if cause := _failure(model, {"pixel_values": torch.zeros(1, *shape, dtype=model.dtype)}):
        raise DataError(
            f"The image processor makes images of {' x '.join(map(str, shape))}, on which the "
            f"model fails: {cause} Set `size` in preprocessor_config.json to the model's "
            "image_size."
        )


def _failure(model: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """Return why a model fails on made-up inputs; nothing where it does not."""
    import torch

    training = model.training
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    except (IndexError, RuntimeError, ValueError) as problem:
        return str(problem).splitlines()[0]
    finally:
        model.train(training)
    return ""


def warn_of_new_weights(model: nn.Module) -> None:
    """Warn of random weights that an adapter would not hold: those of the base, without its head,
    that the checkpoint lacks."""
    from hf_dp.run.checks import head_of

    missing = getattr(model, "newly_initialized", [])
    head = tuple(f"{part}." for part in head_of(model)) if missing else ()
    new = [name for name in missing if not name.startswith(head)]
    if new:
        logger.warning(
            "The checkpoint of the base has no %s: they are random, and everyone who loads the "
            "adapter gets other values. Save this model once (model.save_pretrained) and train on "
            "that, or train without `peft`.",
            ", ".join(new),
        )


# -- classifiers --


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
