"""Write a conversation as token ids, with labels on the assistant's turns alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
Turns = Sequence[Mapping[str, str]]
Example = dict[str, list[int]]


@dataclass(frozen=True)
class ChatEncoding:
    """Conversations in the layout of a tokenizer's chat template.

    Which tokens are the assistant's is known in one of two ways. A template with ``{% generation
    %}`` says it; TRL knows such a version of many templates. Otherwise each turn is what the
    template adds to the turns before it.

    Args:
        max_length: of a conversation, in tokens; its end is cut.

    Raises: DataError for a tokenizer without a chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "data_format 'messages' needs a tokenizer with a chat template, and that of this "
                "model has none. Take an instruction-tuned model, or set tokenizer.chat_template "
                "and save the tokenizer beside the model."
            )

    @cached_property
    def template(self) -> str | None:
        """The template that marks what the assistant writes; None where none is known."""
        given = self.tokenizer.chat_template
        given = given.get("default") if isinstance(given, dict) else given
        if given is not None and has_markers(given):
            return given
        try:
            from trl.chat_template_utils import get_training_chat_template

            return get_training_chat_template(self.tokenizer)
        except (ImportError, ValueError):  # a ValueError: a template that TRL does not know
            return None

    def example(self, messages: Turns, row: int) -> Example:
        """Return ``input_ids``, ``attention_mask`` and ``labels`` of a conversation.

        Raises: DataError for turns that the template refuses or rewrites, or where no token of the
            assistant's is left.
        """
        ids, mask = (each[: self.max_length] for each in self._masked(messages, row))
        if not any(mask):
            raise DataError(
                f"Row {row} has no token of the assistant's in its first {self.max_length}. Raise "
                "`max_length`, or drop such rows."
            )
        labels = [token if own else IGNORED_LABEL for token, own in zip(ids, mask)]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    def _masked(self, messages: Turns, row: int) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, uncut, and 1 for each of the assistant's."""
        turns = _turns(messages, row)
        if self.template:
            found = self._apply(messages, row, return_assistant_tokens_mask=True)
            return found["input_ids"], found["assistant_masks"]
        whole = self._apply(messages, row)["input_ids"]
        mask = [0] * len(whole)
        for turn in turns:
            before = self._before(messages, turn, row)
            after = self._apply(messages[: turn + 1], row)["input_ids"]
            if after[: len(before)] != before or whole[: len(after)] != after:
                raise DataError(
                    f"The chat template rewrites earlier turns (seen in row {row}, turn {turn}), "
                    "so which tokens are the assistant's is not known. Use a template with {% "
                    "generation %} blocks, or install TRL, which has such versions of many: pip "
                    "install 'hf-dp[trl]'."
                )
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
        return whole, mask

    def prompt(self, messages: Turns, row: int, room: int) -> list[int]:
        """Return the token ids after which the assistant's last turn is to be written.

        Raises: DataError for turns that the template refuses, or that leave no ``room``.
        """
        ids = self._before(messages, _turns(messages, row)[-1], row)
        if len(ids) > self.max_length - room:
            raise DataError(
                f"Row {row} has {len(ids)} tokens before the assistant's last turn, and "
                f"`max_length` {self.max_length} leaves {self.max_length - room}. Raise "
                "`max_length`, or drop such rows."
            )
        return ids

    def reference(self, messages: Turns, row: int) -> str:
        """Return the assistant's last turn."""
        return messages[_turns(messages, row)[-1]]["content"]

    def _before(self, messages: Turns, turn: int, row: int) -> list[int]:
        """Return the token ids after which an assistant's turn begins."""
        if turn == 0:
            raise DataError(
                f"Row {row} begins with the {ASSISTANT}'s turn, and before it the chat template "
                "has nothing to write. Put a turn before it (a system's, for example), or drop "
                "such rows."
            )
        return self._apply(messages[:turn], row, add_generation_prompt=True)["input_ids"]

    def _apply(self, messages: Turns, row: int, **options: bool) -> Mapping[str, list[int]]:
        from jinja2 import TemplateError

        options |= {"tokenize": True, "return_dict": True}
        apply: Any = self.tokenizer.apply_chat_template
        try:
            return apply(list(messages), chat_template=self.template, **options)
        except TemplateError as problem:
            raise DataError(
                f"The chat template refuses row {row}: {problem}. Correct its turns (roles are "
                f"{[message['role'] for message in messages]})."
            ) from problem


def has_markers(template: str) -> bool:
    """Return whether a chat template marks what the assistant writes."""
    return any(f"{{%{dash} generation" in template for dash in ("", "-"))


def _turns(messages: Turns, row: int) -> list[int]:
    """Return the places of the assistant's turns. Raises: DataError where there is none."""
    fit = isinstance(messages, list) and all(
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in messages
    )
    if not fit:
        raise DataError(
            f"Row {row}: expected a list of turns, each with `role` and `content` as text, got "
            f"{type(messages).__name__}. Drop or correct such rows."
        )
    places = [i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT]
    if not places:
        raise DataError(
            f"Row {row} has no turn with the role {ASSISTANT!r}. Drop it, or rename the roles."
        )
    return places
