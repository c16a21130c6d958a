"""Synthetic rows from a trained model, in the columns of its training rows.

What a private model writes is post-processing: its epsilon holds for the texts, too, however many
are written. It does not hold for the prompts, which stand in the rows as they were given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import NUCLEUS, DecodingArguments, TextArguments
from hf_dp.tasks.generation.encoding import ASSISTANT, ChatEncoding, Encoding, columns_read
from hf_dp.tasks.generation.evaluation import decode
from hf_dp.tasks.generation.formats import FORMATS, MESSAGES
from hf_dp.tasks.labels import require_columns

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METADATA_KEY = b"hf_dp"  # in the schema of the Parquet file
Row = dict[str, Any]  # values by column


def write_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: TextArguments,
    encoding: Encoding,
    prompts: Dataset | None,
    decoding: DecodingArguments,
    count: int,
    *,
    progress: bool = True,
) -> Dataset:
    """Return ``count`` rows in the layout of ``data``, each with a text of the model's own.

    Args:
        prompts: rows with the columns of the prompt, taken in turn; None where the model writes
            freely (data_format text).
        count: how many rows.

    Raises: ConfigError for prompts that are missing or not used, or where the same text would be
        written again; DataError for missing columns.
    """
    import datasets

    given = _given(data, prompts)
    if decoding.decoding != NUCLEUS and count > len(given):
        raise ConfigError(
            f"decoding {decoding.decoding!r} writes one text for a prompt, and {count} rows are "
            f"asked of {len(given)} different prompts. Set decoding: nucleus."
        )
    ids = [_prompt(row, place, data, encoding) for place, row in enumerate(given)]
    turns = [place % len(given) for place in range(count)]
    texts = decode(model, tokenizer, [ids[i] for i in turns], decoding, progress=progress)
    return datasets.Dataset.from_list(
        [_row(given[i], text, data) for i, text in zip(turns, texts, strict=True)]
    )


def _given(data: TextArguments, prompts: Dataset | None) -> list[Row]:
    """Return the columns of the prompts; one empty row where the model writes freely."""
    names = columns_read(data)
    needed = names if data.data_format == MESSAGES else names[:-1]
    if not needed:
        if prompts is not None:
            raise ConfigError(
                f"data_format {data.data_format!r} has no prompts: the model writes freely. Leave "
                "`prompts` out."
            )
        return [{}]
    if prompts is None:
        raise ConfigError(
            f"data_format {data.data_format!r} needs `prompts`, a file with the columns {needed}. "
            "They stand in the output as they are and no epsilon covers them: give public ones, "
            "not those of the training rows."
        )
    require_columns(prompts, needed, "prompts")
    return [{name: row[name] for name in needed} for row in prompts]


def _prompt(row: Row, place: int, data: TextArguments, encoding: Encoding) -> list[int]:
    if isinstance(encoding, ChatEncoding):
        turns = row[data.messages_column]
        if turns and turns[-1]["role"] != ASSISTANT:
            turns = [*turns, {"role": ASSISTANT, "content": ""}]  # what is to be written
        return encoding.prompt(turns, place, room=1)
    layout = FORMATS[data.data_format]
    written = layout.read(*row.values(), layout.write(""))
    return encoding.prompt(written.prompt, place, room=1)


def _row(row: Row, text: str, data: TextArguments) -> Row:
    if data.data_format == MESSAGES:
        turns = list(row[data.messages_column])
        turns = turns[:-1] if turns[-1]["role"] == ASSISTANT else turns
        return {data.messages_column: [*turns, {"role": ASSISTANT, "content": text}]}
    return {**row, columns_read(data)[-1]: FORMATS[data.data_format].write(text)}


def check_out(path: Path) -> None:
    """Raise DataError for a file that could not hold metadata, as :func:`save` does."""
    if path.suffix != ".parquet":
        raise DataError(
            f"Expected `out` to end in .parquet, whose metadata hold epsilon, got {path.name!r}."
        )


def save(rows: Dataset, path: Path, facts: Mapping[str, object]) -> None:
    """Write rows as Parquet, with facts in the metadata of its schema. Raises: as check_out."""
    import pyarrow.parquet as pq

    check_out(path)
    table = rows.data.table
    metadata = {**(table.schema.metadata or {}), METADATA_KEY: json.dumps(dict(facts)).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)
