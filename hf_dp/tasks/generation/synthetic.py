"""Synthetic rows from a trained model, in the columns of its training rows.

What a private model writes is post-processing: its epsilon holds for the texts, too, however many
are written. It does not hold for the prompts, which stand in the rows as they were given.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import NUCLEUS, DecodingArguments, TextArguments
from hf_dp.tasks.generation.chat import ASSISTANT, ChatEncoding
from hf_dp.tasks.generation.data import Encoding, columns_read
from hf_dp.tasks.generation.decoding import decode
from hf_dp.tasks.generation.formats import FORMATS, MESSAGES
from hf_dp.tasks.labels import require_columns

METADATA_KEY = b"hf_dp"  # in the schema of the Parquet file


def write_rows(
    model: Any,
    tokenizer: Any,
    data: TextArguments,
    encoding: Encoding,
    prompts: Any,
    decoding: DecodingArguments,
    count: int,
    *,
    progress: bool = True,
) -> Any:
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
    rows = [given[i % len(given)] for i in range(count)]
    ids = [_prompt(row, place, data, encoding) for place, row in enumerate(given)]
    asked = [ids[i % len(ids)] for i in range(count)]
    texts = decode(model, tokenizer, asked, decoding, progress=progress)
    return datasets.Dataset.from_list(
        [_row(row, text, data) for row, text in zip(rows, texts, strict=True)]
    )


def _given(data: TextArguments, prompts: Any) -> list[dict[str, Any]]:
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


def _prompt(
    row: Mapping[str, Any], place: int, data: TextArguments, encoding: Encoding
) -> list[int]:
    if isinstance(encoding, ChatEncoding):
        turns = row[data.messages_column]
        if turns and turns[-1]["role"] != ASSISTANT:
            turns = [*turns, {"role": ASSISTANT, "content": ""}]  # what is to be written
        return encoding.prompt(turns, place, room=1)
    layout = FORMATS[data.data_format]
    written = layout.read(*row.values(), layout.write(""))
    return encoding.prompt(written.prompt, place, room=1)


def _row(row: Mapping[str, Any], text: str, data: TextArguments) -> dict[str, Any]:
    if data.data_format == MESSAGES:
        turns = list(row[data.messages_column])
        turns = turns[:-1] if turns[-1]["role"] == ASSISTANT else turns
        return {data.messages_column: [*turns, {"role": ASSISTANT, "content": text}]}
    return {**row, columns_read(data)[-1]: FORMATS[data.data_format].write(text)}


def texts_of(rows: Any, data: TextArguments) -> list[str]:
    """Return the texts of rows, without their prompts.

    Raises: DataError for missing columns.
    """
    names = columns_read(data)
    require_columns(rows, names, "data_format")
    if data.data_format == MESSAGES:
        return [
            turn["content"]
            for turns in rows[data.messages_column]
            for turn in turns
            if turn["role"] == ASSISTANT
        ]
    layout = FORMATS[data.data_format]
    return [
        text.strip()
        for values in zip(*(rows[name] for name in names))
        for text in layout.read(*values).targets
    ]


def check_out(path: Path) -> None:
    """Raise DataError for a file that could not hold metadata, as :func:`save` does."""
    if path.suffix != ".parquet":
        raise DataError(
            f"Expected `out` to end in .parquet, whose metadata hold epsilon, got {path.name!r}."
        )


def save(rows: Any, path: Path, facts: Mapping[str, Any]) -> None:
    """Write rows as Parquet, with facts in the metadata of its schema. Raises: as check_out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_out(path)
    table: pa.Table = rows.data.table
    metadata = {**(table.schema.metadata or {}), METADATA_KEY: json.dumps(dict(facts)).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def nearest(
    texts: Sequence[str], real: Sequence[str], size: int = 4
) -> list[tuple[float, int, int]]:
    """Return for each text its nearest real one: the share of its word n-grams that stand there.

    What it returns is computed from the real texts without noise: no epsilon covers it.

    Args: size: n. Texts of fewer words have the share 0.

    Returns: (share, index of the text, index of the real one), in the order of the texts.
    """
    places: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for place, text in enumerate(real):
        for gram in grams(text, size):
            places[gram].add(place)
    found = []
    for index, text in enumerate(texts):
        own = set(grams(text, size))
        shared = Counter(place for gram in own for place in places.get(gram, ()))
        place, count = shared.most_common(1)[0] if shared else (0, 0)
        found.append((count / max(len(own), 1), index, place))
    return found


def grams(text: str, size: int) -> list[tuple[str, ...]]:
    """Return the word n-grams of a text, in lower case."""
    words = text.lower().split()
    return [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]


def compare(
    synthetic: Sequence[str], real: Sequence[str], phrases: Sequence[str] = ()
) -> list[str]:
    """Return how like real texts synthetic ones are, as lines to read: lengths, words, phrases.

    All of it is computed from the real texts without noise. It is for the eyes of those who may see
    them; no epsilon covers it. The share of different 2-grams is that of texts of equal number.

    Raises: InvalidArgumentError when one of them is empty.
    """
    sides = (synthetic, real)
    for name, texts in zip(("synthetic", "real"), sides):
        if not texts:
            raise invalid(name, [], "to have at least one text")
    equal = min(map(len, sides))

    def line(what: str, of: Callable[[Sequence[str]], Any], form: str = ".3f") -> str:
        return f"{what}: {of(synthetic):{form}} (real: {of(real):{form}})"

    def lengths(texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def different(texts: Sequence[str]) -> float:
        found = _counts(texts[:equal], 2)
        return len(found) / max(found.total(), 1)

    def share(phrase: str) -> Callable[[Sequence[str]], Any]:
        return lambda texts: np.mean([phrase.lower() in text.lower() for text in texts])

    return [
        line("words in a text, median", lambda texts: np.median(lengths(texts)), "g"),
        line("words in a text, 95th percentile", lambda t: np.percentile(lengths(t), 95), "g"),
        line("different 2-grams", different),
        *(
            f"divergence of {n}-grams: {divergence(*(_counts(texts, n) for texts in sides)):.3f} "
            "of 1 (0: as often as in the real texts)"
            for n in (1, 2)
        ),
        *(line(f"texts with {phrase!r}", share(phrase)) for phrase in phrases),
    ]


def _counts(texts: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(gram for text in texts for gram in grams(text, size))


def divergence(first: Counter[tuple[str, ...]], second: Counter[tuple[str, ...]]) -> float:
    """Return the Jensen-Shannon divergence of two frequencies, in bits; 1 where one has none."""
    if not first or not second:
        return 0.0 if not first and not second else 1.0
    total = 0.0
    for gram in first.keys() | second.keys():
        p, q = first[gram] / first.total(), second[gram] / second.total()
        middle = (p + q) / 2
        total += sum(0.5 * share * math.log2(share / middle) for share in (p, q) if share)
    return total
