"""Rows of a generation task: encoded for training, and as questions with their references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hf_dp.errors import ConfigError
from hf_dp.tasks.generation.arguments import TextArguments
from hf_dp.tasks.generation.chat import ChatEncoding
from hf_dp.tasks.generation.encoding import CausalEncoding, Seq2SeqEncoding, default_separator
from hf_dp.tasks.generation.formats import MESSAGES, columns_of, read_row
from hf_dp.tasks.generation.language_models import SEQ2SEQ
from hf_dp.tasks.labels import require_columns
from hf_dp.tasks.sources import load_train

Encoding = CausalEncoding | Seq2SeqEncoding | ChatEncoding

ENCODED = ("input_ids", "attention_mask", "labels")


def encoding_of(kind: str, tokenizer: Any, data: TextArguments) -> Encoding:
    """Return how rows become token ids.

    Raises: ConfigError for arguments that do not go together; DataError for a tokenizer without a
        chat template.
    """
    if data.data_format == MESSAGES:
        if kind == SEQ2SEQ:
            raise ConfigError(
                "data_format 'messages' is for decoders: a chat template writes one sequence. Set "
                "task: causal_lm, or data_format: pairs."
            )
        return ChatEncoding(tokenizer, data.max_length)
    if kind == SEQ2SEQ:
        if data.separator is not None:
            raise ConfigError(
                f"`separator` ({data.separator!r}) stands between prompt and target of a decoder; "
                "an encoder-decoder has them apart. Leave it out."
            )
        return Seq2SeqEncoding(tokenizer, data.max_length, data.max_target_length, data.cut_prompts)
    separator = default_separator(tokenizer) if data.separator is None else data.separator
    return CausalEncoding(tokenizer, separator, data.max_length, data.cut_prompts)


def encode(rows: Any, data: TextArguments, encoding: Encoding, keep: str | None = None) -> Any:
    """Return a data set of ``input_ids``, ``attention_mask`` and ``labels``, and of the column
    ``keep``, where there is one.

    Labels stand on the target's tokens (of messages: on the assistant's turns) and are -100
    elsewhere. A row with several references becomes as many rows.

    Raises: DataError for missing columns, or for a row that does not fit, naming its index.
    """
    columns = _columns(rows, data)

    def examples(values: Sequence[Any], row: int) -> list[dict[str, Any]]:
        if isinstance(encoding, ChatEncoding):
            return [encoding.example(values[0], row)]
        written = read_row(data.data_format, values, row)
        return [encoding.example(written.prompt, target, row) for target in written.targets]

    def encode_rows(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        encoded: dict[str, list[Any]] = {name: [] for name in ENCODED}
        kept = batch.get(keep) if keep is not None else None
        if keep is not None and kept is not None:
            encoded[keep] = []
        for place, values in enumerate(zip(*(batch[name] for name in columns))):
            for example in examples(values, indices[place]):
                for name in ENCODED:
                    encoded[name].append(example[name])
                if keep is not None and kept is not None:
                    encoded[keep].append(kept[place])
        return encoded

    return rows.map(
        encode_rows,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        desc="Tokenizing",
    )


def count_examples(recipe: Mapping[str, Any]) -> int:
    """Return how many examples the training rows of a recipe are: one for each reference.

    Raises: ConfigError, DataError as training does.
    """
    known = {item.name for item in fields(TextArguments)}
    data = TextArguments(**{name: value for name, value in recipe.items() if name in known})
    rows = load_train(data)
    if data.data_format == MESSAGES:
        return len(rows)
    columns = [rows[name] for name in _columns(rows, data)]
    read = (read_row(data.data_format, values, row) for row, values in enumerate(zip(*columns)))
    return sum(len(written.targets) for written in read)


def columns_read(data: TextArguments) -> list[str]:
    """Return the columns that a row needs, that of the text last. Raises: DataError."""
    if data.data_format == MESSAGES:
        return [data.messages_column]
    named = ("prompt_column", "target_column", "text_column")
    return columns_of(data.data_format, {name: getattr(data, name) for name in named})


def _columns(rows: Any, data: TextArguments) -> list[str]:
    columns = columns_read(data)
    argument = "messages_column" if data.data_format == MESSAGES else "data_format"
    require_columns(rows, columns, argument)
    return columns


@dataclass(frozen=True)
class Questions:
    """What a model is asked to write, each different prompt once.

    Attributes:
        prompts: token ids.
        references: the texts that are right for each prompt, at least one.
    """

    prompts: list[list[int]]
    references: list[list[str]]

    def first(self, count: int | None) -> Questions:
        """Return the first questions only; all for None."""
        return Questions(self.prompts[:count], self.references[:count])


def questions(rows: Any, data: TextArguments, encoding: Encoding, room: int = 1) -> Questions:
    """Return each prompt of the rows once, with all its references, in the order of the rows.

    Args: room: how many tokens of ``max_length`` stay free for what the model writes.

    Raises: DataError as :func:`encode` does.
    """
    columns = _columns(rows, data)
    found: dict[tuple[int, ...], list[str]] = {}
    for row, values in enumerate(zip(*(rows[name] for name in columns))):
        if isinstance(encoding, ChatEncoding):
            prompt = encoding.prompt(values[0], row, room)
            texts: Sequence[str] = [encoding.reference(values[0])]
        else:
            written = read_row(data.data_format, values, row)
            prompt, texts = encoding.prompt(written.prompt, row, room), written.targets
        found.setdefault(tuple(prompt), []).extend(text.strip() for text in texts)
    return Questions([list(prompt) for prompt in found], list(found.values()))
