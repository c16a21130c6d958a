"""Find the one token that stands for a class at the mask."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from hf_dp._validate import invalid
from hf_dp.errors import DataError
from hf_dp.tasks.template_tokenizer import require_mask_token
from hf_dp.tasks.templates import MASK, TEXTS, Infilling, Template

_SHOWN = 5


def label_word_ids(tokenizer: Any, infilling: Infilling, class_names: Sequence[str]) -> list[int]:
    """Return, for each class, the token of its label word as it reads in place of the mask.

    In byte-level vocabularies that is ``" great"``, with its space. ``tokenizer`` is that of the
    base, without the template.

    Raises: DataError for classes without a word or words without a class; InvalidArgumentError for
        a word that is not one token, with near words that are, or for two classes with the same
        token.
    """
    require_mask_token(tokenizer)
    words = infilling.label_words
    missing, unknown = (
        [n for n in class_names if n not in words],
        [n for n in words if n not in class_names],
    )
    if missing or unknown:
        raise DataError(
            f"The label words are for the classes {sorted(words)}, and the data has "
            f"{list(class_names)}: "
            + "; ".join(
                f"{what} {names}"
                for what, names in (("no word for", missing), ("no class", unknown))
                if names
            )
            + ". Write one word for each class under `label_words`, by the names that "
            "`class_names` or the file declare."
        )
    ids = [_one_token(tokenizer, infilling.template, words[name]) for name in class_names]
    for index, token in enumerate(ids):
        if token in ids[:index]:
            raise invalid(
                "label_words",
                dict(words),
                f"to have different words for {class_names[ids.index(token)]!r} and "
                f"{class_names[index]!r}",
                "This tokenizer reads them as the same token.",
            )
    return ids


def _one_token(tokenizer: Any, template: Template, word: str) -> int:
    found = _read(tokenizer, template, word)
    if found is not None and len(found) == 1 and found[0] != tokenizer.unk_token_id:
        return found[0]
    if found is None:
        kind = "grows together with what stands before it"
    else:
        kind = (
            "is unknown"
            if tokenizer.unk_token_id in found
            else f"is {tokenizer.convert_ids_to_tokens(found)}"
        )
    near = _near(tokenizer, template, word)
    raise invalid(
        "label_words",
        word,
        f"to be one token where the mask stands, and it {kind}",
        f"Near words that are one token: {', '.join(near)}." if near else "Choose another word.",
    )


def _read(tokenizer: Any, template: Template, word: str) -> list[int] | None:
    """Return the tokens of the word in the sentence that it completes, its space included.

    The result is None if a token holds more than the word. Placeholder words stand for the texts.
    Reading the word alone, or after some other word, would not do: "no" after a quotation mark is
    the token "no", and after a letter the end of another word.
    """
    place = template.pieces.index(MASK)
    before, after = (
        "".join(_filled(part)) for part in (template.pieces[:place], template.pieces[place + 1 :])
    )
    encoded = tokenizer(
        before + word + after, add_special_tokens=False, return_offsets_mapping=True
    )
    first, end = len(before.rstrip(" ")), len(before) + len(word)
    found = []
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if stop > len(before) and start < end:
            if start < first or stop > end:
                return None
            found.append(token)
    return found


def _filled(pieces: Sequence[str]) -> list[str]:
    return ["a" if piece in TEXTS else piece for piece in pieces]


def _near(tokenizer: Any, template: Template, word: str) -> list[str]:
    """Return words near this one that are one token in its place.

    Other spellings of the word come first, then similar words of the vocabulary.
    """
    written = {
        tokenizer.convert_tokens_to_string([token]).strip() for token in tokenizer.get_vocab()
    }
    similar = difflib.get_close_matches(
        word, sorted(w for w in written if w.isalpha()), n=4 * _SHOWN, cutoff=0.6
    )
    candidates = dict.fromkeys([word.lower(), word.capitalize(), *similar])
    return [
        other
        for other in candidates
        if other != word
        and (ids := _read(tokenizer, template, other)) is not None
        and len(ids) == 1
        and ids[0] != tokenizer.unk_token_id
    ][:_SHOWN]
