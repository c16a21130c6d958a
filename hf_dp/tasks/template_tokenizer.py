"""Make a template part of a tokenizer, which adds its words and mask as it adds ``[CLS]``.

They are added after truncation. Truncation therefore shortens the texts and never the template, and
the mask is there exactly once whatever the texts say (their own "[MASK]" is read as ordinary
characters). A stock ``pipeline`` on raw text gives what training saw.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_dp._validate import invalid
from hf_dp.tasks.templates import MASK, TEXTS, Template, require_mask_token

_SLOTS = {MASK: "mask", TEXTS[0]: "$A", TEXTS[1]: "$B"}
_COPIED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


def with_template(
    tokenizer: PreTrainedTokenizerBase, template: Template
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts one text (or a pair) into ``template``.

    It still does so when it is saved and loaded by ``AutoTokenizer``. All tokens are of type 0,
    since the template makes one sentence of them. Given the other number of texts, the tokenizer
    adds no mask, which the model refuses.

    Raises: DataError for a tokenizer without a mask token or without a fast implementation;
        InvalidArgumentError for a template that holds the mask token of the tokenizer.
    """
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

    Args:
        after: what stands before the words: the mask, a text, or None at the start.
    """
    words = words.rstrip(" ")
    if not words:
        return []
    mask = str(tokenizer.mask_token)
    before = {None: [""], MASK: [mask]}.get(after, ["a", mask])
    found = (_tokens_from(tokenizer, each + words, len(each)) for each in before)
    return next((tokens for tokens in found if tokens is not None), [])


def _tokens_from(tokenizer: PreTrainedTokenizerBase, text: str, start: int) -> list[int] | None:
    """Return the tokens of ``text`` from the character ``start`` on; None where one token lies on
    both sides of it."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
    if any(begin < start < end for _, (begin, end) in pairs):
        return None
    return [token for token, (_, end) in pairs if end > start]


def _post_processor(
    tokenizer: PreTrainedTokenizerBase, template: Template
) -> processors.TemplateProcessing:
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
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=listed)


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
