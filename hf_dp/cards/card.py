"""The model card (README.md) of a private run: the privacy statement first, then everything else.

Every value that hf_dp did not write itself is data. It goes into YAML through a YAML writer, and
into Markdown escaped. Since cards are published, a local path is reduced to its last component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined, Template

from hf_dp._version import __version__
from hf_dp.cards.commands import check_commands
from hf_dp.cards.escaping import hub_id, markdown, one_line, public_name
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.units import EXAMPLE, FEATURES, NONE
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.provenance import seen_in_pretraining
from hf_dp.statement.results import AccountantResult, epsilon_text
from hf_dp.statement.statement import (
    NOT_ESTABLISHED,
    PrivacyStatement,
)
from hf_dp.statement.unnoised import UNNOISED
from hf_dp.statement.wording import EVALUATION_ON_TRAINING_ROWS

TAGS = ("differential-privacy", "differential_privacy", "dp-sgd", "hf_dp")
NOT_PRIVATE_TAGS = ("hf_dp",)  # a search for private models must not find one that is not
UNKNOWN = "unknown"

_UNITS = {EXAMPLE: "example", FEATURES: "features of an example (labels public)", NONE: None}


def render_card(
    statement: PrivacyStatement,
    *,
    model_name: str,
    base_model: str | None = None,
    dataset: str | None = None,
    task_tag: str | None = None,
    metrics: Mapping[str, float] | None = None,
    training: Mapping[str, Any] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    tags: Iterable[str] | None = None,
    library_name: str = "transformers",
    pretraining_sources: Iterable[str] | None = None,
    usage: str | None = None,
) -> str:
    """Return the complete README.md: YAML metadata, then Markdown.

    Unknown values read "unknown". Metadata that the hub checks against its lists or links to
    (language, base model, data set, pipeline tag) is left out of the YAML block when unknown.

    Args:
        model_name: the title. Paths are reduced to their last components, here and in
            ``base_model`` and ``dataset``.
        base_model, dataset: hub ids or names.
        task_tag: the hub's pipeline tag, for example "text-classification".
        metrics: computed on evaluation data.
        training: public settings (learning rate, epochs, batch sizes, ...), shown as given.
        license, language: as the hub spells them.
        tags: tags to add.
        library_name: "transformers" or "peft".
        pretraining_sources: names of public data sets that the base has seen; the card warns when
            ``dataset`` is among them.
        usage: Python lines that load the model.

    Raises: InvalidArgumentError when ``metrics`` or ``training`` holds an un-noised quantity of the
        training rows that the run did not declare as released.
    """
    metrics, training = dict(metrics or {}), dict(training or {})
    _refuse_unnoised(list(metrics), list(training), statement.facts.released)
    sources = [one_line(source) for source in pretraining_sources or ()]
    seen = seen_in_pretraining(dataset, sources)
    hub_base, hub_dataset = hub_id(base_model), hub_id(dataset)
    base_model, dataset = public_name(base_model), public_name(dataset)
    title = public_name(model_name) or UNKNOWN
    languages = [language] if isinstance(language, str) else list(language or ())
    data = ModelCardData(
        license=public_name(license) or UNKNOWN,
        language=[one_line(item) for item in languages] or None,
        library_name=one_line(library_name),
        base_model=hub_base,
        datasets=None if hub_dataset is None else [hub_dataset],
        pipeline_tag=None if task_tag is None else one_line(task_tag),
        tags=_tags(statement, tags or ()),
        differential_privacy=metadata(statement),
    )
    body = _template().render(
        title=title,
        statement=statement,
        accountant_rows=[_accountant_row(row) for row in statement.epsilons],
        parameter_rows=_parameter_rows(statement),
        check=check_commands(statement),
        seen_in_pretraining=seen,
        not_established_reasons=statement.not_established,
        # A name with a fence in it would end the code block.
        usage=None if usage is None or "```" in usage else usage,
        about_rows=_rows(
            {
                "Base model": base_model,
                "Pretraining data, as far as listed": ", ".join(sources) or None,
                "Training data": dataset,
                "Task": task_tag,
                "Language": ", ".join(languages) or None,
                "License": license,
                "Trained": statement.facts.trained,
            }
        ),
        metric_rows=_rows(metrics),
        training_rows=_rows(training),
        version_rows=_rows({"hf_dp": __version__, **statement.facts.versions}),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body.strip()}\n"


def metadata(statement: PrivacyStatement) -> dict[str, Any]:
    """Return the value of the card's ``differential_privacy`` key, as plain data.

    ``epsilon`` is None unless the status is a proven one.
    """
    facts = statement.facts
    return {
        "status": statement.status,
        "status_reason": one_line(statement.status_reason),
        "epsilon": statement.epsilon,
        "epsilon_kind": "bound" if statement.proven else None,
        "delta": statement.delta,
        "accountant": statement.accountant if statement.proven else None,
        "epsilon_by_accountant": {
            row.accountant: {
                "epsilon": row.epsilon,
                "kind": row.kind,
                **({} if row.estimate is None else {"estimate": row.estimate}),
                **({"note": one_line(row.note)} if row.note else {}),
            }
            for row in statement.epsilons
        },
        "target_epsilon": statement.target_epsilon,
        "unit": _UNITS[statement.unit_code],
        "rows_are_chunks": statement.rows_are_chunks,
        "neighboring_relation": None if statement.status == NOT_ESTABLISHED else "zero_out",
        "mechanism": statement.mechanism_name,
        "sampling": statement.sampling_code,
        "noise_multiplier": _one_or_list(statement.noise_multipliers),
        "sample_rate": _one_or_list(statement.sample_rates),
        "steps": statement.steps,
        "steps_planned": statement.steps_planned,
        "clipping": statement.clipping,
        "clipping_norm": statement.clipping_norm,
        "expected_batch_size": statement.expected_batch_size,
        "num_examples": statement.num_examples,
        "num_examples_public": True,
        "released_without_noise": _released(facts),
        "precision": one_line(facts.precision),
        "noise_generator": one_line(facts.noise_generator),
        "sampling_generator": one_line(facts.sampling_generator),
        "events": [dict(row) for row in statement.mechanisms],
        "library": f"hf_dp {__version__}",
    }


def _refuse_unnoised(
    metrics: Iterable[str], training: Iterable[str], released: tuple[str, ...]
) -> None:
    of_training_rows = {name: name for name in metrics if name.startswith("train_")}
    if EVALUATION_ON_TRAINING_ROWS in released:
        of_training_rows = {}
    of_training_rows |= {name: UNNOISED[name] for name in (*metrics, *training) if name in UNNOISED}
    for name, quantity in of_training_rows.items():
        if quantity not in released:
            raise InvalidArgumentError(
                f"Expected no quantity of the training rows in the card, got {name!r}: it is not "
                "noised, and epsilon does not cover it. Leave it out, or release it (the "
                f"statement then lists {quantity!r})."
            )


def _tags(statement: PrivacyStatement, given: Iterable[str]) -> list[str]:
    kept = [tag for tag in map(public_name, given) if tag and (statement.proven or tag not in TAGS)]
    ours = (statement.tag if tag == "dp-sgd" else tag for tag in TAGS)
    return list(dict.fromkeys([*kept, *(ours if statement.proven else NOT_PRIVATE_TAGS)]))


def _released(facts: RunFacts) -> list[str]:
    """List what this run and the earlier runs that it names released without noise."""
    return list(dict.fromkeys(one_line(name) for run in facts.everywhere for name in run.released))


def _one_or_list(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def _accountant_row(row: AccountantResult) -> tuple[str, str, str]:
    kind = {None: "-", "bound": "upper bound", "estimate": "estimate, not a guarantee"}[row.kind]
    if row.estimate is not None:
        kind += f" (point estimate {epsilon_text(row.estimate)})"
    return (
        markdown(row.accountant),
        epsilon_text(row.epsilon) if row.epsilon is not None else "-",
        kind + _note(row),
    )


def _note(row: AccountantResult) -> str:
    return f": {markdown(row.note)}" if row.note else ""


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values, escaped for a table; None and empty values read "unknown"."""
    return [(markdown(name), _shown(value)) for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = public_name(value)
    return UNKNOWN if text is None else markdown(text)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(repr(value) for value in values)


def _parameter_rows(statement: PrivacyStatement) -> list[tuple[str, str]]:
    facts = statement.facts
    texts: dict[str, str] = {
        "Privacy unit": statement.unit,
        "Neighboring relation": statement.neighboring_relation,
        "Mechanism": statement.mechanism,
        "Sampling": statement.sampling,
        "Noise multiplier": _noise(statement),
        "Clipping norm (L2)": repr(statement.clipping_norm),
        "Clipping": statement.clipping,
        "Sample rate": _numbers(statement.sample_rates),
        "Expected batch size": f"{statement.expected_batch_size:g}",
        "Steps (run / planned)": f"{statement.steps} / {statement.steps_planned}",
        "Rows in the training set (public)": str(statement.num_examples),
        "Delta": f"{statement.delta_text} (exactly {statement.delta!r})",
        "Target epsilon": _target(statement),
        "Precision of sums and noise": facts.precision,
        "Noise generator": facts.noise_generator,
        "Sampling generator": facts.sampling_generator,
        "Privacy mode": statement.privacy_mode,
    }
    if facts.earlier:
        texts["Earlier runs on the same rows, which count"] = ", ".join(
            run.run_id for run in facts.earlier
        )
    return [(markdown(name), markdown(text) or UNKNOWN) for name, text in texts.items()]


def _target(statement: PrivacyStatement) -> str:
    if statement.target_epsilon is not None:
        return repr(statement.target_epsilon)
    return "none" if statement.status == NOT_ESTABLISHED else "none: the noise was given"


def _noise(statement: PrivacyStatement) -> str:
    """Show the noise multipliers; name those of gradients and of vectors where there are both."""
    both = [row for row in statement.mechanisms if "record_noise_multiplier" in row]
    if not both:
        return _numbers(statement.noise_multipliers)
    pairs = dict.fromkeys((row["noise_multiplier"], row["record_noise_multiplier"]) for row in both)
    return "; ".join(
        f"{sums!r} (sums of gradients), {rows!r} (released vectors)" for sums, rows in pairs
    )


@cache
def _template() -> Template:
    filters: dict[str, Callable[..., Any]] = {"md": markdown, "capitalize_first": _capitalized}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters.update(filters)
    return environment.from_string(
        resources.files(__package__).joinpath("template.md").read_text(encoding="utf-8")
    )
