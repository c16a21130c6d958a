"""A public, synthetic sentiment set to try things on: short reviews, ``negative`` or ``positive``.

Every sentence is made here from word lists of our own (the file beside this) and a fixed public
seed. It describes nobody and says nothing about accuracy on real reviews: a private run can be
tried offline.

Rows come in *pairs*: a negative and a positive sentence that differ in their opinion words alone.
Template, subject, context, number of words and punctuation tell nothing about the label. There are
three kinds of template: ``plain``, where the opinion word is meant as it stands; ``negated``, which
turns it around ("nobody in my family would call the parking garage superb" is negative); and
``mixed``, where the verdict, which gives the label, follows a remark of the opposite opinion.

The splits share no template, opinion word, subject or context: validation accuracy measures
wordings never trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dp import _validate

if TYPE_CHECKING:
    from datasets import DatasetDict

LABEL_NAMES = ("negative", "positive")
MAX_ROWS = {"train": 20_000, "validation": 4_000}
# public; a new text or list needs a new number, so that results name their data
SEED = "hf_dp demo sentences 1"
KIND_CYCLE = ("plain",) * 4 + ("negated",) + ("plain",) * 4 + ("mixed",)


@dataclass(frozen=True)
class Vocabulary:
    """All wordings of one split.

    In a template ``{s}`` is the subject, ``{t}`` another subject, ``{c}`` the context; ``{a}`` and
    ``{d}`` are adjectives and ``{v}`` is a verb of the row's opinion, ``{b}`` an adjective of the
    opposite one (side remarks). ``adjectives`` and ``verbs`` hold the words of label 0, then of
    label 1; ``negated`` takes them from the other.
    """

    templates: dict[str, list[str]]
    subjects: list[str]
    contexts: list[str]
    adjectives: list[list[str]]
    verbs: list[list[str]]


_WORDINGS = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
VOCABULARIES = {split: Vocabulary(**words) for split, words in json.loads(_WORDINGS).items()}
Row = dict[str, str | int]


def _pick(rng: random.Random, items: Sequence[str]) -> str:
    # Only Random.random() is documented to repeat across Python versions, so choice() and shuffle()
    # are not used.
    return items[int(rng.random() * len(items))]


def _pair(rng: random.Random, words: Vocabulary, kind: str) -> list[Row]:
    """Return a negative and a positive row, in random order, that differ in opinion words alone."""
    template = _pick(rng, words.templates[kind])
    subject, context = _pick(rng, words.subjects), _pick(rng, words.contexts)
    other = _pick(rng, [name for name in words.subjects if name != subject])
    first = [_pick(rng, words.adjectives[label]) for label in (0, 1)]
    second = [
        _pick(rng, [word for word in words.adjectives[label] if word != first[label]])
        for label in (0, 1)
    ]
    verb = [_pick(rng, words.verbs[label]) for label in (0, 1)]
    rows: list[Row] = []
    for label in (0, 1) if rng.random() < 0.5 else (1, 0):
        own = 1 - label if kind == "negated" else label
        slots = {"a": first[own], "b": first[1 - own], "d": second[own], "v": verb[own]}
        text = template.format(s=subject, t=other, c=context, **slots)
        rows.append({"sentence": f"{text[0].upper()}{text[1:]}.", "label": label, "kind": kind})
    return rows


def demo_rows(split: str, num_rows: int) -> list[Row]:
    """Return the first ``num_rows`` rows of a split, each with ``sentence``, ``label`` and
    ``kind``.

    The same call gives the same rows on every machine. A shorter call gives a prefix of a longer
    one. The classes are exactly balanced and no sentence occurs twice.

    Args:
        split: ``"train"`` or ``"validation"``.
        num_rows: an even number of rows from 2 to ``MAX_ROWS[split]`` (20,000 and 4,000).

    Raises:
        InvalidArgumentError: for another split, or a number of rows that is odd or out of range.
    """
    words = VOCABULARIES[_validate.one_of("split", split, VOCABULARIES)]
    count = _validate.integer("num_rows", num_rows, 2)
    if count > MAX_ROWS[split] or count % 2:
        expected = f"to be even and <= {MAX_ROWS[split]} for split {split!r}"
        raise _validate.invalid("num_rows", num_rows, expected, "The classes are balanced.")
    rng = random.Random(f"{SEED} {split}")
    rows: list[Row] = []
    seen: set[str | int] = set()
    while len(rows) < count:
        pair = _pair(rng, words, KIND_CYCLE[len(rows) // 2 % len(KIND_CYCLE)])
        sentences = {row["sentence"] for row in pair}
        if not sentences & seen:
            seen |= sentences
            rows += pair
    return rows


def demo_dataset(num_train: int = 8_000, num_validation: int = 1_000) -> DatasetDict:
    """Return the demo set as a ``datasets.DatasetDict`` with splits ``train`` and ``validation``.

    The columns are those of SST-2: ``sentence``, ``label`` (``ClassLabel``: negative, positive).

    Raises: as :func:`demo_rows`.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=list(LABEL_NAMES))})
    data = DatasetDict()
    for split, count in (("train", num_train), ("validation", num_validation)):
        rows = demo_rows(split, count)
        data[split] = Dataset.from_dict(
            {column: [row[column] for row in rows] for column in features}, features
        )
    return data
