"""Let a model write (beams, nucleus sampling or greedily, in batches of prompts of like length),
evaluate it (perplexity of the references, and scores of its own texts), and keep what it writes as
rows in the columns of its training rows.

Nothing here reads or moves the private random sources: sampling uses torch's global generator,
seeded for the call and restored after it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.distributed.processes import Processes
from hf_dp.errors import ConfigError, DataError
from hf_dp.losses import (
    base_model,
    number_of_targets,
    padding_moves_prompts,
    per_example_loss,
    positions_of,
)
from hf_dp.tasks.generation.arguments import (
    BEAM,
    MESSAGES,
    NUCLEUS,
    TABLE,
    DecodingArguments,
    Table,
    TextArguments,
    read_row,
)
from hf_dp.tasks.generation.encoding import (
    ASSISTANT,
    ENCODED,
    ChatEncoding,
    Encoding,
    columns_read,
    encode,
    questions,
)
from hf_dp.tasks.generation.scores import score
from hf_dp.tasks.sources import require_columns

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Of a GenerationConfig: what does not decide what is written, and max_new_tokens does.
_OF_NO_TEXT = {"max_length", "use_cache", "transformers_version"}

Collate = Callable[[list[dict[str, list[int]]]], Mapping[str, Tensor]]


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    settings: DecodingArguments,
    *,
    progress: bool = True,
) -> list[str]:
    """Return one text for each prompt, in their order, without the prompt.

    Prompts are sorted by length and padded on the left for a decoder, so that what is written
    stands after the prompt. The same prompts, settings and machine give the same texts.
    """
    from tqdm.auto import tqdm

    check_prompts(model, prompts, settings)
    batches = _batches(model, prompts, settings.decoding_batch_size)
    options = _options(model, tokenizer, settings)
    generate: Any = model.generate
    encodes = _is_encoder_decoder(model)
    side = "right" if encodes else "left"
    texts = [""] * len(prompts)
    training, device = model.training, next(model.parameters()).device
    devices = [device] if device.type != "cpu" else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(settings.decoding_seed)
            for batch in tqdm(batches, desc="Decoding", disable=not progress):
                given = {"input_ids": [list(prompts[i]) for i in batch]}
                inputs = tokenizer.pad(given, padding_side=side, return_tensors="pt").to(device)
                written = generate(**inputs, **options)
                if not encodes:
                    written = written[:, inputs["input_ids"].shape[1] :]
                found = tokenizer.batch_decode(written, skip_special_tokens=True)
                for i, text in zip(batch, found):
                    for stop in settings.stop:
                        text = text.split(stop, 1)[0]
                    texts[i] = text.strip()
    finally:
        model.train(training)
    return texts


def _batches(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], size: int
) -> list[list[int]]:
    """Return the places of prompts of like length; of equal length where padding would matter."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    alike = padding_moves_prompts(model)
    groups = [list(group) for _, group in groupby(order, lambda i: len(prompts[i]) * alike)]
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]


def _options(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: DecodingArguments
) -> dict[str, object]:
    """Return the keywords of ``generate``. A model's own generation_config decides about its
    special tokens alone: all else is given, as here or as transformers has it by default."""
    from transformers import GenerationConfig

    known = GenerationConfig()
    defaults = known._get_default_generation_params()
    options: dict[str, object] = {
        name: defaults.get(name)
        for name in vars(known)
        if name[0] != "_" and not name.endswith("_token_id") and name not in _OF_NO_TEXT
    } | {
        "max_new_tokens": settings.max_new_tokens,
        "num_beams": settings.num_beams if settings.decoding == BEAM else 1,
        "do_sample": settings.decoding == NUCLEUS,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.decoding == NUCLEUS:
        options |= {"top_p": settings.top_p, "top_k": 0, "temperature": settings.temperature}
    if settings.one_line:
        options["suppress_tokens"] = _with_line_breaks(tokenizer)
    if settings.stop:
        options |= {"stop_strings": list(settings.stop), "tokenizer": tokenizer}
    if getattr(base_model(model).generation_config, "eos_token_id", None) is None:
        options["eos_token_id"] = tokenizer.eos_token_id
    return options


def _with_line_breaks(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens whose text has a line break, but for the end token."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return [
        token
        for token, text in enumerate(texts)
        if ("\n" in text or "\r" in text) and token != tokenizer.eos_token_id
    ]


def check_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodingArguments,
    virtual: int = 0,
) -> None:
    """Raise DataError for a prompt that is empty, or leaves no room to write; as decode does. Of
    the model's positions an adapter that it has not yet will take ``virtual``."""
    lengths = [len(prompt) for prompt in prompts]
    if lengths and not min(lengths):
        raise DataError(
            f"Prompt {lengths.index(0)} has no token, but a model needs one to write after. Begin "
            "with the tokenizer's beginning or end token."
        )
    limit = None if _is_encoder_decoder(model) else positions_of(model)
    if limit and lengths and max(lengths) + settings.max_new_tokens > limit - virtual:
        raise DataError(
            f"Prompt {lengths.index(max(lengths))} has {max(lengths)} tokens, and with "
            f"`max_new_tokens` {settings.max_new_tokens} it exceeds the {limit - virtual} "
            "positions of the model. Shorten it, or lower `max_new_tokens`."
        )


def _is_encoder_decoder(model: PreTrainedModel) -> bool:
    return bool(getattr(base_model(model).config, "is_encoder_decoder", False))


# -- evaluation --


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set, and what the model is to write: each different prompt once."""

    name: str  # of the split or file
    encoded: Dataset  # one row for each reference, with labels
    prompts: list[list[int]]  # token ids
    references: list[list[str]]  # the texts that are right for each prompt


def evaluation_sets(
    sets: Mapping[str, Dataset],
    data: TextArguments,
    decoding: DecodingArguments,
    encoding: Encoding,
    keep: str | None = None,
) -> list[EvaluationSet]:
    """Return the evaluation sets, encoded (with the column ``keep``) and as questions."""
    found = []
    for name, rows in sets.items():
        asked, right = questions(rows, data, encoding)
        asked, right = asked[: decoding.max_decoded], right[: decoding.max_decoded]
        blank = [i for i, texts in enumerate(right) if not all(texts)]
        if data.metrics and blank:
            raise DataError(
                f"The evaluation set {name!r} has a blank target (of its different prompts: number "
                f"{blank[0]}), with which no text can be compared. Fill it in or drop the row; or "
                "leave the scores out, metrics: []."
            )
        found.append(EvaluationSet(name, encode(rows, data, encoding, keep), asked, right))
    return found


class Evaluated(NamedTuple):
    """What the evaluation found."""

    metrics: dict[str, float]  # eval_bleu, or eval_NAME_bleu where there are several sets
    lines: list[str]  # the same to read, and what was not available


def evaluate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    collate: Collate,
    sets: list[EvaluationSet],
    data: TextArguments,
    decoding: DecodingArguments,
    *,
    folder: str | None = None,
    batch_size: int = 8,
) -> Evaluated:
    """Return perplexity and scores of each set; with several processes, all divide the work.

    Args: data: names the scores; without any, nothing is decoded. folder: where the texts are
    written, as ``generations.jsonl``: prompt, text, references.
    """
    processes = Processes.here()
    metrics: dict[str, float] = {}
    lines: list[str] = []
    for one in sets:
        name = f"{one.name} " if len(sets) > 1 else ""
        where = f"{len(one.encoded)} {name}evaluation rows"
        rows = one.encoded.select_columns(list(ENCODED))  # without what only says whose they are
        own = [dict(row) for row in rows.select(range(processes.rank, len(rows), processes.count))]
        shares = processes.from_each(
            partial(negative_log_likelihood, model, collate, own, batch_size)
        )
        found = {"perplexity": perplexity(*(sum(each) for each in zip(*shares)))}
        lines.append(f"perplexity on the {where}: {found['perplexity']:.4f}")
        if data.metrics:
            texts = _decode(model, tokenizer, one.prompts, decoding, processes)
            how = partial(score, data.metrics, bertscore_model=data.bertscore_model)
            scores = processes.on_main(partial(how, texts, one.references))
            found |= scores.values
            on = f"on {len(texts)} different prompts of the {where}"
            lines += [f"{name} {on}: {value:.4f}" for name, value in scores.values.items()]
            missing = scores.not_available.items()
            lines += [f"{name}: not available ({why})" for name, why in missing]
            if folder is not None and processes.is_main:
                file = f"generations_{one.name}.jsonl" if len(sets) > 1 else "generations.jsonl"
                _write(Path(folder, file), tokenizer, one, texts)
        prefix = f"eval_{one.name}_" if len(sets) > 1 else "eval_"
        metrics |= {prefix + name: value for name, value in found.items()}
    return Evaluated(metrics, lines)


def _decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    decoding: DecodingArguments,
    processes: Processes,
) -> list[str]:
    own = prompts[processes.rank :: processes.count]
    shares = processes.from_each(
        lambda: decode(model, tokenizer, own, decoding, progress=processes.is_main)
    )
    return [shares[i % processes.count][i // processes.count] for i in range(len(prompts))]


def _write(
    path: Path, tokenizer: PreTrainedTokenizerBase, asked: EvaluationSet, texts: list[str]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for prompt, text, references in zip(asked.prompts, texts, asked.references):
            row = {"prompt": tokenizer.decode(prompt), "text": text, "references": references}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def negative_log_likelihood(
    model: PreTrainedModel,
    collate: Collate,
    examples: Sequence[dict[str, list[int]]],
    batch_size: int,
) -> tuple[float, int]:
    """Return the sum over all labeled tokens of -ln p(token), and the number of these tokens."""
    total, count = 0.0, 0
    device, training = next(model.parameters()).device, model.training
    order = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))
    try:
        model.eval()
        with torch.no_grad():
            for at in range(0, len(order), batch_size):
                batch = collate([examples[i] for i in order[at : at + batch_size]])
                inputs = {name: value.to(device) for name, value in batch.items()}
                tokens = number_of_targets(model, inputs)
                losses = per_example_loss(model, inputs).double().cpu()  # means over these tokens
                total += float(losses @ tokens.double().cpu())
                count += int(tokens.sum())
    finally:
        model.train(training)
    return total, count


def perplexity(total: float, count: float) -> float:
    """Return exp(total / count), the number of tokens that a model is in doubt between on average;
    infinity where it is too large for a number.

    Raises: ZeroDivisionError without any token.
    """
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf


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

    Args: prompts: rows with the columns of the prompt, taken in turn; None where the model writes
    freely (data_format text or table). count: how many rows. Of a table, texts without all columns
    are left out, and a column of whole numbers holds numbers.
    """
    import datasets

    given = _given(data, prompts)
    if decoding.decoding != NUCLEUS and count > len(given):
        raise ConfigError(
            f"decoding {decoding.decoding!r} writes one text per prompt, but {count} rows are "
            f"asked for, from {len(given)} different prompts. Set decoding: nucleus."
        )
    ids = [_prompt(row, place, data, encoding) for place, row in enumerate(given)]
    turns = [place % len(given) for place in range(count)]
    texts = decode(model, tokenizer, [ids[i] for i in turns], decoding, progress=progress)
    made = [_row(given[i], text, data) for i, text in zip(turns, texts, strict=True)]
    rows = [row for row in made if row is not None]
    if len(rows) < count:
        said = f"{count - len(rows)} of {count} texts lack columns of {columns_read(data)}"
        if not rows:
            advice = "Train longer, or raise max_new_tokens."
            raise DataError(f"{said}, each on its line, so there is no row. {advice}")
        logger.warning("%s, each on its line, and are left out.", said)
    if data.data_format == TABLE:
        for name in data.columns:
            # Not "007", a code, nor what no 64-bit number holds.
            if all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", str(row[name])) for row in rows):
                rows = [{**row, name: int(str(row[name]))} for row in rows]
    return datasets.Dataset.from_list(rows)


def _given(data: TextArguments, prompts: Dataset | None) -> list[Row]:
    """Return the columns of the prompts; one empty row where the model writes freely."""
    names = columns_read(data)
    writes = data.columns if data.data_format == TABLE else names[-1:]
    needed = names if data.data_format == MESSAGES else names[: len(names) - len(writes)]
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
            "They are in the output as they are, and no epsilon covers them: give public ones, "
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
    layout = data.layout
    if isinstance(layout, Table):
        return encoding.prompt("", place, room=1)
    written = read_row(layout, [*row.values(), layout.write("")], place)
    return encoding.prompt(written.prompt, place, room=1)


def _row(row: Row, text: str, data: TextArguments) -> Row | None:
    if data.data_format == MESSAGES:
        turns = list(row[data.messages_column])
        turns = turns[:-1] if turns[-1]["role"] == ASSISTANT else turns
        return {data.messages_column: [*turns, {"role": ASSISTANT, "content": text}]}
    layout = data.layout
    if isinstance(layout, Table):
        return layout.columns_of(text)
    return {**row, columns_read(data)[-1]: layout.write(text)}


def check_out(path: Path) -> None:
    """Raise DataError for a file that could not hold metadata, as :func:`save` does."""
    if path.suffix != ".parquet":
        raise DataError(
            f"Expected `out` to end in .parquet, whose metadata holds epsilon, got {path.name!r}."
        )


def save(rows: Dataset, path: Path, facts: Mapping[str, object]) -> None:
    """Write rows as Parquet, with facts in the metadata of its schema. Raises: as check_out."""
    import pyarrow.parquet as pq

    check_out(path)
    table = rows.data.table
    metadata = {**(table.schema.metadata or {}), METADATA_KEY: json.dumps(dict(facts)).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)
