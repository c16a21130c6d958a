"""Templates and label words for classification by infilling (Li et al., section 3.2, Table 10).

A template becomes part of a tokenizer, which adds its words and mask as it adds ``[CLS]``: after
truncation, which therefore shortens the texts and never the template, and the mask is there exactly
once whatever the texts say. Raw text given to the saved tokenizer becomes what training saw.

A decoder has no mask. Its template ends where the word is missing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MASK = "[MASK]"  # in templates; it becomes the tokenizer's own mask token
TEXTS = ("<S1>", "<S2>")  # the first and second text column
_MARKERS = re.compile("|".join(map(re.escape, (MASK, *TEXTS))))


@dataclass(frozen=True)
class Template:
    """A sentence with places for one or two texts and a missing word: ``<S1> It was [MASK] .``.

    Without ``[MASK]`` the word is missing at the end, after a space unless white space is there.
    """

    text: str
    pieces: tuple[str, ...] = field(init=False)  # markers and the words between them, spaces kept

    def __post_init__(self) -> None:
        text = str(self.text)
        if not self.names_its_place:
            text += MASK if text[-1:].isspace() else f" {MASK}"
        if sorted(_MARKERS.findall(text)) not in ([TEXTS[0], MASK], [*TEXTS, MASK]):
            expected = f"to hold <S1> exactly once, and {MASK} and <S2> at most once"
            advice = (
                f"Write it like '<S1> It was {MASK} .' for a masked language model or "
                "'Review: <S1>\\nSentiment:' for a decoder: the word is missing at the mask or the "
                "end, <S1> is the first text column and <S2> the second."
            )
            raise invalid("template", self.text, expected, advice)
        pieces = [piece for piece in re.split(f"({_MARKERS.pattern})", text) if piece]
        object.__setattr__(self, "pieces", tuple(pieces))

    @property
    def names_its_place(self) -> bool:
        """Return whether ``[MASK]`` says where the word is missing."""
        return MASK in str(self.text)

    def check(self, causal: bool) -> None:
        """Raise InvalidArgumentError if a decoder (``causal``), or a masked language model, cannot
        predict a word where it is missing."""
        if causal and self.pieces[-1] != MASK:
            expected = "to end where the word is missing: a decoder has read nothing after it"
            after = self.pieces[self.pieces.index(MASK) + 1 :]
            texts = " and ".join(piece for piece in after if piece in TEXTS)
            advice = f"Put {texts} before it" if texts else f"Leave out {after[-1]!r}"
            advice += ", or use a masked language model."
            raise invalid("template", self.text, expected, advice)
        if not causal and not self.names_its_place:
            expected = f"to hold {MASK}, where a masked language model fills in the word"
            raise invalid("template", self.text, expected, f"Write it like '<S1> It was {MASK} .'.")

    @property
    def texts(self) -> int:
        """Return how many text columns the template takes: 1 or 2."""
        return sum(piece in TEXTS for piece in self.pieces)


_OPTIONS = ("chat_template", "several_tokens")


@dataclass(frozen=True)
class Infilling:
    """A template and, for each class by name, the word that stands for it.

    Args:
        chat_template: put the template into the tokenizer's chat template, as the user's message;
            the word is the beginning of the answer.
        several_tokens: allow a decoder words of several tokens.
    """

    template: Template
    label_words: Mapping[str, str]
    chat_template: bool = False
    several_tokens: bool = False

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
                "reads otherwise, such as 'Yes'.",
            )
        object.__setattr__(
            self, "label_words", {str(name): word.strip() for name, word in words.items()}
        )
        for name in _OPTIONS:
            if not isinstance(value := getattr(self, name), bool):
                raise invalid(name, value, "to be true or false", "Leave it out for false.")

    @classmethod
    def of(cls, value: object) -> Infilling:
        """Return the template and words of a configuration: a task of Table 10 by name
        (``"sst2"``), or ``{template: ..., label_words: {...}}``."""
        if isinstance(value, str):
            return GLUE[one_of("infilling", value, GLUE)]
        required = {"template", "label_words"}
        if not isinstance(value, Mapping) or set(value) - set(_OPTIONS) != required:
            raise invalid(
                "infilling",
                value,
                f"to be one of {sorted(GLUE)}, or to have the keys `template` and `label_words`, "
                f"and of {', '.join(_OPTIONS)} those that you want",
                "For example {template: '<S1> It was [MASK] .', label_words: {negative: terrible, "
                "positive: great}}.",
            )
        options = {name: value[name] for name in _OPTIONS if name in value}
        return cls(Template(value["template"]), value["label_words"], **options)

    @property
    def block(self) -> dict[str, object]:
        """Return this as a recipe has it."""
        options = {name: True for name in _OPTIONS if getattr(self, name)}
        words = dict(self.label_words)
        return {"template": self.template.text, "label_words": words, **options}

    def for_base(self, tokenizer: PreTrainedTokenizerBase, causal: bool) -> Infilling:
        """Return the template as a base reads it: checked, and in its chat template if so asked.

        Raises: InvalidArgumentError, DataError.
        """
        require_template_tokenizer(tokenizer, causal)
        self.template.check(causal)
        if not causal:
            for name in _OPTIONS:
                if getattr(self, name):
                    raise invalid(name, True, "to be left out: it is for decoders", "Remove it.")
        if not self.chat_template:
            return self
        if not tokenizer.chat_template:
            expected = "to be left out for a tokenizer that has no chat template"
            raise invalid("chat_template", True, expected, "Remove it, or choose a chat model.")
        asked = "".join(self.template.pieces[:-1]).rstrip(" ")
        message = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return dataclasses.replace(self, template=Template(str(text)), chat_template=False)


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


_OTHER = "Choose another word, or remove `infilling`: a classification head is trained instead."


def label_word_ids(
    tokenizer: PreTrainedTokenizerBase, infilling: Infilling, class_names: Sequence[str]
) -> list[list[int]]:
    """Return, for each class, the tokens of its label word as it reads in the missing place. In
    byte-level vocabularies that is ``" great"``, with its space.

    Args:
        tokenizer: that of the base, without the template.
        infilling: as :meth:`Infilling.for_base` returns it.

    Raises: DataError for classes without a word; InvalidArgumentError for words of several tokens
        where one is expected, and for classes with the same word.
    """
    words = infilling.label_words
    if set(words) != set(class_names):
        missing = [name for name in class_names if name not in words]
        others = [name for name in words if name not in class_names]
        raise DataError(
            f"Under `label_words` there is no word for {missing}, and {others} are no classes. "
            "Write one word for each class, by the names that `class_names` or the file declare."
        )
    several = infilling.several_tokens
    ids = [_word_tokens(tokenizer, infilling.template, words[n], several) for n in class_names]
    pairs = [(one, other) for one in ids for other in ids if one is not other]
    if any(one == other for one, other in pairs):
        expected = "to have words that this tokenizer reads as different tokens"
        raise invalid("label_words", dict(words), expected, _OTHER)
    if any(one == other[: len(one)] for one, other in pairs):
        expected = "to have no word that another one begins with, and is therefore always likelier"
        raise invalid("label_words", dict(words), expected, _OTHER)
    return ids


def _word_tokens(
    tokenizer: PreTrainedTokenizerBase, template: Template, word: str, several: bool = False
) -> list[int]:
    """Return the tokens of the word in the sentence that it completes, its space included.

    Placeholder words stand for the texts. Reading the word alone, or after some other word, would
    not do: "no" after a quotation mark is the token "no", and after a letter the end of another
    word.
    """
    pieces = template.pieces
    place = pieces.index(MASK)
    filled = ["a" if piece in TEXTS else piece for piece in pieces]
    before, after = "".join(filled[:place]), "".join(filled[place + 1 :])
    first, end = len(before.rstrip(" ")), len(before) + len(word)
    found = _tokens(tokenizer, before + word + after, len(before), end)
    ids = [token for token, *_ in found]
    grown = any(start < first or stop > end for _, start, stop in found)
    if grown or (len(ids) > 1 and not several) or not ids or tokenizer.unk_token_id in ids:
        tokens = tokenizer.convert_ids_to_tokens(ids)
        expected = f"to be one token where the word is missing, where it is {tokens}"
        advice = _OTHER
        if place == len(pieces) - 1:
            advice += (
                " Or, with a decoder, set several_tokens: true, which reads each text once for "
                "each class."
            )
        raise invalid("label_words", word, expected, advice)
    return ids


def propose(
    tokenizer: PreTrainedTokenizerBase,
    class_names: Sequence[str],
    texts: int,
    causal: bool,
    column: str = "label",
) -> Infilling:
    """Return a template and label words made of the names of the classes, to begin with.

    Classes of Table 10 get its words, for a masked language model. Others are called by their name
    or, where that is no single token, by the longest word of it that is.

    Args: texts: 1 or 2. column: what the classes are, in a word, for the template.
    Raises: DataError naming the classes without a word.
    """
    known = [each for each in GLUE.values() if set(each.label_words) == set(class_names)]
    if known and not causal and known[0].template.texts == texts:
        with suppress(InvalidArgumentError):  # the words may be none of this tokenizer's
            label_word_ids(tokenizer, known[0], class_names)
            return known[0]
    feelings = {"negative", "positive"} <= {name.lower() for name in class_names}
    kind = "Sentiment" if feelings else column.replace("_", " ").capitalize()
    template = Template(
        ("Text: <S1>\n" if texts == 1 else "First: <S1>\nSecond: <S2>\n") + f"{kind}:"
        if causal
        else f"{'<S1>' if texts == 1 else '<S1> <S2>'} {kind}: {MASK} ."
    )
    whole = {name: re.sub(r"[\W_]+", " ", name).strip() for name in class_names}
    found: dict[str, tuple[str, list[int]]] = {}
    for name, words in whole.items():
        for word in filter(None, [words, *sorted(words.split(), key=len, reverse=True)]):
            with suppress(InvalidArgumentError):
                ids = _word_tokens(tokenizer, template, word)
                if ids not in [others for _, others in found.values()]:
                    found[name] = word, ids
                    break
    if lost := [name for name in class_names if name not in found]:
        if causal and all(whole.values()) and len({*whole.values()}) == len(whole):
            return Infilling(template, whole, several_tokens=True)
        raise DataError(
            f"No word of the class names {lost} is one token of {type(tokenizer).__name__} that no "
            "other class has. Write `infilling` by hand, with a word for each class."
        )
    return Infilling(template, {name: word for name, (word, _) in found.items()})


def require_template_tokenizer(tokenizer: PreTrainedTokenizerBase, causal: bool) -> None:
    """Raise DataError if a tokenizer has no fast implementation, or, unless it is that of a decoder
    (``causal``), no mask token."""
    missing = (
        "fast implementation, which infilling needs to keep the template in the tokenizer"
        if not tokenizer.is_fast
        else "mask token, so no word can be missing from a template"
    )
    if (own := tokenizer.init_kwargs.get(_KEPT)) is not None:
        raise DataError(
            f"{type(tokenizer).__name__} puts texts into the template {own!r} already. Load the "
            "tokenizer of the base, not the one that was saved with a classifier."
        )
    if not tokenizer.is_fast or (not causal and tokenizer.mask_token_id is None):
        raise DataError(
            f"{type(tokenizer).__name__} has no {missing}. Use a masked language model (BERT, "
            "RoBERTa, DeBERTa, ELECTRA, ModernBERT) or a decoder (GPT-2, Llama, Qwen, OPT), or "
            "leave `infilling` out to train a classification head."
        )


_KEPT = "template"  # the key under which a tokenizer that applies one is saved
_SLOTS = {MASK: "mask", TEXTS[0]: "$A", TEXTS[1]: "$B"}
_COPIED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


def with_template(
    tokenizer: PreTrainedTokenizerBase, template: Template, causal: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts one text (or a pair) into ``template``.

    It still does so when it is saved and loaded by ``AutoTokenizer``. White space around a text is
    left out. All tokens are of type 0, since the template makes one sentence of them. Given the
    other number of texts, the tokenizer leaves the template out, which the model refuses.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    require_template_tokenizer(tokenizer, causal)
    words = [piece for piece in template.pieces if piece not in _SLOTS]
    if not causal and any(tokenizer.mask_token in piece for piece in words):
        own = tokenizer.mask_token
        expected = f"to hold the mask as {MASK} alone, and it holds this tokenizer's {own} as well"
        raise invalid("template", template.text, expected, "Leave that out.")
    backend = Tokenizer.from_str(json.dumps(_prepared(tokenizer, template, causal)))
    backend.post_processor = _post_processor(tokenizer, template, causal)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        split_special_tokens=True,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        model_input_names=list(tokenizer.model_input_names),
        **{name: token for name in _COPIED if (token := getattr(tokenizer, name)) is not None},
    )
    made.init_kwargs[_KEPT] = template.text
    if made.pad_token is None:  # nothing attends to padding
        made.pad_token = made.eos_token
    return made


def template_words(tokenizer: PreTrainedTokenizerBase, words: str, after: str | None) -> list[int]:
    """Return token ids of words of a template, as they read in their place.

    A space at their end belongs to what follows, a text or the missing word: tokens of byte-level
    and SentencePiece vocabularies carry the space before them. After a text they read as after any
    word ("?" as in "a?"). Words that would merge with it ("s" to "as") stay apart from it, as after
    the mask, or at the start where there is no mask.

    Args: after: what stands before the words: the mask, a text, or None at the start.
    """
    words = words.rstrip(" ")
    if not words:
        return []
    apart = tokenizer.mask_token or ""
    before = {None: [""], MASK: [apart]}.get(after, ["a", apart])
    for each in before:
        found = _tokens(tokenizer, each + words, len(each), len(each + words))
        if all(begin >= len(each) for _, begin, _ in found):  # no token lies on both sides
            return [token for token, _, _ in found]
    return []


def last_words(tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """Return token ids of the words with which a decoder's template ends; none after a text."""
    *_, before, last, mask = (None, None, *template.pieces)
    assert mask == MASK
    return [] if last in TEXTS or last is None else template_words(tokenizer, last, before)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, start: int, stop: int
) -> list[tuple[int, int, int]]:
    """Return the tokens of ``text`` with a character of this range, each with its own range."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(token, begin, end) for token, (begin, end) in pairs if end > start and begin < stop]


def _post_processor(
    tokenizer: PreTrainedTokenizerBase, template: Template, causal: bool
) -> TemplateProcessing:
    from tokenizers.processors import TemplateProcessing

    special: dict[str, list[int]] = {} if causal else {"mask": [tokenizer.mask_token_id]}
    filled = []
    for place, piece in enumerate(template.pieces):
        if piece in _SLOTS:
            filled.append(_SLOTS[piece])
        elif ids := template_words(tokenizer, piece, template.pieces[place - 1] if place else None):
            filled.append(f"words{place}")
            special[f"words{place}"] = ids
    special |= _around(tokenizer, causal, special.get(filled[0], []))
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


def _around(
    tokenizer: PreTrainedTokenizerBase, causal: bool, first_words: Sequence[int]
) -> dict[str, list[int]]:
    """Return the special tokens before and after a sentence. For a decoder, that is the first token
    alone, where the tokenizer adds one and the template, from a chat, does not begin with it."""
    if causal:
        bos = tokenizer.bos_token_id
        adds = bos is not None and tokenizer("a").input_ids[:1] == [bos] != [*first_words[:1]]
        return {"start": [bos]} if adds else {}
    pairs = {"start": tokenizer.cls_token_id, "end": tokenizer.sep_token_id}
    return {name: [token] for name, token in pairs.items() if token is not None}


def _needs_prefix(template: Template) -> bool:
    """Return whether a text stands after a space."""
    pairs = zip(template.pieces, template.pieces[1:], strict=False)
    return any(piece in TEXTS and before.endswith(" ") for before, piece in pairs)


def _prepared(
    tokenizer: PreTrainedTokenizerBase, template: Template, causal: bool
) -> dict[str, Any]:
    """Return the tokenizer as JSON, changed so that a text reads in the template as in a sentence.

    Byte-level tokenizers give a text its leading space, which "<S1> ? [MASK] , <S2>" writes before
    the second text. That applies to both texts, so the first text gets one as well. (Their own
    setting for it puts a space before each digit where digits are split first.) A text's own
    "[MASK]" loses its brackets, after any other normalization: SentencePiece vocabularies hold it
    as an ordinary piece.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    splitting = state["pre_tokenizer"] or {}
    kinds = {step.get("type") for step in splitting.get("pretokenizers", [splitting])}
    steps: list[dict[str, Any]] = [{"type": "Strip", "strip_left": True, "strip_right": True}]
    steps += [state["normalizer"]] if state["normalizer"] else []
    if not causal:
        mask = tokenizer.mask_token
        content = f" {mask[1:-1]} "
        steps.append({"type": "Replace", "pattern": {"String": mask}, "content": content})
    if "ByteLevel" in kinds and _needs_prefix(template):
        steps.append({"type": "Prepend", "prepend": " "})
    state["normalizer"] = {"type": "Sequence", "normalizers": steps}
    state["truncation"] = state["padding"] = None
    return state
