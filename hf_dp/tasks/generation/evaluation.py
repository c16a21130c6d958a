"""Evaluate a model that writes: perplexity of the references, and scores of its own texts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_dp.distributed.processes import Processes
from hf_dp.errors import DataError
from hf_dp.losses import number_of_targets, per_example_loss
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.decoding import decode
from hf_dp.tasks.generation.encoding import ENCODED, Encoding, Questions, encode, questions
from hf_dp.tasks.generation.scores import score

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Collate = Callable[[list[dict[str, list[int]]]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set."""

    name: str  # of the split or file
    encoded: Dataset  # one row for each reference, with labels
    asked: Questions  # what the model is to write


def evaluation_sets(
    sets: Mapping[str, Dataset],
    data: TextArguments,
    decoding: DecodingArguments,
    encoding: Encoding,
    keep: str | None = None,
) -> list[EvaluationSet]:
    """Return the evaluation sets, encoded (with the column ``keep``) and as questions.

    Raises: DataError as :func:`encode` does, and for a blank target where scores compare with it.
    """
    found = []
    for name, rows in sets.items():
        asked = questions(rows, data, encoding).first(decoding.max_decoded)
        blank = [i for i, texts in enumerate(asked.references) if not all(texts)]
        if data.metrics and blank:
            raise DataError(
                f"The evaluation set {name!r} has a blank target (of its different prompts: number "
                f"{blank[0]}), and no text can be compared with it. Fill it in or drop the row; or "
                "leave the scores out, metrics: []."
            )
        found.append(EvaluationSet(name, encode(rows, data, encoding, keep), asked))
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

    Args:
        data: names the scores; without any, nothing is decoded.
        folder: where the texts are written, as ``generations.jsonl``: prompt, text, references.

    Raises: InvalidArgumentError for an unknown score; DataError.
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
            asked = one.asked
            texts = _decode(model, tokenizer, asked.prompts, decoding, processes)
            options = {"bertscore_model": data.bertscore_model}
            scores = processes.on_main(
                partial(score, data.metrics, texts, asked.references, **options)
            )
            found |= scores.values
            on = f"on {len(texts)} different prompts of the {where}"
            lines += [f"{name} {on}: {value:.4f}" for name, value in scores.values.items()]
            missing = scores.not_available.items()
            lines += [f"{name}: not available ({why})" for name, why in missing]
            if folder is not None and processes.is_main:
                file = f"generations_{one.name}.jsonl" if len(sets) > 1 else "generations.jsonl"
                _write(Path(folder, file), tokenizer, asked, texts)
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
    path: Path, tokenizer: PreTrainedTokenizerBase, asked: Questions, texts: list[str]
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
