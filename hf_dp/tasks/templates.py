"""Templates and label words for classification by infilling (Li et al., section 3.2, Table 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import invalid, one_of

MASK = "[MASK]"  # in templates; it becomes the tokenizer's own mask token
TEXTS = ("<S1>", "<S2>")  # the first and second text column
_MARKERS = re.compile("|".join(map(re.escape, (MASK, *TEXTS))))


@dataclass(frozen=True)
class Template:
    """A sentence with places for one or two texts and one missing word: ``"<S1> It was [MASK] ."``.

    Raises: InvalidArgumentError for no mask or two, a text that is missing or comes twice, or
        ``<mask>`` for ``[MASK]``.
    """

    text: str
    pieces: tuple[str, ...] = field(init=False)  # markers and the words between them, spaces kept

    def __post_init__(self) -> None:
        advice = (
            f"Write it like '<S1> It was {MASK} .'; {MASK} becomes the tokenizer's own mask token."
        )
        if not isinstance(self.text, str):
            raise invalid("template", self.text, "to be text", advice)
        markers = _MARKERS.findall(self.text)
        masks = markers.count(MASK)
        if masks != 1:
            expected = f"to hold {MASK} exactly once, and it holds it {masks} times"
            raise invalid("template", self.text, expected, advice)
        if sorted(marker for marker in markers if marker != MASK) not in ([TEXTS[0]], list(TEXTS)):
            expected = "to hold <S1> once and <S2> at most once"
            columns = "<S1> is the first text column and <S2> the second."
            raise invalid("template", self.text, expected, columns)
        pieces = [piece for piece in re.split(f"({_MARKERS.pattern})", self.text) if piece]
        object.__setattr__(self, "pieces", tuple(pieces))

    @property
    def texts(self) -> int:
        """Return how many text columns the template takes: 1 or 2."""
        return sum(piece in TEXTS for piece in self.pieces)


@dataclass(frozen=True)
class Infilling:
    """A template and, for each class by name, the word that stands for it.

    Raises: InvalidArgumentError for fewer than two classes, or a word that is no text.
    """

    template: Template
    label_words: Mapping[str, str]

    def __post_init__(self) -> None:
        words = self.label_words
        named = isinstance(words, Mapping) and all(
            isinstance(w, str) and w.strip() for w in words.values()
        )
        if not named or len(words) < 2:
            raise invalid(
                "label_words",
                words,
                "to give one word for each of at least two class names",
                "Write them like {negative: terrible, positive: great}; quote words that YAML "
                "reads otherwise, as 'Yes'.",
            )
        object.__setattr__(
            self, "label_words", {str(name): word.strip() for name, word in words.items()}
        )

    @classmethod
    def of(cls, value: Any) -> Infilling:
        """Return the template and words of a configuration.

        Args:
            value: a task of Table 10 by name (``"sst2"``), or ``{template: ..., label_words:
                {...}}``.
        """
        if isinstance(value, str):
            return GLUE[one_of("infilling", value, GLUE)]
        if not isinstance(value, Mapping) or set(value) != {"template", "label_words"}:
            raise invalid(
                "infilling",
                value,
                f"to be one of {sorted(GLUE)}, or to have the keys `template` and `label_words`",
                "For example {template: '<S1> It was [MASK] .', label_words: {negative: terrible, "
                "positive: great}}.",
            )
        return cls(Template(value["template"]), value["label_words"])


# Li et al., Table 10 (after Gao et al., 2020), by GLUE's names of tasks and classes.
GLUE: dict[str, Infilling] = {
    "sst2": Infilling(
        Template("<S1> It was [MASK] ."), {"negative": "terrible", "positive": "great"}
    ),
    "mnli": Infilling(
        Template("<S1> ? [MASK] , <S2>"),
        {"entailment": "Yes", "neutral": "Maybe", "contradiction": "No"},
    ),
    "qnli": Infilling(
        Template("<S1> ? [MASK] , <S2>"), {"entailment": "Yes", "not_entailment": "No"}
    ),
    "qqp": Infilling(Template("<S1> [MASK] , <S2>"), {"not_duplicate": "No", "duplicate": "Yes"}),
}
