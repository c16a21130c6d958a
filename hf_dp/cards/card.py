"""The model card (README.md) of a private run: the privacy statement first, then everything else.

Every value that hf_dp did not write itself is data. It goes into YAML through a YAML writer, and
into Markdown escaped. Since cards are published, a local path is reduced to its last component.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template

from hf_dp.accounting import LOSS, SUM, VECTORS
from hf_dp.accounting.accountants import Answer
from hf_dp.accounting.composition import LARGE_DELTA
from hf_dp.cards.details import (
    BASE_MODEL,
    BASE_WEIGHTS,
    FRONT_MATTER,
    REPOSITORY,
    CardDetails,
    card_data,
    markdown,
    public_name,
)
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.units import EXAMPLE
from hf_dp.statement import wording
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS, UNNOISED, seen_in_pretraining
from hf_dp.statement.statement import PrivacyStatement, observed

_PARTS = {SUM: "sums of gradients", VECTORS: "released vectors", LOSS: "sums of losses"}
_UNNAMED = "it has no name, so nobody can load the adapter"
_KINDS = {"bound": "upper bound", "estimate": "estimate, not a guarantee"}


def render_card(
    statement: PrivacyStatement, details: CardDetails, *, head: str | None = None
) -> str:
    """Return the complete README.md: YAML metadata, then Markdown.

    Args: head: title and section "Privacy", where they are there already.

    Raises: InvalidArgumentError for an un-noised quantity that the run did not declare as released.
    """
    released = statement.facts.released
    _refuse_unnoised(details, released)
    training = dict(details.training)
    base_weights = training.pop(BASE_WEIGHTS, None)
    settings = "; ".join(f"{name} {value}" for name, value in _rows(training))
    about = {
        "Base model": details.base_model or (_UNNAMED if details.library_name == "peft" else None),
        "Weights of the base": base_weights,
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
    return (
        _template("privacy.md")
        .render(
            title=_title(statement, details),
            statement=statement,
            status=wording.STATUSES[statement.status],
            epsilon=wording.epsilon_text(statement.epsilon) if statement.proven else None,
            delta=wording.delta_text(statement.delta),
            unit=_unit(statement),
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


def _title(statement: PrivacyStatement, details: CardDetails) -> str:
    """Return what the model does and on which data, after its name where the user gave one."""
    does = (details.task_tag or "").replace("-", " ")
    what = f"{does}{f' on {details.dataset}' if details.dataset else ''}".strip()
    named = not does or "model_name" in details.given
    what = ": ".join(filter(None, (details.model_name, what))) if named else _capitalized(what)
    claim = "trained with differential privacy" if statement.proven else "no privacy guarantee"
    return f"{what}, {claim}"


def _unit(statement: PrivacyStatement) -> str:
    """Return what a card's first line says is protected, in a few words."""
    if statement.plan.users is not None:
        return f"one {statement.plan.users.name}"
    row = "one chunk of a text" if statement.rows_are_chunks else "one row of the training set"
    return row if statement.unit_code == EXAMPLE else f"the text (or image) of {row}"


def privacy_head(card: str) -> str | None:
    """Return a card's text from the title, since a comment or fence opened there would hide what
    follows, to the end of its section "Privacy"; None unless there is exactly one."""
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
    if details.library_name == "peft" and not details.base_model:
        return f"# The base: {_UNNAMED}."
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
        return markdown(row.accountant), "-", markdown(row.short or row.note)
    kind = _KINDS.get(found.kind, "")
    if statement.proven and row.accountant == statement.accountant:
        kind += ": **the epsilon of this card**"
    kind += wording.point_estimate(found)
    return markdown(row.accountant), wording.epsilon_text(found.value), kind


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


# -- the guarantee for a reader who knows no differential privacy ---

FALSE_ALARMS = 0.01  # of 100 rows that were not used, one is taken for used


def most_found(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """Return the largest share of used rows that any test recognizes.

    Of the rows that were not used it takes ``false_alarms`` for used. (epsilon, delta) bounds both
    kinds of error: ``found <= e^epsilon false + delta`` and ``1 - found >= e^-epsilon (1 - delta -
    false)`` (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015, theorem 2.1).
    """
    grown = min(epsilon, 50.0)  # beyond, the first bound is above 1 whatever delta is
    one = math.exp(grown) * false_alarms + delta
    other = 1 - math.exp(-epsilon) * max(0.0, 1 - delta - false_alarms)
    return min(1.0, one, other)


def in_short(statement: PrivacyStatement) -> list[str]:
    """Return, as Markdown, what is protected, against whom, by how much, and what is not."""
    if not statement.proven:
        return _without_a_guarantee(statement)
    plan, users = statement.plan, statement.plan.users
    row, count = "chunk of a text" if statement.rows_are_chunks else "row", plan.num_examples
    what = f"each single {row} of the training set ({count:,} rows)"
    knows, several = "all other rows", "rows"
    if users is not None:
        name, knows = markdown(users.name), "the rows of all others"
        several = f"values in the column {markdown(repr(users.column))}"
        what = f"each single {name} in the training set, with all of its rows ({count:,} in all)"
    elif statement.unit_code != EXAMPLE:
        what = (
            f"the text (or image) of each single {row} of the training set, not its label "
            f"({count:,} rows)"
        )
    beside = ""
    if statement.status == wording.PROVEN_WEIGHTS_ONLY:
        beside = ", but not what else was released"
    found = most_found(statement.epsilon or 0.0, statement.delta)
    strength = (
        f"**How strongly:** {_judged(found)}. {_guessed(_in_100(found), users is not None)} "
        "A blind guess names 1 in 100, and without privacy it may be all."
    )
    if statement.delta >= LARGE_DELTA:
        strength += (
            f" A large delta: {markdown(wording.delta_text(statement.delta))} is roughly the "
            "chance that all this fails. Far less than 1 in 10,000 is customary."
        )
    return [
        f"**Protects** {what}: whether and how it was used for training. It holds against anyone "
        f"who has the weights{beside}, also if they know {knows} and how the model was trained.",
        strength,
        f"**Does not protect** a person with several {several} as much, nor what the base model "
        "learned before, nor evaluation data. The full list is below.",
    ]


def _without_a_guarantee(statement: PrivacyStatement) -> list[str]:
    why = (
        "the published analysis of this method does not hold for what ran (the reasons are below)"
        if statement.status == wording.NOT_ESTABLISHED and not observed(statement.facts)
        else markdown(statement.status_reason)
    )
    return [
        "**Protects** nothing that anyone could rely on: treat these weights as if they had been "
        "trained without any privacy protection.",
        f"**Why:** {why}. The numbers below are for the record; no epsilon follows from them.",
    ]


def _guessed(found: str, users: bool) -> str:
    if users:
        which, wrong, used = "whose rows", "of those whose were not", "of those whose were"
    else:
        which, wrong, used = "which rows", "unused rows", "used rows"
    return (
        f"Somebody who guesses {which} were used, and wrongly names 1 in 100 {wrong}, names at "
        f"most {found} in 100 {used}."
    )


def _in_100(share: float) -> str:
    """Return a share in percent, rounded up, so that "at most" stays true."""
    digits = 0 if share < 0.9 else 2 if share < 0.9999 else 4
    return f"{min(100.0, math.ceil(share * 100 * 10**digits) / 10**digits):g}"


def _judged(found: float) -> str:
    if found <= 0.05:
        return "strongly"
    return "moderately" if found <= 0.5 else "weakly; by itself this promises little"
