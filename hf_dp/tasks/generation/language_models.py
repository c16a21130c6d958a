"""Load the model of a generation task, with a padding token that changes no embedding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp.errors import UnsupportedModelError
from hf_dp.tasks.models import StartArguments, without_weights
from hf_dp.tasks.sources import loading, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CAUSAL, SEQ2SEQ = "causal_lm", "seq2seq"


def load_language_model(
    arguments: StartArguments, kind: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a decoder (``causal_lm``) or encoder-decoder (``seq2seq``).

    Raises: DataError for what cannot be loaded; UnsupportedModelError as :func:`fit_tokens`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    auto: Any = {CAUSAL: AutoModelForCausalLM, SEQ2SEQ: AutoModelForSeq2SeqLM}[kind]
    path = resolve_model(arguments.model_name_or_path)
    advice = (
        f"Give a Hub name, a folder with config.json, weights and tokenizer (task {kind}), or "
        "package:NAME. To start from random weights of its architecture, set from_scratch: true."
    )
    with loading(f"The model {arguments.model_name_or_path!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(path)
        fresh = arguments.from_scratch
        model = without_weights(auto, path) if fresh else auto.from_pretrained(path)
    fit_tokens(model, tokenizer)
    return model, tokenizer


def load_trained(
    path: str, arguments: StartArguments, kind: str
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer that ``hf-dp train`` wrote; an adapter on its base. Raises: as
    :func:`load_language_model`."""
    folder = resolve_model(path)
    if not Path(folder, "adapter_config.json").exists():
        return load_language_model(StartArguments(path), kind)
    from peft import PeftModel

    base, tokenizer = load_language_model(arguments, kind)
    what = f"The adapter {path!r} on {arguments.model_name_or_path!r}"
    with loading(what, "Give the configuration that it was trained with."):
        return PeftModel.from_pretrained(base, folder), tokenizer


def fit_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a padding token, and let the model stop at its end token.

    A missing padding token becomes the end token. Nothing attends to padding and no label stands
    on it, so no embedding is needed for it.

    Raises: UnsupportedModelError for a tokenizer with more tokens than the model has embeddings, or
        without an end token.
    """
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
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        said = "The tokenizer has no padding token: it is the end token %r. No embedding changes."
        logger.warning(said, tokenizer.eos_token)
    for config in (model.config, model.generation_config):
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
    # Texts are trained to end with the tokenizer's end token, which may not be the model's own.
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id not in ends:
        model.generation_config.eos_token_id = [*ends, tokenizer.eos_token_id]
