"""The model card (README.md) of a private run: the privacy statement first, then everything else.

Every value that hf_dp did not write itself is data. It goes into YAML through a YAML writer, and
into Markdown escaped. Since cards are published, a local path is reduced to its last component.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from hf_dp.accounting import LOSS, SUM, VECTORS, event_from_dict
from hf_dp.cards.details import BASE_MODEL, REPOSITORY, CardDetails
from hf_dp.cards.escaping import markdown, public_name
from hf_dp.cards.metadata import card_data
from hf_dp.cards.plain_words import in_short
from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.provenance import seen_in_pretraining
from hf_dp.statement.results import AccountantResult, epsilon_text
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.unnoised import UNNOISED
from hf_dp.statement.wording import EVALUATION_ON_TRAINING_ROWS

UNKNOWN = "unknown"
_FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_PARTS = {SUM: "sums of gradients", VECTORS: "released vectors", LOSS: "sums of losses"}


def render_card(
    statement: PrivacyStatement,
    details: CardDetails,
    *,
    repository: str | None = None,
    head: str | None = None,
) -> str:
    """Return the complete README.md: YAML metadata, then Markdown.

    Unknown values read "unknown".

    Args:
        repository: id on the Hub, for the lines that check and load the model; None before it has
            one.
        head: title and section "Privacy", where they are there already.

    Raises: InvalidArgumentError when metrics or settings hold an un-noised quantity of the training
        rows that the run did not declare as released.
    """
    _refuse_unnoised(list(details.metrics), list(details.training), statement.facts.released)
    dataset = details.dataset
    body = _template().render(
        head=head or render_head(statement, details, repository),
        usage=_usage(details, repository),
        about_rows=_rows(
            {
                "Base model": details.base_model,
                "Pretraining data, as far as listed": details.pretraining_sources or None,
                "Training data": dataset,
                "What was trained": statement.facts.trained,
                "Recipe": details.recipe,
            }
        ),
        on_training_rows=EVALUATION_ON_TRAINING_ROWS in statement.facts.released,
        metric_rows=_rows(details.metrics),
        settings=[f"{name} {value}" for name, value in _rows(details.training)],
    )
    return f"---\n{card_data(statement, details).to_yaml()}\n---\n\n{body.strip()}\n"


def render_head(
    statement: PrivacyStatement, details: CardDetails, repository: str | None = None
) -> str:
    """Return a card's title and section "Privacy", which ``privacy.json`` has a digest of."""
    seen = seen_in_pretraining(details.dataset, details.pretraining_sources)
    return (
        _template("privacy.md")
        .render(
            title=title_of(statement, details),
            statement=statement,
            in_short=in_short(statement),
            seen_in_pretraining=seen,
            accountant_rows=[_accountant_row(row, statement) for row in statement.epsilons],
            parameter_rows=_parameter_rows(statement),
            where=repository or "THIS_FOLDER",
        )
        .strip()
    )


def title_of(statement: PrivacyStatement, details: CardDetails) -> str:
    """Return what the model does, and at which epsilon."""
    does = (details.task_tag or "").replace("-", " ")
    data = f" on {details.dataset}" if details.dataset else ""
    what = f"{does}{data}".strip()
    claim = f"epsilon {statement.epsilon_text}" if statement.proven else "no privacy guarantee"
    return f"{details.model_name or UNKNOWN}: {what + ', ' if what else ''}{claim}"


def privacy_head(card: str) -> str | None:
    """Return a card's text from the title to the end of its section "Privacy".

    All before the section belongs to it: a comment or fence opened there would hide it. Return None
    unless there is exactly one such section.
    """
    found = _FRONT_MATTER.match(card)
    body = card[found.end() :] if found else card
    if len(re.findall(r"^[ \t]*#+[ \t]*privacy\b", body, re.MULTILINE | re.IGNORECASE)) != 1:
        return None
    head = re.match(r".*?^## Privacy\n.*?(?=^## |\Z)", body, re.MULTILINE | re.DOTALL)
    return None if head is None else head[0].strip()


def repository_of(head: str) -> str | None:
    """Return the repository for which a card was made, as its own command names it."""
    found = re.search(r"`hf-dp verify ([^`\s]+)`", head)
    return None if found is None or found[1] == "THIS_FOLDER" else found[1]


def _usage(details: CardDetails, repository: str | None) -> str | None:
    """Return the lines that load the model, or None; a fence in a name would end the code block."""
    if details.usage is None or "```" in details.usage:
        return None
    text = details.usage.replace(REPOSITORY, repository or "path/to/this/folder")
    return text.replace(BASE_MODEL, details.hub_base or "BASE_MODEL")


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


def _accountant_row(row: AccountantResult, statement: PrivacyStatement) -> tuple[str, str, str]:
    if row.epsilon is None:
        return markdown(row.accountant), "-", markdown(row.note)
    kind = {None: "", "bound": "upper bound", "estimate": "estimate, not a guarantee"}[row.kind]
    if statement.proven and row.accountant == statement.accountant:
        kind += ": **the epsilon of this card**"
    if row.estimate is not None:
        kind += f" (point estimate {epsilon_text(row.estimate)})"
    return markdown(row.accountant), epsilon_text(row.epsilon), kind


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
        "Clipping": f"{statement.clipping}, to an L2 norm of {statement.clipping_norm!r}",
        "Sample rate": f"{_numbers(statement.sample_rates)} (expected batch size "
        f"{statement.expected_batch_size:g})",
        "Steps (run / planned)": f"{statement.steps} / {statement.steps_planned}",
        _counted(statement): str(statement.num_examples),
        "Precision of sums and noise": facts.precision,
    }
    if facts.audit is not None:
        texts["Audit (from below)"] = facts.audit.in_words()
    if facts.earlier:
        texts["Earlier runs on the same rows, which count"] = ", ".join(
            run.run_id for run in facts.earlier
        )
    return [(markdown(name), markdown(text) or UNKNOWN) for name, text in texts.items()]


def _counted(statement: PrivacyStatement) -> str:
    what = "Rows" if statement.users is None else f"Units (each a {statement.users.name})"
    return f"{what} in the training set (public)"


def _noise(statement: PrivacyStatement) -> str:
    """Show the noise multipliers; name what each is of where a step releases more than a sum."""
    events = (
        event_from_dict({name: row[name] for name in row if name != "purpose"})
        for row in statement.mechanisms
    )
    several = dict.fromkeys(
        tuple(event.noise_multipliers.items())
        for event in events
        if len(event.noise_multipliers) > 1
    )
    return "; ".join(
        ", ".join(f"{sigma!r} ({_PARTS.get(part, part)})" for part, sigma in parts)
        for parts in several
    ) or _numbers(statement.noise_multipliers)


@cache
def _template(name: str = "card.md") -> Template:
    filters: dict[str, Callable[..., Any]] = {"md": markdown, "capitalize_first": _capitalized}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters.update(filters)
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(text)
