"""The layouts of data that the generation tasks read: columns to a prompt and its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dp.errors import DataError
from hf_dp.tasks.generation import dart, e2e, persona_chat


@dataclass(frozen=True)
class Written:
    """What one row says.

    Attributes:
        prompt: what the model is given; empty where it writes freely.
        targets: the texts that it should write; several where a row has several references.
    """

    prompt: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Format:
    """A layout of data.

    Attributes:
        help: one line.
        columns: which columns a row needs, that of the targets last: the names of arguments for
            columns that the user names.
        read: makes a prompt and its targets from the values of these columns.
        write: makes the value of the last column from one text; its inverse.
    """

    help: str
    columns: tuple[str, ...]
    read: Callable[..., Written]
    write: Callable[[str], Any] = str


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


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
        lambda table, text: Written(
            f" {e2e.linearized(table)}", tuple(f" {one}" for one in _texts(text))
        ),
    ),
    "dart": Format(
        "DART: triples (tripleset, annotations)",
        ("tripleset", "annotations"),
        lambda triples, notes: Written(
            f" {dart.linearized(triples)}", tuple(f" {one}" for one in notes["text"])
        ),
        lambda text: {"text": [text]},
    ),
    "persona_chat": Format(
        "Persona-Chat: dialogs (personality, history, candidates)",
        ("personality", "history", "candidates"),
        lambda personality, history, candidates: Written(
            persona_chat.linearized(personality, history), (f" {candidates[-1]}",)
        ),
        lambda text: [text],
    ),
}
MESSAGES = "messages"  # turns, which a chat template writes: see chat.py
NAMES = (*FORMATS, MESSAGES)


def columns_of(name: str, named: Mapping[str, str | None]) -> list[str]:
    """Return the columns that a layout reads.

    Args:
        name: of :data:`FORMATS`.
        named: the columns that the user named, by argument.

    Raises: DataError for a column that has to be named and is not.
    """
    columns = []
    for column in FORMATS[name].columns:
        if column.endswith("_column") and not named.get(column):
            raise DataError(
                f"data_format {name!r} needs `{column}`: {FORMATS[name].help}. Name the column."
            )
        columns.append(named[column] if column.endswith("_column") else column)
    return [str(column) for column in columns]


def read_row(name: str, values: Sequence[Any], row: int) -> Written:
    """Return what the values of a row's columns say.

    Args:
        values: in the order of :func:`columns_of`.
        row: its index, for the message.

    Raises: DataError for a value of another kind, or a row without any target.
    """
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
