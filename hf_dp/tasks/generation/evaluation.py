"""Evaluate a model that writes: perplexity of the references, and scores of its own texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_dp.distributed.processes import Processes
from hf_dp.errors import DataError
from hf_dp.losses import number_of_targets, per_example_loss
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.data import ENCODED, Encoding, Questions, encode, questions
from hf_dp.tasks.generation.decoding import decode
from hf_dp.tasks.generation.scores import score


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set.

    Attributes:
        name: of the split or file.
        encoded: one row for each reference, with labels.
        asked: what the model is to write.
    """

    name: str
    encoded: Any
    asked: Questions

    @property
    def inputs(self) -> Any:
        """The rows without what only says whose they are."""
        return self.encoded.select_columns(list(ENCODED))


def evaluation_sets(
    sets: Mapping[str, Any],
    data: TextArguments,
    decoding: DecodingArguments,
    encoding: Encoding,
    keep: str | None = None,
) -> list[EvaluationSet]:
    """Return the evaluation sets, encoded (with the column ``keep``) and as questions.

    Raises: DataError as :func:`encode` does, and for a blank target where scores compare with it.
    """
    found = [
        EvaluationSet(
            name,
            encode(rows, data, encoding, keep),
            questions(rows, data, encoding).first(decoding.max_decoded),
        )
        for name, rows in sets.items()
    ]
    if data.metrics:
        for one in found:
            _refuse_blank(one)
    return found


def _refuse_blank(one: EvaluationSet) -> None:
    for prompt, texts in enumerate(one.asked.references):
        if not all(texts):
            raise DataError(
                f"The evaluation set {one.name!r} has a blank target (of its different prompts: "
                f"number {prompt}), and no text can be compared with it. Fill it in or drop the "
                "row; or leave the scores out, metrics: []."
            )


@dataclass(frozen=True)
class Evaluated:
    """What the evaluation found.

    Attributes:
        metrics: by the Trainer's names: eval_perplexity, eval_bleu, or eval_NAME_bleu where there
            are several sets.
        lines: the same to read, and what was not available.
    """

    metrics: dict[str, float]
    lines: list[str]


def evaluate_texts(
    model: Any,
    tokenizer: Any,
    collate: Any,
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
        prefix = f"eval_{one.name}_" if len(sets) > 1 else "eval_"
        where = f"{len(one.encoded)} {one.name + ' ' if len(sets) > 1 else ''}evaluation rows"
        found = {"perplexity": _perplexity(model, collate, one.inputs, batch_size)}
        lines.append(f"perplexity on the {where}: {found['perplexity']:.4f}")
        if data.metrics:
            texts = _decode(model, tokenizer, one.asked.prompts, decoding)
            scores = processes.on_main(
                partial(
                    score,
                    data.metrics,
                    texts,
                    one.asked.references,
                    bertscore_model=data.bertscore_model,
                )
            )
            found |= scores.values
            asked = f"{len(texts)} different prompts of the {where}"
            lines += [f"{name} on {asked}: {value:.4f}" for name, value in scores.values.items()]
            lines += [
                f"{name}: not available ({why})" for name, why in scores.not_available.items()
            ]
            if folder is not None and processes.is_main:
                name = f"generations_{one.name}.jsonl" if len(sets) > 1 else "generations.jsonl"
                _write(Path(folder, name), tokenizer, one.asked, texts)
        metrics |= {prefix + name: value for name, value in found.items()}
    return Evaluated(metrics, lines)


def _perplexity(model: Any, collate: Any, encoded: Any, batch_size: int) -> float:
    processes = Processes.here()
    own = range(processes.rank, len(encoded), processes.count)
    examples = [dict(row) for row in encoded.select(own)]
    shares = processes.from_each(
        lambda: negative_log_likelihood(model, collate, examples, batch_size)
    )
    return perplexity(sum(total for total, _ in shares), sum(count for _, count in shares))


def _decode(
    model: Any, tokenizer: Any, prompts: list[list[int]], decoding: DecodingArguments
) -> list[str]:
    processes = Processes.here()
    own = prompts[processes.rank :: processes.count]
    shares = processes.from_each(
        lambda: decode(model, tokenizer, own, decoding, progress=processes.is_main)
    )
    return [shares[i % processes.count][i // processes.count] for i in range(len(prompts))]


def _write(path: Path, tokenizer: Any, asked: Questions, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(asked.prompts, texts, asked.references)
    path.write_text(
        "".join(
            json.dumps(
                {"prompt": tokenizer.decode(prompt), "text": text, "references": references},
                ensure_ascii=False,
            )
            + "\n"
            for prompt, text, references in rows
        ),
        encoding="utf-8",
    )


def negative_log_likelihood(
    model: Any, collate: Any, examples: Sequence[dict[str, Any]], batch_size: int
) -> tuple[float, int]:
    """Return the sum over all labeled tokens of -ln p(token), and the number of these tokens.

    Args:
        collate: the task's data collator, which pads.
        examples: encoded rows.
    """
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


def perplexity(total: float, count: int) -> float:
    """Return exp(total / count); infinity where it is too large for a number.

    Raises: ZeroDivisionError without any token.
    """
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf
