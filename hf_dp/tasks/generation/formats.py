"""The layouts of data that the generation tasks read: columns to a prompt and its targets.

Besides pairs and free texts these are the data sets of Li et al. (2021): E2E (Novikova et al.,
2017), DART (Nan et al., 2021) and Persona-Chat (Zhang et al., 2018). Synthetic tables in E2E's
columns are built in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_dp.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass(frozen=True)
class Written:
    """What one row says."""

    prompt: str  # what the model is given; empty where it writes freely
    targets: tuple[str, ...]  # what it should write; several where there are several references


@dataclass(frozen=True)
class Format:
    """A layout of data: which columns a row needs, that of the targets last, and how they are read.

    A column that the user names is called as the argument, ``..._column``.
    """

    help: str
    columns: tuple[str, ...]
    read: Callable[..., Written]  # takes the values of these columns
    write: Callable[[str], object] = str  # makes the value of the last column from one text


_CELL = re.compile(r"\s*([^\[\],]+?)\s*\[([^\]]*)\]\s*(?:,|$)")
# The words for a key of E2E, as the tables of Li et al., appendix O, table 11, show them.
_WORDS = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
# Of Persona-Chat: 2 * max_history + 1 with max_history 2, as in the code that Li et al. build on.
LATEST_UTTERANCES = 5


def e2e_table(meaning: str) -> str:
    """Return a table as text: ``name[Aromi], eatType[pub]`` -> ``name : Aromi | Type : pub``.

    Source: Li et al. (2021), appendices M and O; a table of theirs has the columns of the Hub's
    ``e2e_nlg`` in their order.

    Raises: DataError for a text that is not of the form ``key[value], key[value]``.
    """
    cells, at = [], 0
    while at < len(meaning):
        found = _CELL.match(meaning, at)
        if found is None:
            raise DataError(
                f"Expected a meaning representation like 'name[Aromi], eatType[pub]', got "
                f"{meaning!r}, which ends to be one at {meaning[at : at + 20]!r}. Correct the row, "
                "or use data_format: pairs."
            )
        key, value = found.groups()
        cells.append(f"{_WORDS.get(key, key)} : {value.strip()}")
        at = found.end()
    return " | ".join(cells)


def dart_triples(triples: Sequence[Sequence[str]]) -> str:
    """Return triples of DART as text: ``[[A, IS_PART_OF, B]]`` -> ``A : is part of : B``.

    Source: Li et al. (2021), appendix O, table 12.

    Raises: DataError for what is not a list of triples.
    """
    if any(len(triple) != 3 for triple in triples):
        raise DataError(
            f"Expected triples of subject, predicate and object, got {triples!r}. Correct the row, "
            "or use data_format: pairs."
        )
    return " | ".join(
        f"{subject} : {predicate.lower().replace('_', ' ')} : {value}"
        for subject, predicate, value in triples
    )


def persona_dialog(personality: Sequence[str], history: Sequence[str]) -> str:
    """Return a persona and the latest utterances as text; the reply follows.

    Li et al. mark the speakers by new tokens, as the code that they build on does. Here they are
    words, so that no model needs new embeddings.

    Args: history: utterances in turn, of which the partner's is the last.
    """
    latest = list(history)[-LATEST_UTTERANCES:]
    speakers = ["partner" if (len(latest) - i) % 2 else "self" for i in range(len(latest))]
    turns = [f"{who} : {words}" for who, words in zip(speakers, latest)]
    return "\n".join(["persona : " + " ".join(personality), *turns, "self :"])


def _texts(value: str | Sequence[str], before: str = "") -> tuple[str, ...]:
    each = [value] if isinstance(value, str) else value
    return tuple(f"{before}{one}" if before else one for one in each)  # not text stays as it is


# A text inside a sentence begins with a space in the vocabularies of GPT-2 and its like.
FORMATS: Mapping[str, Format] = {
    "pairs": Format(
        "prompt_column and target_column (a text, or a list of references)",
        ("prompt_column", "target_column"),
        lambda prompt, target: Written(prompt, _texts(target)),
    ),
    "text": Format(
        "text_column: the model writes freely",
        ("text_column",),
        lambda text: Written("", _texts(text)),
    ),
    "e2e": Format(
        "E2E: restaurants (meaning_representation, human_reference)",
        ("meaning_representation", "human_reference"),
        lambda table, text: Written(f" {e2e_table(table)}", _texts(text, " ")),
    ),
    "dart": Format(
        "DART: triples (tripleset, annotations)",
        ("tripleset", "annotations"),
        lambda triples, notes: Written(f" {dart_triples(triples)}", _texts(notes["text"], " ")),
        lambda text: {"text": [text]},
    ),
    "persona_chat": Format(
        "Persona-Chat: dialogs (personality, history, candidates)",
        ("personality", "history", "candidates"),
        lambda personality, history, candidates: Written(
            persona_dialog(personality, history), (f" {candidates[-1]}",)
        ),
        lambda text: [text],
    ),
}
MESSAGES = "messages"  # turns, which a chat template writes
NAMES = (*FORMATS, MESSAGES)


def read_row(name: str, values: Sequence[object], row: int) -> Written:
    """Return what the values of a row's columns say. Raises: DataError, naming the row, for a value
    of another kind, or without any target."""
    try:
        written = FORMATS[name].read(*values)
        fits = isinstance(written.prompt, str) and all(isinstance(t, str) for t in written.targets)
    except DataError as problem:
        raise DataError(f"Row {row}: {problem}") from problem
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        fits, written = False, Written("", ())
    if not fits:
        kinds = [type(value).__name__ for value in values]
        raise DataError(
            f"Row {row} does not have the values of data_format {name!r} "
            f"({FORMATS[name].help}): they are {kinds}. Drop or correct such rows."
        )
    if not written.targets:
        raise DataError(
            f"Row {row} has no target, so there is nothing to learn or to compare with. Drop it."
        )
    return written


# -- built-in rows: made by rule, they hold nobody's data and show that a recipe runs, no more --

_FIRST = ("Golden", "Silver", "Quiet", "Green", "Old", "Little", "Blue", "Merry", "Lucky", "Stone")
_SECOND = ("Fern", "Harbor", "Lantern", "Kettle", "Orchard", "Garden", "Bridge", "Clock", "Anchor")
_VALUES = {
    "eatType": ("restaurant", "pub", "coffee shop"),
    "food": ("Italian", "Indian", "Chinese", "French", "Greek"),
    "priceRange": ("cheap", "moderate", "high"),
    "area": ("riverside", "city center"),
    "familyFriendly": ("yes", "no"),
}
_SENTENCES = (
    "{name} is a {priceRange} {eatType} in the {area} that serves {food} food.{family}",
    "In the {area} there is a {eatType} called {name}, with {food} food at {priceRange} prices."
    "{family}",
    "{name} serves {food} food. It is a {priceRange} {eatType} in the {area}.{family}",
)
_FAMILY = {"yes": " Families are welcome.", "no": " It is not for families."}


def demo_tables(num_train: int = 2_000, num_validation: int = 100) -> DatasetDict:
    """Return rows of ``meaning_representation`` and ``human_reference``: ``train``, ``validation``.

    The two share no name, so no row of one is in the other.
    """
    from datasets import Dataset, DatasetDict

    half = len(_SECOND) // 2
    train = _rows("train", num_train, _SECOND[half:])
    validation = _rows("validation", num_validation, _SECOND[:half])
    splits = {"train": train, "validation": validation}
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def _rows(split: str, count: int, names: tuple[str, ...]) -> list[dict[str, str]]:
    chosen = random.Random(split)
    rows = []
    for _ in range(count):
        name = f"The {chosen.choice(_FIRST)} {chosen.choice(names)}"
        cells = {key: chosen.choice(values) for key, values in _VALUES.items()}
        table = ", ".join(f"{key}[{value}]" for key, value in {"name": name, **cells}.items())
        sentence = chosen.choice(_SENTENCES).format(
            name=name, family=_FAMILY[cells["familyFriendly"]], **cells
        )
        rows.append({"meaning_representation": table, "human_reference": sentence})
    return rows
