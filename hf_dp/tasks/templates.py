"""Templates and label words for classification by infilling (Li et al., section 3.2, Table 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        markers = sorted(_MARKERS.findall(str(self.text)))
        if markers not in ([TEXTS[0], MASK], [*TEXTS, MASK]):
            expected = f"to hold {MASK} and <S1> exactly once, and <S2> at most once"
            advice = (
                f"Write it like '<S1> It was {MASK} .': {MASK} becomes the tokenizer's own mask "
                "token, <S1> is the first text column and <S2> the second."
            )
            raise invalid("template", self.text, expected, advice)
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
        if (
            not isinstance(words, Mapping)
            or len(words) < 2
            or not all(isinstance(word, str) and word.strip() for word in words.values())
        ):
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
    def of(cls, value: object) -> Infilling:
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


def label_word_ids(
    tokenizer: PreTrainedTokenizerBase, infilling: Infilling, class_names: Sequence[str]
) -> list[int]:
    """Return, for each class, the token of its label word as it reads in place of the mask.

    In byte-level vocabularies that is ``" great"``, with its space. ``tokenizer`` is that of the
    base, without the template.

    Raises: DataError for classes without a word or words without a class; InvalidArgumentError for
        a word that is not one token, or for two classes with the same token.
    """
    require_mask_token(tokenizer)
    words = infilling.label_words
    if set(words) != set(class_names):
        missing = [name for name in class_names if name not in words]
        others = [name for name in words if name not in class_names]
        raise DataError(
            f"Under `label_words` there is no word for {missing}, and of words for no class "
            f"{others}. Write one word for each class, by the names that `class_names` or the file "
            "declare."
        )
    ids = [_one_token(tokenizer, infilling.template, words[name]) for name in class_names]
    if len(set(ids)) < len(ids):
        expected = "to have words that this tokenizer reads as different tokens"
        raise invalid("label_words", dict(words), expected, "Choose another word.")
    return ids


def _one_token(tokenizer: PreTrainedTokenizerBase, template: Template, word: str) -> int:
    """Return the token of the word in the sentence that it completes, its space included.

    Placeholder words stand for the texts. Reading the word alone, or after some other word, would
    not do: "no" after a quotation mark is the token "no", and after a letter the end of another
    word.
    """
    place = template.pieces.index(MASK)
    filled = ["a" if piece in TEXTS else piece for piece in template.pieces]
    before, after = "".join(filled[:place]), "".join(filled[place + 1 :])
    sentence = before + word + after
    encoded = tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True)
    first, end = len(before.rstrip(" ")), len(before) + len(word)
    found = [
        (token, start, stop)
        for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"])
        if stop > len(before) and start < end
    ]
    grown = any(start < first or stop > end for _, start, stop in found)
    if grown or len(found) != 1 or found[0][0] == tokenizer.unk_token_id:
        tokens = tokenizer.convert_ids_to_tokens([token for token, *_ in found])
        expected = f"to be one token where the mask stands, where it is {tokens}"
        raise invalid("label_words", word, expected, "Choose another word.")
    return found[0][0]


def require_mask_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if a tokenizer has no mask token, or no fast implementation."""
    missing = (
        "fast implementation, which infilling needs to keep the template in the tokenizer"
        if not tokenizer.is_fast
        else "mask token, so no word can be missing from a template"
    )
    if not tokenizer.is_fast or tokenizer.mask_token_id is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no {missing}. Use a masked language model (BERT, "
            "RoBERTa, DeBERTa, ELECTRA, ModernBERT), or leave `infilling` out to train a "
            "classification head."
        )
