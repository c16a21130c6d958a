"""A card's YAML block: what the Hub understands, and ``differential_privacy`` for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from hf_dp._version import __version__
from hf_dp.cards.details import CardDetails
from hf_dp.cards.escaping import one_line, public_name
from hf_dp.cards.hub_rules import METRICS
from hf_dp.plans.units import EXAMPLE, FEATURES, NONE, USER, Users
from hf_dp.statement.audited import as_fields
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.statement import NOT_ESTABLISHED, PrivacyStatement

TAGS = ("differential-privacy", "dp-sgd", "hf_dp")
NOT_PRIVATE_TAGS = ("hf_dp",)  # a search for private models must not find one that is not
KEY = "differential_privacy"
_UNITS = {
    USER: "user",
    EXAMPLE: "example",
    FEATURES: "features of an example (labels public)",
    NONE: None,
}


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
        **details.metadata,
        differential_privacy=metadata(statement),
    )


def eval_results(details: CardDetails) -> list[EvalResult]:
    """Return the scores for the Hub's ``model-index``: metrics of a data set that the Hub knows."""
    if details.hub_dataset is None or details.task_tag is None:
        return []
    config = details.dataset.split("/")[2:] if details.dataset else []
    found = []
    for name, value in details.metrics.items():
        split, metric = of_metric(name, details.evaluation_split)
        if metric in METRICS and value is not None:
            found.append(
                EvalResult(
                    task_type=details.task_tag,
                    dataset_type=details.hub_dataset,
                    dataset_name=details.dataset or details.hub_dataset,
                    dataset_config=config[0] if config else None,
                    dataset_split=split,
                    metric_type=metric,
                    metric_name=metric,
                    metric_value=float(value),
                )
            )
    return found


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


def metadata(statement: PrivacyStatement) -> dict[str, Any]:
    """Return the value of the card's ``differential_privacy`` key, as plain data.

    It is what a search asks for; ``privacy.json`` beside the card has all. ``epsilon``, always an
    upper bound, is None unless the status is a proven one.
    """
    facts = statement.facts
    return {
        "status": statement.status,
        "epsilon": statement.epsilon,
        "delta": statement.delta,
        "accountant": statement.accountant if statement.proven else None,
        "unit": _UNITS[statement.unit_code],
        "rows_are_chunks": statement.rows_are_chunks,
        "neighboring_relation": None if statement.status == NOT_ESTABLISHED else "zero_out",
        "mechanism": statement.mechanism_name,
        "sampling": statement.sampling_code,
        "noise_multiplier": _one_or_list(statement.noise_multipliers),
        "sample_rate": _one_or_list(statement.sample_rates),
        "steps": statement.steps,
        "clipping": statement.clipping,
        "clipping_norm": statement.clipping_norm,
        "expected_batch_size": statement.expected_batch_size,
        **_users(statement),
        "num_examples": statement.num_examples,
        "released_without_noise": _released(facts),
        **as_fields(facts.audit),
        "library": f"hf_dp {__version__}",
    }


def _tags(statement: PrivacyStatement, given: Iterable[str]) -> list[str]:
    kept = [tag for tag in map(public_name, given) if tag and (statement.proven or tag not in TAGS)]
    ours = (statement.tag if tag == "dp-sgd" else tag for tag in TAGS)
    return list(dict.fromkeys([*kept, *(ours if statement.proven else NOT_PRIVATE_TAGS)]))


def _released(facts: RunFacts) -> list[str]:
    """List what this run and the earlier runs that it names released without noise."""
    return list(dict.fromkeys(one_line(name) for run in facts.everywhere for name in run.released))


def _users(statement: PrivacyStatement) -> dict[str, Any]:
    """Return whose rows are one unit, where it is not a row; ``num_examples`` then counts them."""
    users = statement.users
    if users is None:
        return {}
    return {
        "unit_name": one_line(users.name),
        "unit_column": one_line(users.column),
        "max_rows_per_unit": users.max_rows,
        **_drawn(users),
    }


def _drawn(users: Users) -> dict[str, Any]:
    if users.by_row:
        return {
            "unit_sampling": users.sampling,
            "num_rows": users.num_rows,
        }
    return {"unit_sampling": users.sampling, "unit_reduction": users.reduction}


def _one_or_list(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def front_matter(card: str) -> dict[str, Any]:
    """Return the YAML block at the beginning of a card; empty without one.

    Raises: ValueError for a block that cannot be read, or in which a key stands twice.
    """
    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        node = yaml.compose(parts[1], Loader=yaml.SafeLoader)
        values = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(f"its YAML block is not valid: {error}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError("its YAML block is not a mapping of names to values")
    keys = [getattr(key, "value", None) for key, _ in node.value]
    if len(set(keys)) < len(keys):
        raise ValueError("a key stands twice in its YAML block")
    return values
