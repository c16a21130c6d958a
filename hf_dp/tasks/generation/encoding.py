"""Write a prompt and its target as token ids, with labels on the target alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL


@dataclass(frozen=True)
class CausalEncoding:
    """Prompt, separator, target and an end token in one sequence, for a decoder.

    Args:
        separator: the text between prompt and target.
        max_length: of the whole sequence, in tokens.
        cut_prompts: cut the front of a prompt that is too long, rather than refuse it.
    """

    tokenizer: Any
    separator: str
    max_length: int
    cut_prompts: bool = False

    def example(self, prompt: str, target: str, row: int) -> dict[str, list[int]]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each of the same length.

        A target is cut where the sequence would be too long.

        Raises: DataError for a prompt that leaves no room for its target.
        """
        after = [*_plain(self.tokenizer, target), self.tokenizer.eos_token_id]
        before = self.prompt(prompt, row, room=min(len(after), self.max_length // 2))
        ids = [*before, *after][: self.max_length]
        labels = [*[IGNORED_LABEL] * len(before), *ids[len(before) :]]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    def prompt(self, prompt: str, row: int, room: int) -> list[int]:
        """Return the token ids after which the model writes, at most ``max_length - room``."""
        start = _beginning(self.tokenizer)
        if not prompt:
            # A token has to stand before the first one that is predicted.
            return start or [self.tokenizer.eos_token_id]
        ids = _plain(self.tokenizer, prompt)
        end = _plain(self.tokenizer, self.separator)
        # A target may be cut, so one token of room is enough; a prompt that is cut leaves more.
        left = self.max_length - (room if self.cut_prompts else 1) - len(start) - len(end)
        if len(ids) > left:
            if not self.cut_prompts or left < 1:
                raise DataError(
                    f"Row {row} has a prompt of {len(ids)} tokens, and `max_length` "
                    f"{self.max_length} leaves room for {max(left, 0)} beside its target. Raise "
                    "`max_length`, drop such rows, or cut their fronts: cut_prompts: true."
                )
            ids = ids[-left:]
        return [*start, *ids, *end]


@dataclass(frozen=True)
class Seq2SeqEncoding:
    """A prompt for the encoder, and a target for the decoder.

    Args:
        max_length: of a prompt, in tokens.
        max_target_length: of a target, in tokens, its end token included.
        cut_prompts: cut the end of a prompt that is too long, rather than refuse it.
    """

    tokenizer: Any
    max_length: int
    max_target_length: int
    cut_prompts: bool = False

    def example(self, prompt: str, target: str, row: int) -> dict[str, list[int]]:
        """Return ``input_ids`` and ``attention_mask`` of the prompt, and ``labels``.

        A target is cut where it would be too long.

        Raises: DataError for a prompt that is too long.
        """
        ids = self.prompt(prompt, row, 0)
        labels = self.tokenizer(
            text_target=target, truncation=True, max_length=self.max_target_length
        )["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    def prompt(self, prompt: str, row: int, room: int) -> list[int]:
        """Return the token ids for the encoder. ``room`` does not matter: targets have their
        own."""
        ids = self.tokenizer(prompt, verbose=False)["input_ids"]  # its length is looked at here
        if len(ids) <= self.max_length:
            return ids
        if not self.cut_prompts:
            raise DataError(
                f"Row {row} has a prompt of {len(ids)} tokens, more than `max_length` "
                f"{self.max_length}. Raise `max_length`, drop such rows, or cut them: "
                "cut_prompts: true."
            )
        return self.tokenizer(prompt, truncation=True, max_length=self.max_length)["input_ids"]


def default_separator(tokenizer: Any) -> str:
    """Return what stands between a prompt and its target where the user says nothing.

    It is the beginning token where no other use of it is known (GPT-2, whose beginning and end are
    one token, as Li et al. do), else a line break.
    """
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return bos if bos is not None and bos == eos else "\n"


def _beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before any text; GPT-2 puts none."""
    text = _plain(tokenizer, "a")
    tokens = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [at for at in range(len(tokens)) if tokens[at : at + len(text)] == text]
    return tokens[: starts[0]] if starts else []


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
