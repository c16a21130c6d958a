"""Templates and label words for classification by infilling (Li et al., section 3.2, Table 10).

A template becomes part of a tokenizer, which adds its words and mask as it adds ``[CLS]``: after
truncation, which therefore shortens the texts and never the template, and the mask is there exactly
once whatever the texts say. A stock ``pipeline`` on raw text gives what training saw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError

if TYPE_CHECKING:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MASK = "[MASK]"  # in templates; it becomes the tokenizer's own mask token
TEXTS = ("<S1>", "<S2>")  # the first and second text column
_MARKERS = re.compile("|".join(map(re.escape, (MASK, *TEXTS))))


@dataclass(frozen=True)
class Template:
    """A sentence with places for one or two texts and a missing word: ``<S1> It was [MASK] .``."""

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
    """A template and, for each class by name, the word that stands for it."""

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
        """Return the template and words of a configuration: a task of Table 10 by name
        (``"sst2"``), or ``{template: ..., label_words: {...}}``."""
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
    """Return, for each class, the token of its label word as it reads in place of the mask. In
    byte-level vocabularies that is ``" great"``, with its space. ``tokenizer`` is that of the base,
    without the template."""
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
    first, end = len(before.rstrip(" ")), len(before) + len(word)
    found = _tokens(tokenizer, before + word + after, len(before), end)
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


_SLOTS = {MASK: "mask", TEXTS[0]: "$A", TEXTS[1]: "$B"}
_COPIED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


def with_template(
    tokenizer: PreTrainedTokenizerBase, template: Template
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts one text (or a pair) into ``template``.

    It still does so when it is saved and loaded by ``AutoTokenizer``. All tokens are of type 0,
    since the template makes one sentence of them. Given the other number of texts, the tokenizer
    adds no mask, which the model refuses.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    require_mask_token(tokenizer)
    if any(tokenizer.mask_token in piece for piece in template.pieces if piece not in _SLOTS):
        own = tokenizer.mask_token
        expected = f"to hold the mask as {MASK} alone, and it holds this tokenizer's {own} as well"
        raise invalid("template", template.text, expected, "Leave that out.")
    backend = Tokenizer.from_str(json.dumps(_prepared(tokenizer, template)))
    backend.post_processor = _post_processor(tokenizer, template)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        split_special_tokens=True,
        add_prefix_space=_needs_prefix(template),
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=list(tokenizer.model_input_names),
        **{name: token for name in _COPIED if (token := getattr(tokenizer, name)) is not None},
    )


def template_words(tokenizer: PreTrainedTokenizerBase, words: str, after: str | None) -> list[int]:
    """Return token ids of words of a template, as they read in their place.

    A space at their end belongs to what follows, a text or the missing word: tokens of byte-level
    and SentencePiece vocabularies carry the space before them. After a text they read as after any
    word ("?" as in "a?"). Words that would merge with it ("s" to "as") stay apart from it, as after
    the mask.

    Args: after: what stands before the words: the mask, a text, or None at the start.
    """
    words = words.rstrip(" ")
    if not words:
        return []
    mask = str(tokenizer.mask_token)
    before = {None: [""], MASK: [mask]}.get(after, ["a", mask])
    for each in before:
        found = _tokens(tokenizer, each + words, len(each), len(each + words))
        if all(begin >= len(each) for _, begin, _ in found):  # no token lies on both sides
            return [token for token, _, _ in found]
    return []


def _tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, start: int, stop: int
) -> list[tuple[int, int, int]]:
    """Return the tokens of ``text`` with a character of this range, each with its own range."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(token, begin, end) for token, (begin, end) in pairs if end > start and begin < stop]


def _post_processor(tokenizer: PreTrainedTokenizerBase, template: Template) -> TemplateProcessing:
    from tokenizers.processors import TemplateProcessing

    special = {"mask": [tokenizer.mask_token_id]}
    for name, attribute in (("start", "cls_token_id"), ("end", "sep_token_id")):
        if (token := getattr(tokenizer, attribute)) is not None:
            special[name] = [token]
    filled = []
    for place, piece in enumerate(template.pieces):
        if piece in _SLOTS:
            filled.append(_SLOTS[piece])
        elif ids := template_words(tokenizer, piece, template.pieces[place - 1] if place else None):
            filled.append(f"words{place}")
            special[f"words{place}"] = ids
    plain = ["$A"] if template.texts == 2 else ["$A", "end", "$B"]
    layouts = {template.texts: filled, 3 - template.texts: plain}
    single, pair = (
        [f"{p}:0" for p in ("start", *layouts[texts], "end") if p in special or p.startswith("$")]
        for texts in (1, 2)
    )
    listed = [
        {"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)}
        for name, ids in special.items()
    ]
    return TemplateProcessing(single=single, pair=pair, special_tokens=listed)


def _needs_prefix(template: Template) -> bool:
    """Return whether a text stands after a space."""
    pairs = zip(template.pieces, template.pieces[1:], strict=False)
    return any(piece in TEXTS and before.endswith(" ") for before, piece in pairs)


def _prepared(tokenizer: PreTrainedTokenizerBase, template: Template) -> dict[str, Any]:
    """Return the tokenizer as JSON, changed so that a text reads in the template as in a sentence.

    Byte-level tokenizers give a text its leading space, which "<S1> ? [MASK] , <S2>" writes before
    the second text. The setting applies to both texts, so the first text gets one as well. A text's
    own "[MASK]" loses its brackets, after any other normalization: SentencePiece vocabularies hold
    it as an ordinary piece.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    splitting = state["pre_tokenizer"] or {}
    for step in splitting.get("pretokenizers", [splitting]):
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"] = step["add_prefix_space"] or _needs_prefix(template)
    mask = tokenizer.mask_token
    unmask = {"type": "Replace", "pattern": {"String": mask}, "content": f" {mask[1:-1]} "}
    steps = [state["normalizer"], unmask] if state["normalizer"] else [unmask]
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
    state["truncation"] = state["padding"] = None
    return state
