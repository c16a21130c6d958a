"""Score generated texts against references, by the metrics that their task is known by."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError, MetricUnavailableError

METRICS = {
    "bleu": "BLEU of the corpus, 0 to 100 (sacrebleu, lower case, 13a): that of the E2E script",
    "e2e_nist": "NIST-5 of the corpus, from 0, as the E2E script has it: all references together",
    "rouge1": "ROUGE-1, F1 from 0 to 1 (rouge-score, stemmed): the best reference of a row",
    "rouge2": "ROUGE-2, F1 from 0 to 1 (rouge-score, stemmed): the best reference of a row",
    "rougeL": "ROUGE-L, F1 from 0 to 1 (rouge-score, stemmed): the best reference of a row",
    "e2e_rouge_l": "ROUGE-L of the E2E script, 0 to 1 (pycocoevalcap); needs Java",
    "cider": "CIDEr of the E2E script, 0 to 10 (pycocoevalcap); needs Java",
    "meteor": "METEOR 1.5 of the E2E script, 0 to 1 (its authors' program); needs Java",
    "bertscore_f1": "BERTScore F1, not rescaled (bert-score); needs a local model",
    "dialog_f1": "F1 of words as ParlAI scores dialog, 0 to 1: the best reference of a row",
}

# The function in metrics.py of each metric, where it is named otherwise.
_FUNCTIONS = {"rouge1": "rouge", "rouge2": "rouge", "rougeL": "rouge", "bertscore_f1": "bertscore"}
# What each function imports of the extra `generation`.
_PACKAGES = {
    "bleu": ("sacrebleu",),
    "e2e_nist": ("sacrebleu", "nltk"),
    "rouge": ("rouge_score",),
    **dict.fromkeys(("e2e_rouge_l", "cider", "meteor"), ("pycocoevalcap",)),
    "bertscore": ("bert_score",),
}


@dataclass(frozen=True)
class Scores:
    """Numbers by metric, how each was computed, and why others could not be.

    Attributes:
        values: finite numbers by the names of :data:`METRICS`, in their units.
        how: for each of them package, version, settings and model.
        not_available: for each of the other metrics that were asked for, the reason.
    """

    values: dict[str, float]
    how: dict[str, str]
    not_available: dict[str, str]

    def __str__(self) -> str:
        found = [f"{name} {value:.4f} ({self.how[name]})" for name, value in self.values.items()]
        missing = [f"{name} not available: {why}" for name, why in self.not_available.items()]
        return "\n".join(found + missing)


def score(
    names: Sequence[str],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    bertscore_model: str | Path | None = None,
) -> Scores:
    """Score one prediction a row against the references of the row.

    Nothing is downloaded. A metric that cannot be computed here is never replaced by another one;
    :attr:`Scores.not_available` says why.

    Args:
        names: of :data:`METRICS`.
        predictions: one text a row. It may be empty.
        references: one or more texts for each row, their number may differ.
        bertscore_model: the folder of an encoder and its tokenizer, for ``bertscore_f1``.

    Raises: InvalidArgumentError as :func:`check_metrics` does, or for no rows; DataError for a
        number of rows that differs, a value that is no text, or a row with no reference or an
        empty one.
    """
    check_metrics(names, bertscore_model=bertscore_model)
    _check_rows(predictions, references)
    from hf_dp.tasks.generation.metrics import TextMetric

    texts, rows = list(predictions), [list(row) for row in references]
    values: dict[str, float] = {}
    how: dict[str, str] = {}
    not_available: dict[str, str] = {}
    for function in dict.fromkeys(_FUNCTIONS.get(name, name) for name in names):
        asked = [name for name in names if _FUNCTIONS.get(name, name) == function]
        options = {"model": bertscore_model} if function == "bertscore" else {}
        metric = TextMetric(config_name=function, keep_in_memory=True)  # and so writes no texts
        try:
            found = metric.compute(predictions=texts, references=rows, **options) or {}
        except MetricUnavailableError as problem:
            not_available |= dict.fromkeys(asked, str(problem))
            continue
        for name in asked:
            if math.isfinite(found[name]):
                values[name], how[name] = found[name], found["how"]
            else:
                not_available[name] = f"{found['how']} gave {found[name]}"
    return Scores(values, how, not_available)


def check_metrics(names: Sequence[str], *, bertscore_model: str | Path | None = None) -> None:
    """Refuse what no data could make right; call it before a long run.

    Raises: InvalidArgumentError for an unknown metric, a package that is not installed, or a
        ``bertscore_model`` that is no folder of a model.
    """
    for name in names:
        one_of("metrics", name, METRICS)
        for package in _PACKAGES.get(_FUNCTIONS.get(name, name), ()):
            if importlib.util.find_spec(package) is None:
                expected = f"with {package.replace('_', '-')} installed"
                advice = "Install it with: pip install 'hf-dp[generation]'"
                raise invalid("metrics", name, expected, advice)
    if bertscore_model is not None and not (Path(bertscore_model) / "config.json").is_file():
        expected = "to be a local folder with a model's config.json"
        advice = "Nothing is downloaded: save an encoder and its tokenizer there, or leave it out."
        raise invalid("bertscore_model", str(bertscore_model), expected, advice)


def _check_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse rows that have no score, by their index. Raises: as :func:`score` does."""
    if len(predictions) != len(references):
        raise DataError(
            f"There are {len(predictions)} predictions, but references for {len(references)} rows. "
            "Give one prediction and one list of references for each row, in the same order."
        )
    if len(predictions) == 0:
        raise invalid("predictions", [], "to have a row", "There are no rows to score.")
    for index, (text, row) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(text, str):
            problem = (
                f"a prediction of type {type(text).__name__}. Use '' where nothing was written"
            )
        elif isinstance(row, str) or not all(isinstance(each, str) for each in row):
            problem = "references that are no list of texts. Put a single one into a list, too"
        elif not row or not all(each.strip() for each in row):
            problem = "no reference, or an empty reference. Leave it out, or fill it in"
        else:
            continue
        raise DataError(f"Row {index} has {problem}.")
