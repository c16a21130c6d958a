"""How like real texts synthetic ones are: lengths, words, phrases.

All of it is computed from the real texts without noise. It is for the eyes of those who may see
them; no epsilon covers it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_dp._validate import invalid
from hf_dp.tasks.generation.synthetic import grams


@dataclass(frozen=True)
class Fidelity:
    """A comparison of synthetic and real texts; of each pair the synthetic side is first.

    Attributes:
        words: median number of words of a text.
        long: its 95th percentile.
        distinct: share of different word 2-grams among all, by texts of equal number.
        divergence: Jensen-Shannon divergence of the frequencies of word n-grams, in bits from 0
            (alike) to 1 (nothing in common), by n.
        phrases: share of texts that hold a phrase, by phrase.
    """

    words: tuple[float, float]
    long: tuple[float, float]
    distinct: tuple[float, float]
    divergence: dict[int, float]
    phrases: dict[str, tuple[float, float]]

    def lines(self) -> list[str]:
        """Return the comparison to read."""
        return [
            f"words in a text, median: {self.words[0]:g} (real: {self.words[1]:g})",
            f"words in a text, 95th percentile: {self.long[0]:g} (real: {self.long[1]:g})",
            f"different 2-grams: {self.distinct[0]:.3f} (real: {self.distinct[1]:.3f})",
            *(
                f"divergence of {n}-grams: {value:.3f} of 1 (0: as often as in the real texts)"
                for n, value in self.divergence.items()
            ),
            *(
                f"texts with {phrase!r}: {own:.3f} (real: {other:.3f})"
                for phrase, (own, other) in self.phrases.items()
            ),
        ]


def compare(synthetic: Sequence[str], real: Sequence[str], phrases: Sequence[str] = ()) -> Fidelity:
    """Compare synthetic texts with real ones.

    Raises: InvalidArgumentError when one of them is empty.
    """
    for name, texts in {"synthetic": synthetic, "real": real}.items():
        if not texts:
            raise invalid(name, [], "to have at least one text")
    sides = (synthetic, real)
    counts = [[len(text.split()) for text in side] for side in sides]
    equal = min(map(len, sides))
    return Fidelity(
        words=_pair(float(np.median(each)) for each in counts),
        long=_pair(float(np.percentile(each, 95)) for each in counts),
        distinct=_pair(_distinct(side[:equal]) for side in sides),
        divergence={n: divergence(*(_frequencies(side, n) for side in sides)) for n in (1, 2)},
        phrases={
            phrase: _pair(
                sum(phrase.lower() in text.lower() for text in side) / len(side) for side in sides
            )
            for phrase in phrases
        },
    )


def _pair(values: Iterable[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _frequencies(texts: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(gram for text in texts for gram in grams(text, size))


def _distinct(texts: Sequence[str]) -> float:
    found = _frequencies(texts, 2)
    return len(found) / max(found.total(), 1)


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
