"""A public, synthetic sentiment set for demonstrations: short reviews, ``negative`` or ``positive``.

Every sentence is made here from word lists of our own and a fixed public seed. It describes nobody
and says nothing about accuracy on real reviews: a private run can be tried offline.

Rows come in *pairs*: a negative and a positive sentence that differ in their opinion words alone.
Template, subject, context, number of words and punctuation tell nothing about the label. There are
three kinds of template: ``plain``, where the opinion word is meant as it stands; ``negated``, which
turns it around ("nobody in my family would call the parking garage superb" is negative); and
``mixed``, where the verdict, which gives the label, follows a remark of the opposite opinion.

The splits share no template, opinion word, subject or context: validation accuracy measures
wordings never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


def _words(text: str) -> list[list[str]]:
    return [words.split() for words in text.split("|")]


VOCABULARIES = {
    "train": Vocabulary(
        templates={
            "plain": _phrases(
                """the {s} was {a} {c}|{c} I found the {s} {a}, really {d}|{a} and {d}, that was the {s} {c}|
                honestly, we thought the {s} was {a} and {d}|my family agreed that the {s} was {a} {c}|
                the {s} was so {a} that it {v} me|{c} the {a} {s} {v} all of us|
                I must admit that the {s} {v} me, {d} work"""
            ),
            "negated": _phrases(
                """{c} the {s} was never {a}|nobody in my family would call the {s} {a}|the {s} was far from {a} {c}|
                not once all year has the {s} {v} us|the {s} has never {v} me"""
            ),
            "mixed": _phrases(
                """apart from the {b} {t}, the {s} was {a}|the {t} felt {b}, but overall the {s} was {a}|
                despite the {b} {t}, the {s} {v} us"""
            ),
        },
        subjects=_phrases(
            """parking garage|refund process|delivery driver|phone case|breakfast buffet|repair service|city tour|
            coffee machine|online shop|train ride|billing team|hotel room|garden chair|cooking class|web store|dentist|
            winter jacket|language course|car rental|bike shop|photo printer|fitness studio|bookstore|taxi company|
            pizza place|support chat|office desk|tax adviser|swimming pool|ferry crossing"""
        ),
        contexts=_phrases(
            """last month|this week|on our second visit|on Tuesday|in the spring|this morning|after the move|
            back in March|on my birthday|this time|two days ago|in January"""
        ),
        adjectives=_words(
            """terrible awful dreadful poor useless frustrating disappointing hopeless shoddy lousy miserable sloppy
            appalling disgraceful dull unacceptable disastrous nasty shabby wretched depressing pitiful|
            great wonderful superb lovely pleasing impressive helpful flawless splendid terrific amazing glorious
            marvelous remarkable charming first-rate memorable faultless thoughtful spectacular inspiring magical"""
        ),
        verbs=_words(
            """disappointed annoyed frustrated upset irritated insulted failed disgusted depressed bothered|
            pleased impressed amazed thrilled charmed helped inspired uplifted captivated enchanted"""
        ),
    ),
    "validation": Vocabulary(
        templates={
            "plain": _phrases(
                """as far as I know, their {s} is {a}, simply {d}|it turned out to be one {a} {s} {c}|
                {c} everyone described their {s} as {a}, even {d}|people told us how {a} their {s} looked {c}|
                being {a} as well as {d}, their {s} {v} each guest|{c} their {a} {s} certainly {v} our group"""
            ),
            "negated": _phrases(
                """{c} their {s} seemed anything but {a}|there is nothing {a} about their {s}|
                at no point have I been {v} by their {s}"""
            ),
            "mixed": _phrases(
                """setting aside one {b} {t}, their {s} is {a}|
                although one could call the {t} {b}, their {s} {v} everyone"""
            ),
        },
        subjects=_phrases(
            """barber|museum guide|checkout page|laptop|bakery|flight crew|running club|insurance agent|theater|
            landlord|vacuum cleaner|soup|campsite|mobile app|concert|headset|plumber|mattress|library|school"""
        ),
        contexts=_phrases(
            """yesterday evening|over the weekend|in December|at noon|during the holidays|throughout autumn|
            for three nights|upon arrival|by Friday|earlier today"""
        ),
        adjectives=_words(
            """horrible bad pathetic worthless unbearable ghastly ridiculous inferior tedious rotten dismal grim ugly
            inept|fantastic good brilliant delightful fabulous magnificent perfect dazzling enjoyable outstanding
            excellent admirable satisfying exceptional"""
        ),
        verbs=_words(
            """angered outraged enraged offended bored exasperated|
            delighted satisfied wowed cheered fascinated reassured"""
        ),
    ),
}


def _pick(rng: random.Random, items: Sequence[str]) -> str:
    # Only Random.random() is documented to repeat across Python versions, so choice() and shuffle()
    # are not used.
    return items[int(rng.random() * len(items))]


def _pair(rng: random.Random, words: Vocabulary, kind: str) -> list[dict[str, Any]]:
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
    rows = []
    for label in (0, 1) if rng.random() < 0.5 else (1, 0):
        own = 1 - label if kind == "negated" else label
        slots = {"a": first[own], "b": first[1 - own], "d": second[own], "v": verb[own]}
        text = template.format(s=subject, t=other, c=context, **slots)
        rows.append({"sentence": f"{text[0].upper()}{text[1:]}.", "label": label, "kind": kind})
    return rows


def demo_rows(split: str, num_rows: int) -> list[dict[str, Any]]:
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
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
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
