"""NIST-5 of a corpus, from 0, as pymteval of the E2E challenge's script computes it."""

from __future__ import annotations

from collections import Counter
from math import log2
from typing import Any

import evaluate

from hf_dp.tasks.generation.mteval_words import mteval_words
from hf_dp.tasks.generation.text_metric import text_metric_info

ORDERS = range(1, 6)


class E2ENist(evaluate.Metric):
    """``{"e2e_nist": float, "how": text}``, with all references of a row together.

    An n-gram counts as often as the reference that has it most often. Its information is
    ``log2(times its first n - 1 words occur / times it occurs)`` in all references, those of other
    rows, too. Words of a row's references count once, on average, for the brevity penalty; the
    Perl script pads rows with empty references there, which differs where rows have different
    numbers of them.
    """

    def _info(self) -> evaluate.MetricInfo:
        return text_metric_info(__doc__)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        from nltk.translate.nist_score import nist_length_penalty

        predicted = [mteval_words(text) for text in predictions]
        expected = [[mteval_words(text) for text in row] for row in references]
        counts = [[_ngrams(words) for words in row] for row in expected]
        everywhere: Counter[tuple[str, ...]] = Counter()
        for row in counts:
            for each in row:
                everywhere.update(each)
        everywhere[()] = sum(len(words) for row in expected for words in row)

        gains, totals = dict.fromkeys(ORDERS, 0.0), dict.fromkeys(ORDERS, 0)
        for words, row in zip(predicted, counts, strict=True):
            own, there = _ngrams(words), _ngrams([])
            for each in row:
                there |= each
            for ngram, count in own.items():
                totals[len(ngram)] += count
            for ngram, count in (own & there).items():
                information = log2(everywhere[ngram[:-1]] / everywhere[ngram])
                gains[len(ngram)] += count * information
        length = sum(sum(map(len, row)) / len(row) for row in expected)
        penalty = nist_length_penalty(length, totals[1]) if length else 0.0
        gain = sum(gains[order] / totals[order] for order in ORDERS if totals[order])
        return {"e2e_nist": gain * penalty, "how": "NIST-5 after pymteval, lower case, 13a"}


def _ngrams(words: list[str]) -> Counter[tuple[str, ...]]:
    """Return how often each n-gram of up to five words occurs."""
    return Counter(
        tuple(words[start : start + order])
        for order in ORDERS
        for start in range(len(words) - order + 1)
    )
