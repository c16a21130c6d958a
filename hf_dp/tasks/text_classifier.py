"""The model of text classification: an encoder with a head, or one that fills in a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp.errors import ConfigError, DataError, HfDpError
from hf_dp.tasks.models import ClassifierArguments, labels_of, without_weights


@dataclass
class ModelArguments(ClassifierArguments):
    """Which model starts, and how it classifies."""

    infilling: dict | str | None = field(
        default=None,
        metadata={
            "help": "Classify by filling in a word: sst2, mnli, qnli or qqp for the papers' "
            "templates; in YAML also {template: '<S1> It was [MASK] .', label_words: {negative: "
            "terrible, positive: great}}. Default: a new head.",
        },
    )


def load_classifier(
    arguments: ModelArguments, text_columns: Sequence[str], names: Sequence[str]
) -> tuple[Any, Any]:
    """Return model and tokenizer: with a new head, or with a template in the tokenizer.

    Args:
        text_columns: the columns of text, as many as the template takes.
        names: the classes, in the order of their ids.

    Raises:
        ConfigError: the template takes another number of texts, or does not go with random weights.
        DataError: model or tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    from hf_dp.tasks.files import resolve_model
    from hf_dp.tasks.infilling import load_infilling

    infilling = _infilling(arguments, text_columns)
    path = resolve_model(arguments.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if infilling is not None:
            return load_infilling(path, tokenizer, infilling, names)
        return _with_head(path, names, arguments.from_scratch), tokenizer
    except HfDpError:
        raise  # its message is complete; some are also a ValueError
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {arguments.model_name_or_path!r} could not be loaded: "
            f"{str(problem).splitlines()[0]} Give a Hub name, a folder with config.json, weights "
            "and tokenizer, or package:NAME."
        ) from problem


def _infilling(arguments: ModelArguments, text_columns: Sequence[str]) -> Any:
    """Return the template and its label words, or None for a head. Raises: ConfigError."""
    from hf_dp.tasks.templates import Infilling

    if arguments.infilling is None:
        return None
    infilling = Infilling.of(arguments.infilling)
    if infilling.template.texts != len(text_columns):
        raise ConfigError(
            f"The template {infilling.template.text!r} takes {infilling.template.texts} text "
            f"column(s), but `text_columns` names {list(text_columns)}. Name as many columns as "
            "the template has texts."
        )
    if arguments.from_scratch:
        raise ConfigError(
            "`from_scratch` does not go with `infilling`: random weights know no words. Use a head."
        )
    return infilling


def _with_head(path: str, names: Sequence[str], from_scratch: bool) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    auto, labels = AutoModelForSequenceClassification, labels_of(names)
    if from_scratch:
        return without_weights(auto, AutoConfig.from_pretrained(path, **labels))
    model, info = auto.from_pretrained(path, output_loading_info=True, **labels)
    model.newly_initialized = sorted(info["missing_keys"])
    return model
