"""Canaries: synthetic rows of random words, inserted into the training rows.

Source: Li et al. (2021), appendix M. A subvocabulary of V = 10 words is drawn from the model's
vocabulary; a canary is the prompt " name : <word> | Type : <word> | area : <word>" and a suffix of
l = 5 words, all drawn at random from the subvocabulary. (There l is an average; here each suffix
has five words, so that the space R of all suffixes is known: V^l = 100,000.)
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_dp._validate import integer
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import FORMATS, TextArguments, read_row
from hf_dp.tasks.generation.encoding import CausalEncoding, columns_read

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FILE_NAME = "canaries.json"
VOCABULARY, LENGTH = 10, 5
_IN_PROMPT = 3
# After what stands for a leading space in a byte-level and in a SentencePiece token.
_WORD = re.compile("[\u0120\u2581]([A-Za-z]{3,})")


@dataclass(frozen=True)
class Canary:
    """One secret: three words of what the model is given, and five that it must not know."""

    prompt: tuple[str, ...]
    suffix: tuple[str, ...]


@dataclass(frozen=True)
class Canaries:
    """What is inserted. The canaries differ in their prompts; suffixes are drawn independently."""

    data_format: str
    words: tuple[str, ...]  # the subvocabulary
    repetitions: int  # how many rows each canary is
    canaries: tuple[Canary, ...]

    @property
    def size(self) -> int:
        """|R|, the number of suffixes that a canary could have."""
        return len(self.words) ** LENGTH

    @property
    def num_rows(self) -> int:
        """The number of rows that are inserted."""
        return self.repetitions * len(self.canaries)

    def save(self, folder: Path) -> None:
        """Write :data:`FILE_NAME`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def load(folder: Path) -> Canaries:
    """Return the canaries that a model was trained with. Raises: ConfigError without them."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        canaries = [Canary(tuple(c["prompt"]), tuple(c["suffix"])) for c in found["canaries"]]
        return Canaries(
            found["data_format"], tuple(found["words"]), found["repetitions"], tuple(canaries)
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"The folder {folder.name!r} has no {FILE_NAME} that can be read ({problem!r}), so no "
            "canaries are known to be in its training rows. Give one that `hf-dp audit exposure` "
            "trained, or leave `trained` out to train one."
        ) from problem


def make(
    tokenizer: PreTrainedTokenizerBase,
    data: TextArguments,
    *,
    count: int,
    repetitions: int,
    seed: int,
) -> Canaries:
    """Draw canaries. The same tokenizer, count and seed give the same, whatever the repetitions."""
    if data.data_format not in _ROWS:
        raise ConfigError(
            f"Expected `data_format` to be one of {sorted(_ROWS)} for canaries, got "
            f"{data.data_format!r}. Give a recipe with such rows."
        )
    integer("repetitions", repetitions, 1)
    draw = random.Random(seed)
    words = _whole_words(tokenizer, draw)
    prompts = VOCABULARY**_IN_PROMPT
    if integer("canaries", count, 1) > prompts:
        raise ConfigError(f"Expected `canaries` to be at most {prompts:,}, got {count:,}.")
    canaries = [
        Canary(
            tuple(words[number // VOCABULARY**place % VOCABULARY] for place in range(_IN_PROMPT)),
            tuple(draw.choices(words, k=LENGTH)),
        )
        for number in draw.sample(range(prompts), count)
    ]
    return Canaries(data.data_format, words, repetitions, tuple(canaries))


def _whole_words(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> tuple[str, ...]:
    """Draw words that are one token each, with the space before them, wherever they stand."""
    listed = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    found = [(match[1], token) for text, token in listed if (match := _WORD.fullmatch(text))]
    draw.shuffle(found)
    words: list[str] = []
    for word, token in found:
        twice = tokenizer(f" {word} {word}", add_special_tokens=False)["input_ids"]
        if twice == [token, token]:
            words.append(word)
        if len(words) == VOCABULARY:
            return tuple(words)
    raise DataError(
        f"Expected the tokenizer to have at least {VOCABULARY} whole words (tokens of a space and "
        f"three or more letters), found {len(words)}. Use a model with a larger vocabulary."
    )


# -- rows --


def _e2e(canary: Canary) -> tuple[str, str]:
    keys = ("name", "eatType", "area")  # which the layout writes as name, Type, area
    table = ", ".join(f"{key}[{word}]" for key, word in zip(keys, canary.prompt))
    return table, " ".join(canary.suffix)


def _pairs(canary: Canary) -> tuple[str, str]:
    prompt = read_row(FORMATS["e2e"], _e2e(canary), 0).prompt
    return prompt, " " + " ".join(canary.suffix)


# layout of data -> the values of a canary's prompt and target, as such rows have them
_ROWS: dict[str, Callable[[Canary], tuple[str, str]]] = {"e2e": _e2e, "pairs": _pairs}


def insert(rows: Dataset, data: TextArguments, canaries: Canaries) -> Dataset:
    """Return the rows, and after them each canary as many times as it is repeated. Other columns
    than the layout's are left out."""
    import datasets

    from hf_dp.tasks.sources import require_columns

    prompt, target = columns_read(data)
    require_columns(rows, [prompt, target], "data_format")
    kept = rows.select_columns([prompt, target])
    plain = isinstance(kept.features[target], datasets.Value)  # else a list of references
    added = [
        {prompt: given, target: text if plain else [text]}
        for given, text in map(_ROWS[data.data_format], canaries.canaries)
        for _ in range(canaries.repetitions)
    ]
    return datasets.concatenate_datasets(
        [kept, datasets.Dataset.from_list(added, features=kept.features)]
    )


# -- tokens --


def check_encoding(canaries: Canaries, data: TextArguments, encoding: CausalEncoding) -> None:
    """Raise DataError unless a row of each canary is its prefix, its words, a token each, and the
    end."""
    for canary in canaries.canaries:
        written = read_row(data.layout, _ROWS[data.data_format](canary), 0)
        ids = encoding.example(written.prompt, written.targets[0], 0)["input_ids"]
        suffix = tokens(canary.suffix, encoding.tokenizer)
        whole = [*prefix(canary, data, encoding), *suffix, encoding.tokenizer.eos_token_id]
        if ids != whole:
            raise DataError(
                f"The canary {written.prompt + written.targets[0]!r} is not written as a prompt "
                f"and {LENGTH} words of one token each, within `max_length` {data.max_length}. "
                "Raise `max_length`; if that does not help, the tokenizer joins words and cannot "
                "be audited like this."
            )


def prefix(canary: Canary, data: TextArguments, encoding: CausalEncoding) -> list[int]:
    """Return the token ids that stand before a canary's suffix."""
    written = read_row(data.layout, _ROWS[data.data_format](canary), 0)
    return encoding.prompt(written.prompt, 0, LENGTH)


def tokens(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token of each word."""
    return [tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in words]


def every_suffix(canaries: Canaries, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return R as (V^l, l) token ids; the suffix of number i is row i."""
    ids = torch.tensor(tokens(canaries.words, tokenizer))
    return torch.cartesian_prod(*[ids] * LENGTH)


def number(canary: Canary, canaries: Canaries) -> int:
    """Return the row of a canary's suffix in :func:`every_suffix`."""
    place = 0
    for word in canary.suffix:
        place = place * len(canaries.words) + canaries.words.index(word)
    return place


def candidates(canaries: Canaries, count: int, seed: int) -> list[int]:
    """Draw numbers of suffixes that no canary has, without repetition."""
    taken = {number(canary, canaries) for canary in canaries.canaries}
    room = canaries.size - len(taken)
    if integer("candidates", count, 100) > room:
        raise ConfigError(
            f"Expected `candidates` to be at most {room:,}, the suffixes that no canary has, got "
            f"{count:,}."
        )
    drawn = random.Random(f"candidates {seed}").sample(range(canaries.size), count + len(taken))
    return [place for place in drawn if place not in taken][:count]
