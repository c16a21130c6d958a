"""From rows of a generation task to token ids: for training, and as questions with references.

Labels stand on the target alone, in a conversation on the assistant's turns alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_dp.errors import ConfigError, DataError
from hf_dp.losses import IGNORED_LABEL
from hf_dp.run.gguf import reading
from hf_dp.tasks.generation.arguments import MESSAGES, TABLE, TextArguments, read_row
from hf_dp.tasks.models import SEQ2SEQ
from hf_dp.tasks.sources import load_train, loading, require_columns, resolve_model

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
Turns = Sequence[Mapping[str, str]]
Example = dict[str, list[int]]
ENCODED = ("input_ids", "attention_mask", "labels")


@dataclass(frozen=True)
class CausalEncoding:
    """Prompt, separator, target and an end token in one sequence, for a decoder."""

    tokenizer: PreTrainedTokenizerBase
    separator: str
    max_length: int  # of the whole sequence, in tokens
    cut_prompts: bool = False  # at their front, rather than refuse them

    def example(self, prompt: str, target: str, row: int) -> Example:
        """Return ``input_ids``, ``attention_mask`` and ``labels`` of one length, which may cut the
        target."""
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
                    "`max_length`, drop such rows, or cut off their beginnings: cut_prompts: "
                    "true."
                )
            ids = ids[-left:]
        return [*start, *ids, *end]


@dataclass(frozen=True)
class Seq2SeqEncoding:
    """A prompt for the encoder, and a target for the decoder."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int  # of a prompt, in tokens
    max_target_length: int  # in tokens, the end token included
    cut_prompts: bool = False  # at their end, rather than refuse them

    def example(self, prompt: str, target: str, row: int) -> Example:
        """Return ``input_ids`` and ``attention_mask`` of the prompt, and ``labels``: the target and
        its end token, cut where they are too long."""
        ids = self.prompt(prompt, row, 0)
        limit = self.max_target_length
        labels = self.tokenizer(text_target=target, truncation=True, max_length=limit)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end not in labels:  # nothing but a label teaches the model to stop
            labels = [*labels, end][:limit]
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


def default_separator(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what stands between a prompt and its target where the user says nothing. It is the
    beginning token where no other use of it is known (GPT-2, whose beginning and end are one token,
    as Li et al. do), else a line break."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return bos if bos is not None and bos == eos else "\n"


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before any text; GPT-2 puts none."""
    text = _plain(tokenizer, "a")
    tokens = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [at for at in range(len(tokens)) if tokens[at : at + len(text)] == text]
    return tokens[: starts[0]] if starts else []


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@dataclass(frozen=True)
class ChatEncoding:
    """Conversations in the layout of a tokenizer's chat template.

    Which tokens are the assistant's is known in one of two ways. A template with ``{% generation
    %}`` says it; TRL knows such a version of many templates. Otherwise each turn is what the
    template adds to the turns before it.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int  # of a conversation, in tokens; its end is cut

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "data_format 'messages' needs a tokenizer with a chat template, but that of this "
                "model has none. Use an instruction-tuned model, or set tokenizer.chat_template "
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
        """Return ``input_ids``, ``attention_mask`` and ``labels`` of a conversation."""
        ids, mask = (each[: self.max_length] for each in self.masked(messages, row))
        if not any(mask):
            raise DataError(
                f"Row {row} has no token of the assistant in its first {self.max_length}. Raise "
                "`max_length`, or drop such rows."
            )
        labels = [token if own else IGNORED_LABEL for token, own in zip(ids, mask)]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    def masked(self, messages: Turns, row: int) -> tuple[list[int], list[int]]:
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
        """Return the token ids after which the assistant's last turn is to be written."""
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
                f"Row {row} begins with the {ASSISTANT}'s turn, and the chat template has nothing "
                "before it. Put a turn before it (a system's, for example), or drop such rows."
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


Encoding = CausalEncoding | Seq2SeqEncoding | ChatEncoding


def encoding_of(kind: str, tokenizer: PreTrainedTokenizerBase, data: TextArguments) -> Encoding:
    """Return how rows become token ids."""
    if data.data_format == MESSAGES:
        if kind == SEQ2SEQ:
            raise ConfigError(
                "data_format 'messages' is for decoders: a chat template writes one sequence. Set "
                "task: causal_lm, or data_format: pairs."
            )
        for name in ("separator", "cut_prompts"):
            if value := getattr(data, name):
                raise ConfigError(
                    f"Expected `{name}` to be unset with data_format 'messages', got {value!r}: "
                    "the chat template says what stands between messages, and a long one is cut "
                    "at its end. Remove it."
                )
        return ChatEncoding(tokenizer, data.max_length)
    if kind == SEQ2SEQ:
        if data.separator is not None:
            raise ConfigError(
                f"`separator` ({data.separator!r}) stands between prompt and target of a decoder; "
                "an encoder-decoder takes them separately. Leave it out."
            )
        return Seq2SeqEncoding(tokenizer, data.max_length, data.max_target_length, data.cut_prompts)
    separator = default_separator(tokenizer) if data.separator is None else data.separator
    return CausalEncoding(tokenizer, separator, data.max_length, data.cut_prompts)


def encode(
    rows: Dataset, data: TextArguments, encoding: Encoding, keep: str | None = None
) -> Dataset:
    """Return a data set of ``input_ids``, ``attention_mask`` and ``labels`` (-100 but for what the
    model is to write), and of the column ``keep``. A row of several references becomes as many."""
    columns = _columns(rows, data)
    kept = [keep] if keep is not None and keep in rows.column_names else []

    def examples(values: Sequence[Any], row: int) -> list[Example]:
        if isinstance(encoding, ChatEncoding):
            return [encoding.example(values[0], row)]
        written = read_row(data.layout, values, row)
        return [encoding.example(written.prompt, target, row) for target in written.targets]

    def encode_rows(
        batch: Mapping[str, list[object]], indices: list[int]
    ) -> dict[str, list[object]]:
        encoded: dict[str, list[object]] = {name: [] for name in (*ENCODED, *kept)}
        for place, values in enumerate(zip(*(batch[name] for name in columns))):
            for example in examples(values, indices[place]):
                for name in ENCODED:
                    encoded[name].append(example[name])
                for name in kept:
                    encoded[name].append(batch[name][place])
        return encoded

    return rows.map(
        encode_rows,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        desc="Tokenizing",
    )


class TrainingExamples(NamedTuple):
    """Hold the examples that a model trains on."""

    kept: Dataset
    before: int  # examples before long ones were dropped


_NO_LIMIT = 2**31 - 1  # tokens


def encode_training(
    rows: Dataset, data: TextArguments, encoding: Encoding, keep: str | None = None
) -> TrainingExamples:
    """Return the examples to train on, as :func:`encode` makes them; with ``drop_long_rows``
    without those that would be cut.

    Whether an example stays depends on it alone, so data sets that differ in one row still do.
    """
    if not data.drop_long_rows:
        every = encode(rows, data, encoding, keep)
        return TrainingExamples(every, len(every))
    longest, longest_target = encoding.max_length, encoding.max_length
    whole: Encoding = replace(encoding, max_length=_NO_LIMIT)
    if isinstance(encoding, Seq2SeqEncoding):
        longest_target = encoding.max_target_length
        whole = replace(encoding, max_length=_NO_LIMIT, max_target_length=_NO_LIMIT)
    every = encode(rows, data, whole, keep)
    kept = every.filter(
        lambda ids, labels: len(ids) <= longest and len(labels) <= longest_target,
        input_columns=["input_ids", "labels"],
        desc="Dropping long rows",
    )
    if not len(kept):
        raise DataError(
            f"Expected a row of at most {longest} tokens, and all {len(every)} are longer. Raise "
            "`max_length`, or set drop_long_rows: false, which cuts them."
        )
    return TrainingExamples(kept, len(every))


def count_examples(recipe: Mapping[str, Any]) -> int:
    """Return how many examples the training rows of a recipe are: one for each reference, without
    those that it drops."""
    known = {item.name for item in fields(TextArguments)}
    data = TextArguments(**{name: value for name, value in recipe.items() if name in known})
    rows = load_train(data)
    if data.drop_long_rows:
        from transformers import AutoTokenizer

        file = recipe.get("gguf_file")
        model = resolve_model(recipe["model_name_or_path"], file)
        with loading(f"The tokenizer of {model!r}", "Without it, give --num-examples N."):
            tokenizer = AutoTokenizer.from_pretrained(model, **reading(file))
        return len(encode_training(rows, data, encoding_of(recipe["task"], tokenizer, data)).kept)
    if data.data_format == MESSAGES:
        return len(rows)
    columns = [rows[name] for name in _columns(rows, data)]
    read = (read_row(data.layout, values, row) for row, values in enumerate(zip(*columns)))
    return sum(len(written.targets) for written in read)


def columns_read(data: TextArguments) -> list[str]:
    """Return the columns that a row needs, that of the text last."""
    if data.data_format == MESSAGES:
        return [data.messages_column]
    if data.data_format == TABLE:
        return list(data.layout.columns)
    layout = data.layout
    columns = []
    for name in layout.columns:
        column = getattr(data, name) if name.endswith("_column") else name
        if not column:
            raise DataError(
                f"data_format {data.data_format!r} needs `{name}`: {layout.help}. Name the column."
            )
        columns.append(column)
    return columns


def _columns(rows: Dataset, data: TextArguments) -> list[str]:
    argument = "messages_column" if data.data_format == MESSAGES else "data_format"
    return require_columns(rows, columns_read(data), argument)


def questions(
    rows: Dataset, data: TextArguments, encoding: Encoding
) -> tuple[list[list[int]], list[list[str]]]:
    """Return what a model is asked to write: the token ids of each different prompt, and the texts
    that are right for it, at least one, in the order of the rows."""
    columns = _columns(rows, data)
    found: dict[tuple[int, ...], list[str]] = {}
    for row, values in enumerate(zip(*(rows[name] for name in columns))):
        if isinstance(encoding, ChatEncoding):
            prompt = encoding.prompt(values[0], row, 1)
            texts: Sequence[str] = [encoding.reference(values[0], row)]
        else:
            written = read_row(data.layout, values, row)
            prompt, texts = encoding.prompt(written.prompt, row, 1), written.targets
        found.setdefault(tuple(prompt), []).extend(text.strip() for text in texts)
    return [list(prompt) for prompt in found], list(found.values())
