"""The models of tasks: where they start, what is checked and frozen before private training, and
the classifiers of texts and the language models (for images see :mod:`hf_dp.tasks.images`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import argument
from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, DataError, UnsupportedModelError
from hf_dp.run.gguf import reading, with_weights
from hf_dp.tasks.classification import labels_of
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

CAUSAL, SEQ2SEQ = "causal_lm", "seq2seq"
_FOLDER = "a folder with config.json, weights and tokenizer (or with a GGUF file: gguf_file)"


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
        "Dropouts to turn off, for example pos_dropout (DeBERTa) or layerdrop: the last parts of "
        "module names, or module attributes that hold a probability.",
    )


@dataclass
class TextModelArguments(StartArguments):
    """Which model of texts starts."""

    gguf_file: str | None = argument(
        None,
        "The GGUF file in model_name_or_path to read configuration, tokenizer and weights from. "
        "The weights are dequantized, and an ordinary checkpoint is saved.",
    )


@dataclass
class ModelArguments(TextModelArguments):
    """Which model starts, and how it classifies texts."""

    infilling: dict | str | None = argument(
        None,
        "Classify by filling in a word: sst2, mnli, qnli or qqp for the papers' "
        "templates; in YAML also {template: '<S1> It was [MASK] .', label_words: {negative: "
        "terrible, positive: great}}. A decoder's template ends where the word is missing; for it "
        "there are also chat_template: true and several_tokens: true. Default: a head, a new one "
        "unless the base has one for exactly these classes.",
    )


@dataclass
class ImageModelArguments(StartArguments):
    """Which model starts, and whether its head is kept."""

    new_head: bool = argument(
        False,
        "Replace the head of the base with a random one, even if it has the same classes. A head "
        "with other classes is always replaced.",
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
    """Return the classes that an adapter was trained with, in the order of their ids. None where
    its folder does not say them."""
    for name in _NAMES_FILES:
        file = Path(folder, name)
        kept = json.loads(file.read_text("utf-8")).get(_NAMES_KEY) if file.exists() else None
        if kept is not None:
            return list(kept)
    return None


def without_weights(auto: Any, path: str, **options: Any) -> PreTrainedModel:
    """Return a model of the architecture at ``path`` with random weights, made by a class of
    transformers such as AutoModelForSequenceClassification."""
    from transformers import AutoConfig

    model = auto.from_config(AutoConfig.from_pretrained(path, **options))
    model.config.name_or_path = ""  # the card must not name the path as the base of this model
    return model


def architecture(
    name: str,
    auto: Callable[[PretrainedConfig], Any],
    advice: str = "",
    *,
    gguf_file: str | None = None,
    **options: object,
) -> PreTrainedModel:
    """Return a model by its name as it would be built, on the meta device: it has no weights.
    ``auto`` says by its configuration which class of transformers makes it."""
    import torch
    from transformers import AutoConfig

    with loading(f"The model {name!r}", advice):
        path = resolve_model(name, gguf_file)
        config = AutoConfig.from_pretrained(path, **reading(gguf_file), **options)
        with torch.device("meta"):
            model = auto(config).from_config(config)
    model.tie_weights()
    return model


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Stop parameters whose name starts with one of ``prefixes`` from training."""
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
    with an attribute of this name."""
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
    """Raise InvalidArgumentError if a model, or its decoder, has fewer positions than these tokens.

    Dummy tokens are used. Otherwise the first long private row that is sampled would end the run,
    and so reveal that it exists.
    """
    import torch

    pad = getattr(model.config, "pad_token_id", None) or 0
    tokens = torch.full((1, max_length), 5 if pad != 5 else 6)
    if valid := getattr(model, "valid_input_ids", None):
        tokens = valid(tokens)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    two = getattr(model.config, "is_encoder_decoder", False)
    tried = [("max_length", max_length, 1 if max_target_length else max_length)]
    if two and max_target_length:
        tried += [("max_target_length", max_target_length, max_target_length)]
    for name, length, decoded in tried:
        if two:
            inputs["decoder_input_ids"] = tokens[:, :1].expand(1, decoded)
        if cause := failure(model, inputs):
            expected = "to be no more tokens than the model has positions"
            raise invalid(name, length, expected, f"Its forward fails: {cause}")


def failure(model: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """Return why a model fails on synthetic inputs; nothing where it does not."""
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
            "adapter gets different values. Save this model once (model.save_pretrained) and "
            "train on that, or train without `peft`.",
            ", ".join(new),
        )


# -- classifiers --


def load_classifier(
    arguments: ModelArguments, text_columns: Sequence[str], names: Sequence[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer: with a head, or with a template in the tokenizer. The head is
    new, unless the base has these classes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    infilling = _infilling(arguments, text_columns)
    file = arguments.gguf_file
    path = resolve_model(arguments.model_name_or_path, file)
    advice = f"Give a Hub name, {_FOLDER}, or package:NAME."
    with loading(f"The model {arguments.model_name_or_path!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(path, **reading(file))
        if infilling is not None:
            from hf_dp.tasks.infilling import load_infilling

            return load_infilling(path, tokenizer, infilling, names, file)
        auto, scratch = AutoModelForSequenceClassification, arguments.from_scratch
        model = classifier(auto, path, names, file, from_scratch=scratch)
    fit_padding_of_classifier(model, tokenizer)
    return model, tokenizer


def classifier(
    auto: Any,
    path: str,
    names: Sequence[str],
    gguf_file: str | None = None,
    *,
    from_scratch: bool = False,
    new_head: bool = False,
) -> PreTrainedModel:
    """Return a model that a class of transformers such as AutoModelForSequenceClassification makes,
    for these classes. Its head is new, and drawn from the global generator, unless the base has
    exactly these classes and ``new_head`` is false."""
    import torch
    from transformers import AutoConfig

    options, labels = reading(gguf_file), labels_of(names)
    if from_scratch:
        return without_weights(auto, path, **options, **labels)
    own = AutoConfig.from_pretrained(path, **options)
    # A head of another size is made anew; what else does not fit is refused below.
    model, info = with_weights(auto, path, gguf_file, ignore_mismatched_sizes=True, **labels)
    head = _head_parameters(model)
    other = sorted({name for name, *_ in info["mismatched_keys"]} - head)
    if other:
        raise DataError(
            f"The weights in {path!r} do not fit its config.json: {', '.join(other)} have other "
            "shapes. Use the configuration with which they were saved."
        )
    missing = set(info["missing_keys"])  # which are new already
    known = [own.id2label[index] for index in range(own.num_labels)]
    renewed = head - missing if new_head or known != list(names) else set()
    if renewed:
        fresh = auto.from_config(AutoConfig.from_pretrained(path, **options, **labels))
        with torch.no_grad():
            for name in renewed:
                model.get_parameter(name).copy_(fresh.get_parameter(name))
    model.newly_initialized = sorted(renewed | missing)
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


def fit_padding_of_classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a decoder's classifier, which reads before the padding, know which token pads: that of
    the tokenizer, which gets one where it has none."""
    from hf_dp.losses import reads_before_padding

    if reads_before_padding(model):
        give_padding_token(tokenizer)
        model.config.pad_token_id = tokenizer.pad_token_id


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
            "`from_scratch` cannot be combined with `infilling`: random weights know no words. "
            "Use a head."
        )
    return infilling


# -- language models --


def load_language_model(
    arguments: TextModelArguments, kind: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a decoder (``causal_lm``) or encoder-decoder (``seq2seq``)."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    auto: Any = {CAUSAL: AutoModelForCausalLM, SEQ2SEQ: AutoModelForSeq2SeqLM}[kind]
    file = arguments.gguf_file
    path = resolve_model(arguments.model_name_or_path, file)
    advice = (
        f"Give a Hub name, {_FOLDER} (task {kind}), or package:NAME. To start from random weights "
        "of its architecture, set from_scratch: true."
    )
    with loading(f"The model {arguments.model_name_or_path!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(path, **reading(file))
        if arguments.from_scratch:
            model = without_weights(auto, path, **reading(file))
        else:
            model, _ = with_weights(auto, path, file)
    fit_tokens(model, tokenizer)
    return model, tokenizer


def load_trained(
    path: str | None, arguments: TextModelArguments, kind: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer that ``hf-dp train`` wrote; an adapter on its base. None for the
    base that the arguments name.

    Raises: as :func:`load_language_model`.
    """
    if path is None:
        return load_language_model(replace(arguments, from_scratch=False), kind)
    folder = resolve_model(path)
    if not Path(folder, "adapter_config.json").exists():
        return load_language_model(TextModelArguments(path), kind)
    from peft import PeftModel

    base, tokenizer = load_language_model(arguments, kind)
    what = f"The adapter {path!r} on {arguments.model_name_or_path!r}"
    with loading(what, "Give the configuration that it was trained with."):
        return PeftModel.from_pretrained(base, folder), tokenizer


def fit_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a padding token, and let the model stop at its end token."""
    if tokenizer.eos_token is None:
        raise UnsupportedModelError(
            "The tokenizer has no end token (eos_token), so the model could not learn where a text "
            "ends. Set tokenizer.eos_token to one of its tokens and save it beside the model."
        )
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    if len(tokenizer) > embeddings:
        raise UnsupportedModelError(
            f"The tokenizer has {len(tokenizer)} tokens, and the model {embeddings} embeddings. "
            "Call model.resize_token_embeddings(len(tokenizer)) once, without private data, and "
            "save both."
        )
    give_padding_token(tokenizer)
    for config in (model.config, model.generation_config):
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
    # Texts are trained to end with the tokenizer's end token, which may not be the model's own.
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id not in ends:
        model.generation_config.eos_token_id = [*ends, tokenizer.eos_token_id]


def give_padding_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the end token pad where a tokenizer has no padding token. Nothing attends to padding and
    no label stands on it, so no embedding is needed for it."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise UnsupportedModelError(
            "The tokenizer has neither a padding token nor an end token. Set tokenizer.pad_token "
            "to one of its tokens and save it beside the model."
        )
    tokenizer.pad_token = tokenizer.eos_token
    said = "The tokenizer has no padding token: it is the end token %r. No embedding changes."
    logger.warning(said, tokenizer.eos_token)
