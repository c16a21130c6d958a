"""The arguments of the generation tasks: which rows, how the model writes; and the layouts of data
that they read, columns to a prompt and its targets.

Besides pairs and free texts these are the data sets of Li et al. (2021): E2E (Novikova et al.,
2017), DART (Nan et al., 2021) and Persona-Chat (Zhang et al., 2018).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_dp._arguments import argument
from hf_dp._validate import in_unit_interval, integer, invalid, one_of, positive
from hf_dp.errors import DataError
from hf_dp.tasks.sources import SourceArguments

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
    A column that the user names is called as the argument, ``..._column``."""

    help: str
    columns: tuple[str, ...]
    read: Callable[..., Written]  # takes the values of these columns
    write: Callable[[str], object] = str  # makes the value of the last column from one text


@dataclass(frozen=True)
class Table(Format):
    """Rows of several columns, each a line of a text: ``age: 31``. The model writes all of them."""

    def columns_of(self, text: str) -> dict[str, object] | None:
        """Return the columns that a text makes; None for one that has not all of them."""
        lines = text.strip().split("\n")
        named = [line.startswith(f"{name}:") for name, line in zip(self.columns, lines)]
        if not all(named) or len(lines) != len(self.columns):
            return None
        pairs = zip(self.columns, lines, strict=True)
        return {name: line.removeprefix(f"{name}:").strip() for name, line in pairs}


_CELL = re.compile(r"\s*([^\[\],]+?)\s*\[([^\]]*)\]\s*(?:,|$)")
# The words for a key of E2E, as the tables of Li et al., appendix O, table 11, show them.
_WORDS = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
# Of Persona-Chat: 2 * max_history + 1 with max_history 2, as in the code that Li et al. build on.
LATEST_UTTERANCES = 5


def e2e_table(meaning: str) -> str:
    """Return a table as text: ``name[Aromi], eatType[pub]`` -> ``name : Aromi | Type : pub``.
    Source: Li et al. (2021), appendices M and O; a table of theirs has the columns of the Hub's
    ``e2e_nlg`` in their order."""
    cells, at = [], 0
    while at < len(meaning):
        found = _CELL.match(meaning, at)
        if found is None:
            raise DataError(
                "Expected a meaning representation like 'name[Aromi], eatType[pub]', got "
                f"{meaning!r}, not readable from {meaning[at : at + 20]!r}. Correct the row, "
                "or use data_format: pairs."
            )
        key, value = found.groups()
        cells.append(f"{_WORDS.get(key, key)} : {value.strip()}")
        at = found.end()
    return " | ".join(cells)


def dart_triples(triples: Sequence[Sequence[str]]) -> str:
    """Return triples of DART as text: ``[[A, IS_PART_OF, B]]`` -> ``A : is part of : B``. Source:
    Li et al. (2021), appendix O, table 12."""
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
TABLE = "table"  # rows of the columns that the user names
NAMES = (*FORMATS, TABLE, MESSAGES)


def _table(names: Sequence[str]) -> Table:
    """Return the layout of rows of these columns. White space in a value is one space."""

    def read(*values: object) -> Written:
        if any(isinstance(value, (list, dict, bytes)) for value in values):
            raise TypeError
        cells = ["" if value is None else " ".join(str(value).split()) for value in values]
        lines = [f"{name}: {cell}" for name, cell in zip(names, cells, strict=True)]
        return Written("", ("\n".join(lines),))

    return Table("rows of `columns`, texts or numbers: the model writes freely", tuple(names), read)


def read_row(layout: Format, values: Sequence[object], row: int) -> Written:
    """Return what the values of a row's columns say.

    Raises: DataError, naming the row, for a value of another kind, or without any target.
    """
    try:
        written = layout.read(*values)
        fits = isinstance(written.prompt, str) and all(isinstance(t, str) for t in written.targets)
    except DataError as problem:
        raise DataError(f"Row {row}: {problem}") from problem
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        fits, written = False, Written("", ())
    if not fits:
        kinds = [type(value).__name__ for value in values]
        raise DataError(
            f"Row {row} does not have the values of its data_format ({layout.help}): they are "
            f"{kinds}. Drop or correct such rows."
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
    The two share no name, so no row of one is in the other."""
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


@dataclass
class TextArguments(SourceArguments):
    """Which rows, and how they become a prompt and a target."""

    demo_name = "hf_dp demo tables (synthetic)"

    data_format: str = argument("pairs", f"Layout of the rows: {', '.join(NAMES)}.")
    prompt_column: str | None = argument(None, "With pairs: the column that the model reads.")
    target_column: str | None = argument(None, "With pairs: the column that it should write.")
    text_column: str | None = argument(None, "With text: the column that it should write.")
    columns: list[str] = argument([], "With table: the columns that it should write.")
    messages_column: str = argument(
        "messages", "With messages: the column of turns, each with role and content."
    )
    separator: str | None = argument(
        None,
        "Text between prompt and target, for a decoder. Default: the token that begins "
        "and ends texts where it is one (GPT-2), else a line break.",
    )
    max_length: int = argument(
        100,
        "Longest sequence in tokens: prompt and target of a decoder, the prompt of an "
        "encoder-decoder. Targets are cut.",
    )
    max_target_length: int = argument(100, "Longest target of an encoder-decoder, in tokens.")
    cut_prompts: bool = argument(False, "Cut the front off prompts that are too long.")
    drop_long_rows: bool = argument(
        False,
        "Leave rows that are longer than max_length (or whose target is longer than "
        "max_target_length) out of training instead of cutting them. N, sampling rate and delta "
        "then refer to what is left. Evaluation rows stay.",
    )
    metrics: list[str] = argument(
        ["bleu", "rougeL"], "Scores of the generated texts; none: generate nothing."
    )

    bertscore_model: str | None = argument(
        None, "With bertscore_f1: the local folder of an encoder."
    )

    def __post_init__(self) -> None:
        one_of("data_format", self.data_format, NAMES)
        integer("max_length", self.max_length, 2)
        integer("max_target_length", self.max_target_length, 1)

    @property
    def layout(self) -> Format:
        """Return the layout of the rows, other than of messages."""
        if self.data_format != TABLE:
            return FORMATS[self.data_format]
        if not self.columns or len(set(self.columns)) < len(self.columns):
            expected = "to name at least one column, each once, with data_format: table"
            raise invalid("columns", self.columns, expected, "List them in the order of the text.")
        for name in self.columns:
            if " ".join(name.split()) != name:
                expected = "to have names without white space but single spaces between words"
                raise invalid("columns", name, expected, "Rename the column in the file.")
        return _table(self.columns)

    def demo(self) -> DatasetDict:
        """Return the demonstration tables."""
        return demo_tables()


BEAM, NUCLEUS, GREEDY = "beam", "nucleus", "greedy"


@dataclass
class DecodingArguments:
    """How the model writes.

    Beams, and the share of probability, are those of Li et al. (2021), appendix K.
    """

    decoding: str = argument(BEAM, f"{BEAM}, {NUCLEUS} (sampling) or {GREEDY}.")
    num_beams: int = argument(5, "Beams, with beam.")
    top_p: float = argument(0.9, "Share of probability to sample from, with nucleus.")
    temperature: float = argument(1.0, "Of sampling, with nucleus.")
    max_new_tokens: int = argument(100, "Longest text, in tokens.")
    stop: list[str] = argument([], "Texts that end a generation, as the model's end token does.")
    one_line: bool = argument(False, "Forbid line breaks: no token that has one is chosen.")
    decoding_batch_size: int = argument(16, "Prompts at a time.")
    decoding_seed: int = argument(0, "Seed of sampling.")
    max_decoded: int | None = argument(None, "Decode and score the first prompts only.")

    def __post_init__(self) -> None:
        one_of("decoding", self.decoding, (BEAM, NUCLEUS, GREEDY))
        for name in ("num_beams", "max_new_tokens", "decoding_batch_size"):
            integer(name, getattr(self, name), 1)
        in_unit_interval("top_p", self.top_p, one=True)
        positive("temperature", self.temperature)
        if self.max_decoded is not None:
            integer("max_decoded", self.max_decoded, 1)
        if not all(self.stop):
            raise invalid("stop", self.stop, "to hold no empty text", "Remove it.")
