"""The model card (README.md) of a private run: the privacy statement first, then everything else.

Every value that hf_dp did not write itself is data. It goes into YAML through a YAML writer, and
into Markdown escaped. Since cards are published, a local path is reduced to its last component.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template

from hf_dp.accounting import LOSS, SUM, VECTORS
from hf_dp.accounting.accountants import Answer
from hf_dp.cards.details import BASE_MODEL, REPOSITORY, CardDetails
from hf_dp.cards.escaping import markdown, public_name
from hf_dp.cards.metadata import FRONT_MATTER, card_data
from hf_dp.cards.plain_words import in_short
from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS
from hf_dp.statement.provenance import seen_in_pretraining
from hf_dp.statement.results import delta_text, epsilon_text, point_estimate
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.unnoised import UNNOISED
from hf_dp.statement.wording import STATUSES

_PARTS = {SUM: "sums of gradients", VECTORS: "released vectors", LOSS: "sums of losses"}
_KINDS = {"bound": "upper bound", "estimate": "estimate, not a guarantee"}


def render_card(
    statement: PrivacyStatement, details: CardDetails, *, head: str | None = None
) -> str:
    """Return the complete README.md: YAML metadata, then Markdown.

    Args: head: title and section "Privacy", where they are there already.

    Raises: InvalidArgumentError when metrics or settings hold an un-noised quantity of the training
        rows that the run did not declare as released.
    """
    released = statement.facts.released
    _refuse_unnoised(details, released)
    settings = "; ".join(f"{name} {value}" for name, value in _rows(details.training))
    about = {
        "Base model": details.base_model,
        "Pretraining data, as far as listed": details.pretraining_sources or None,
        "Training data": details.dataset,
        "What was trained": statement.facts.trained,
        "Recipe": details.recipe,
    }
    rows = _rows({name: value for name, value in about.items() if value is not None})
    body = _template("card.md").render(
        head=head or render_head(statement, details),
        about_rows=rows + [("Settings", settings)] * bool(settings),
        metric_rows=_rows(details.metrics),
        on_training_rows=EVALUATION_ON_TRAINING_ROWS in released,
        usage=_usage(details),
    )
    return f"---\n{card_data(statement, details).to_yaml()}\n---\n\n{body.strip()}\n"


def render_head(statement: PrivacyStatement, details: CardDetails) -> str:
    """Return a card's title and section "Privacy", which ``privacy.json`` has a digest of."""
    does = (details.task_tag or "").replace("-", " ")
    what = f"{does}{f' on {details.dataset}' if details.dataset else ''}".strip()
    claim = "no privacy guarantee"
    if statement.proven:
        claim = f"epsilon {epsilon_text(statement.epsilon)}"
    return (
        _template("privacy.md")
        .render(
            title=f"{details.model_name}: {', '.join(filter(None, (what, claim)))}",
            statement=statement,
            status=STATUSES[statement.status],
            delta=delta_text(statement.delta),
            in_short=in_short(statement),
            seen_in_pretraining=seen_in_pretraining(details.dataset, details.pretraining_sources),
            accountant_rows=[
                _accountant_row(row, statement)
                for row in statement.epsilons
                if statement.proven or row.note != statement.accountant_note
            ],
            parameter_rows=_parameter_rows(statement),
            where=details.repository or "THIS_FOLDER",
        )
        .strip()
    )


def privacy_head(card: str) -> str | None:
    """Return a card's text from the title to the end of its section "Privacy".

    All before the section belongs to it: a comment or fence opened there would hide it. Return None
    unless there is exactly one such section.
    """
    found = FRONT_MATTER.match(card)
    body = card[found.end() :] if found else card
    if len(re.findall(r"^[ \t]*#+[ \t]*privacy\b", body, re.MULTILINE | re.IGNORECASE)) != 1:
        return None
    head = re.match(r".*?^## Privacy\n.*?(?=^## |\Z)", body, re.MULTILINE | re.DOTALL)
    return None if head is None else head[0].strip()


def _usage(details: CardDetails) -> str | None:
    """Return the lines that load the model, or None; a fence in a name would end the code block."""
    if details.usage is None or "```" in details.usage:
        return None
    text = details.usage.replace(REPOSITORY, details.repository or "path/to/this/folder")
    return text.replace(BASE_MODEL, details.hub_base or "BASE_MODEL")


def _refuse_unnoised(details: CardDetails, released: tuple[str, ...]) -> None:
    found = {name: name for name in details.metrics if name.startswith("train_")}
    if EVALUATION_ON_TRAINING_ROWS in released:
        found = {}
    names = (*details.metrics, *details.training)
    found |= {name: UNNOISED[name] for name in names if name in UNNOISED}
    for name, quantity in found.items():
        if quantity not in released:
            raise InvalidArgumentError(
                f"Expected no quantity of the training rows in the card, got {name!r}: it is not "
                "noised, and epsilon does not cover it. Leave it out, or release it (the "
                f"statement then lists {quantity!r})."
            )


def _accountant_row(row: Answer, statement: PrivacyStatement) -> tuple[str, str, str]:
    found = row.epsilon
    if found is None:
        return markdown(row.accountant), "-", markdown(row.note)
    kind = _KINDS.get(found.kind, "")
    if statement.proven and row.accountant == statement.accountant:
        kind += ": **the epsilon of this card**"
    kind += point_estimate(found)
    return markdown(row.accountant), epsilon_text(found.value), kind


def _rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return names and values, escaped for a table."""
    return [(markdown(name), _shown(value)) for name, value in values.items()]


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = public_name(value)
    return "unknown" if text is None else markdown(text)


def _parameter_rows(statement: PrivacyStatement) -> list[tuple[str, str]]:
    facts, plan = statement.facts, statement.plan
    counted = "rows" if plan.users is None else f"units (each a {plan.users.name})"
    texts = {
        "Privacy unit": statement.unit,
        "Neighboring relation": statement.neighboring_relation,
        "Mechanism": statement.mechanism,
        "Sampling": plan.words.sampling,
        "Clipping and noise": f"{plan.clipping}, to an L2 norm of {plan.clipping_norm!r}; noise "
        f"multiplier {_noise(statement)}",
        "Draws": f"sample rate {_numbers(statement.sample_rates)} (expected batch size "
        f"{plan.expected_batch_size:g}); {statement.steps} of {plan.steps_recorded} steps; "
        f"{plan.num_examples} {counted} in the training set (public)",
        "Precision of sums and noise": facts.precision,
    }
    if facts.audit is not None:
        texts["Audit (from below)"] = facts.audit.in_words()
    if facts.earlier:
        names = ", ".join(run.run_id for run in facts.earlier)
        texts["Earlier runs on the same rows, which count"] = names
    return [(markdown(name), markdown(text)) for name, text in texts.items()]


def _noise(statement: PrivacyStatement) -> str:
    """Show the noise multipliers; name what each is of where a step releases more than a sum."""
    parts = dict.fromkeys(
        tuple(event.noise_multipliers.items())
        for event in statement.ledger.events
        if len(event.noise_multipliers) > 1
    )
    several = [
        ", ".join(f"{sigma!r} ({_PARTS.get(part, part)})" for part, sigma in each) for each in parts
    ]
    return "; ".join(several) or _numbers(statement.noise_multipliers)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(map(repr, values))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def _template(name: str) -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters.update({"md": markdown, "capitalize_first": _capitalized})
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(text)
