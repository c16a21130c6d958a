"""BLEU, NIST, ROUGE and dialog F1 against direct counts, and against the E2E challenge's script."""

import math
from collections import Counter

import pytest
from restaurants import PREDICTIONS, REFERENCES, longest

from hf_dp.tasks.generation.scores import score

# -- what the E2E challenge's script prints ---------------------------------------------------------

# Of github.com/tuetschek/e2e-metrics, whose code is not part of this project: BLEU and NIST of
# mteval/mteval-v13a-sig.pl (its subroutines under a main program that reads lines) and of
# metrics/pymteval.py, run by hand on these texts. On the 630 inputs of the E2E test set, with one
# human text of each as the prediction and the others as references, they agreed to 1e-9, too.
CUT = [" ".join(text.split()[:8]) for text in PREDICTIONS]
FIRST = [row[:1] for row in REFERENCES]
TEXTS = {"first": (PREDICTIONS, FIRST), "all": (PREDICTIONS, REFERENCES), "cut": (CUT, REFERENCES)}
PERL = {
    "first": (0.2822608366, 3.0485470735),
    "all": (0.5281730445, 4.9970820897),
    "cut": (0.3694929481, 4.9963364370),
}
PYTHON = {
    "first": (0.2822608366065957, 3.0485470734584412),
    "all": (0.5281730444732103, 4.997082089706382),
    "cut": (0.3694929480675503, 3.1160429351838),
}


@pytest.mark.parametrize("texts", TEXTS)
def test_bleu_is_that_of_both_scripts(texts):
    found = score(["bleu"], *TEXTS[texts]).values["bleu"]
    assert found == pytest.approx(100 * PERL[texts][0], rel=1e-9)
    assert found == pytest.approx(100 * PYTHON[texts][0], rel=1e-12)


@pytest.mark.parametrize("texts", TEXTS)
def test_e2e_nist_is_that_of_the_script_in_python(texts):
    """The other one pads rows with empty references, so that short texts are hardly penalized."""
    found = score(["e2e_nist"], *TEXTS[texts]).values["e2e_nist"]
    assert found == pytest.approx(PYTHON[texts][1], rel=1e-12)
    assert (found == pytest.approx(PERL[texts][1], rel=1e-9)) is (texts != "cut")


# -- direct counts ----------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """mteval's words, character by character: punctuation stands alone, but for ``'``, for ``.``
    and ``,`` between digits, and for ``-`` that does not follow a digit."""
    text = f" {text.lower()} "
    split = ""
    for before, mark, after in zip(text, text[1:], text[2:]):
        alone = mark in '!"#$%&()*+/:;<=>?@[\\]^_`{|}~'
        alone |= mark in ".," and not (before in "0123456789" and after in "0123456789")
        alone |= mark == "-" and before in "0123456789"
        split += f" {mark} " if alone else mark
    return split.split()


def ngrams(tokens: list[str], order: int) -> Counter:
    return Counter(zip(*(tokens[start:] for start in range(order))))


def test_bleu_from_its_definition():
    """Papineni et al. 2002: clipped matches over all references, geometric mean, closest length."""
    matched, there = [0] * 5, [0] * 5
    length = expected = 0
    for text, row in zip(PREDICTIONS, REFERENCES):
        tokens, others = words(text), [words(other) for other in row]
        length += len(tokens)
        expected += min((abs(len(other) - len(tokens)), len(other)) for other in others)[1]
        for order in range(1, 5):
            counts = ngrams(tokens, order)
            there[order] += sum(counts.values())
            for ngram, count in counts.items():
                matched[order] += min(count, max(ngrams(other, order)[ngram] for other in others))
    logs = [math.log(matched[order] / there[order]) for order in range(1, 5)]
    brevity = min(0.0, 1 - expected / length)
    bleu = 100 * math.exp(sum(logs) / 4 + brevity)
    found = score(["bleu"], PREDICTIONS, REFERENCES)
    assert found.values["bleu"] == pytest.approx(bleu, rel=1e-12)
    assert "nrefs:var|case:lc|eff:no|tok:13a|smooth:exp" in found.how["bleu"]


STEMS = {
    "vaults": "vault", "adriatic": "adriat", "rating": "rate", "coffee": "coffe",
    "family": "famili", "friendly": "friendli", "prices": "price", "restaurant": "restaur",
    "centre": "centr", "serves": "serv", "people": "peopl", "serving": "serv", "foods": "food",
}  # fmt: skip


def rouge_words(text: str) -> list[str]:
    """Runs of a-z and 0-9, with the stems above in place of words."""
    runs = "".join(mark if mark.isascii() and mark.isalnum() else " " for mark in text.lower())
    return [STEMS.get(word, word) for word in runs.split()]


def f1(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected)


def test_rouge_from_its_definition():
    """Lin 2004: common n-grams and the longest common subsequence, F1, the best reference."""
    sums = Counter()
    for text, row in zip(PREDICTIONS, REFERENCES):
        tokens, others = rouge_words(text), [rouge_words(other) for other in row]
        for order in (1, 2):
            own = ngrams(tokens, order)
            sums[f"rouge{order}"] += max(
                f1(
                    sum(min(count, ngrams(other, order)[ngram]) for ngram, count in own.items()),
                    len(tokens) - order + 1,
                    len(other) - order + 1,
                )
                for other in others
            )
        sums["rougeL"] += max(
            f1(longest(tokens, other), len(tokens), len(other)) for other in others
        )
    found = score(["rouge1", "rouge2", "rougeL"], PREDICTIONS, REFERENCES).values
    assert found == pytest.approx({name: total / 4 for name, total in sums.items()}, rel=1e-12)


def test_dialog_f1_by_hand():
    predictions = ["I like the dogs, and a cat!", "No.", "Don't you?"]
    references = [
        ["Cats? I like dogs; dogs like me.", "i have two cats"],
        ["yes", "no!"],
        ["do you", "don t you"],
    ]
    # i like dogs and cat (5 words); cats i like dogs dogs like me (7 words): 3 in common
    first = 2 * 3 / (5 + 7)
    assert score(["dialog_f1"], predictions, references).values == {
        "dialog_f1": pytest.approx((first + 1 + 1) / 3, rel=1e-12)
    }
