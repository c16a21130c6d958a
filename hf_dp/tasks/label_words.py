"""Find the one token that stands for a class at the mask."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import islice
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
    problems = {
        "no word for": [name for name in class_names if name not in words],
        "no class": [name for name in words if name not in class_names],
    }
    if any(problems.values()):
        said = "; ".join(f"{what} {names}" for what, names in problems.items() if names)
        raise DataError(
            f"The label words are for the classes {sorted(words)}, and the data has "
            f"{list(class_names)}: {said}. Write one word for each class under `label_words`, by "
            "the names that `class_names` or the file declare."
        )
    ids = [_one_token(tokenizer, infilling.template, words[name]) for name in class_names]
    for index, token in enumerate(ids):
        if token in ids[:index]:
            one, other = class_names[ids.index(token)], class_names[index]
            expected = f"to have different words for {one!r} and {other!r}"
            advice = "This tokenizer reads them as the same token."
            raise invalid("label_words", dict(words), expected, advice)
    return ids


def _one_token(tokenizer: Any, template: Template, word: str) -> int:
    found = _read(tokenizer, template, word)
    if found is not None and _is_one(tokenizer, found):
        return found[0]
    if found is None:
        kind = "grows together with what stands before it"
    elif tokenizer.unk_token_id in found:
        kind = "is unknown"
    else:
        kind = f"is {tokenizer.convert_ids_to_tokens(found)}"
    near = _near(tokenizer, template, word)
    raise invalid(
        "label_words",
        word,
        f"to be one token where the mask stands, and it {kind}",
        f"Near words that are one token: {', '.join(near)}." if near else "Choose another word.",
    )


def _is_one(tokenizer: Any, ids: list[int] | None) -> bool:
    return ids is not None and len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def _read(tokenizer: Any, template: Template, word: str) -> list[int] | None:
    """Return the tokens of the word in the sentence that it completes, its space included.

    The result is None if a token holds more than the word. Placeholder words stand for the texts.
    Reading the word alone, or after some other word, would not do: "no" after a quotation mark is
    the token "no", and after a letter the end of another word.
    """
    place = template.pieces.index(MASK)
    filled = ["a" if piece in TEXTS else piece for piece in template.pieces]
    before, after = "".join(filled[:place]), "".join(filled[place + 1 :])
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
    others = dict.fromkeys([word.lower(), word.capitalize(), *similar])
    fits = (o for o in others if o != word and _is_one(tokenizer, _read(tokenizer, template, o)))
    return list(islice(fits, _SHOWN))
