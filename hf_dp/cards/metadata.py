"""A card's YAML block: what the Hub understands, and ``differential_privacy`` for programs."""

from __future__ import annotations

import re

import yaml
from huggingface_hub import EvalResult, ModelCardData

from hf_dp._dataclasses import plain
from hf_dp.cards.details import CardDetails
from hf_dp.cards.escaping import one_line, public_name
from hf_dp.statement.statement import PrivacyStatement

FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)^---\r?\n", re.MULTILINE | re.DOTALL)
# Metrics of `evaluate` that a leaderboard can compare.
METRICS = frozenset(
    "accuracy bertscore bleu exact_match f1 matthews_correlation mean_iou meteor nist pearsonr "
    "perplexity precision recall rouge rouge1 rouge2 rougeL rougeLsum sacrebleu spearmanr ter "
    "wer".split()
)
KEY = "differential_privacy"
TAG = "hf_dp"
CLAIMS = ("differential-privacy", "dp-sgd")  # a search for them must not find what is not private


def card_data(statement: PrivacyStatement, details: CardDetails) -> ModelCardData:
    """Return the YAML block of a card.

    What the Hub checks against its lists, or links to, is left out when it is unknown.
    """
    results = eval_results(details)
    return ModelCardData(
        license=details.license or "unknown",
        license_name=details.license_name,
        license_link=details.license_link,
        language=list(details.language) or None,
        library_name=one_line(details.library_name),
        base_model=details.hub_base,
        datasets=None if details.hub_dataset is None else [details.hub_dataset],
        pipeline_tag=details.task_tag,
        tags=_tags(statement, details.tags),
        model_name=details.model_name if results else None,
        eval_results=results or None,
        **{KEY: plain(statement.to_dict())},
    )


def _tags(statement: PrivacyStatement, given: tuple[str, ...]) -> list[str]:
    tags = [tag for tag in map(public_name, given) if tag]
    if statement.proven:
        tags += [CLAIMS[0], statement.plan.words.tag]
    else:
        tags = [tag for tag in tags if tag not in CLAIMS]
    return list(dict.fromkeys([*tags, TAG]))


def eval_results(details: CardDetails) -> list[EvalResult]:
    """Return the scores for the Hub's ``model-index``: metrics of a data set that the Hub knows."""
    if details.hub_dataset is None or details.task_tag is None:
        return []
    dataset = details.dataset or details.hub_dataset
    scores = [
        (*of_metric(name, details.evaluation_split), value)
        for name, value in details.metrics.items()
        if value is not None
    ]
    return [
        EvalResult(
            task_type=details.task_tag,
            dataset_type=details.hub_dataset,
            dataset_name=dataset,
            dataset_config="/".join(dataset.split("/")[2:]) or None,
            dataset_split=split,
            metric_type=metric,
            metric_value=float(value),
        )
        for split, metric, value in scores
        if metric in METRICS
    ]


def of_metric(name: str, split: str | None) -> tuple[str | None, str]:
    """Return split and metric of a Trainer's name: "eval_validation_matched_f1" is the f1 of
    "validation_matched"; where the name has no split, it is ``split``."""
    text = name.removeprefix("eval_")
    for metric in sorted(METRICS, key=len, reverse=True):
        if text == metric:
            return split, metric
        if text.endswith(f"_{metric}"):
            return text.removesuffix(f"_{metric}"), metric
    return split, text


def front_matter(card: str) -> dict[str, object]:
    """Return the YAML block at the beginning of a card; empty without one.

    Raises: ValueError for a block that cannot be read, or in which a key stands twice.
    """
    found = FRONT_MATTER.match(card)
    if found is None:
        return {}
    try:
        node = yaml.compose(found[1], Loader=yaml.SafeLoader)
        values = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise ValueError(f"its YAML block is not valid: {error}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError("its YAML block is not a mapping of names to values")
    keys = [getattr(key, "value", None) for key, _ in node.value]
    if len(set(keys)) < len(keys):
        raise ValueError("a key stands twice in its YAML block")
    return values
