"""E2E's ROUGE-L, CIDEr and METEOR, whose words come from a Java program."""

import math
import shutil
from collections import Counter

import pytest
from restaurants import PREDICTIONS, PTB_PREDICTIONS, PTB_REFERENCES, REFERENCES, longest

from hf_dp.tasks.generation.metrics import ptb_rows
from hf_dp.tasks.generation.scores import score

NAMES = ["e2e_rouge_l", "cider", "meteor"]
needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="PTBTokenizer and METEOR are Java programs: no java here"
)


@needs_java
def test_words_are_those_of_the_penn_treebank():
    assert ptb_rows(PREDICTIONS, REFERENCES) == (PTB_PREDICTIONS, PTB_REFERENCES)


@needs_java
def test_a_text_stays_one_text_and_one_without_words_is_empty():
    lines = "one\ntwo\r\nthree\x0bfour\x85five\u2028six\u2029seven"
    texts = [lines, "", " \n", "...!", "日本語 ||| é"]
    found, rows = ptb_rows(texts, [[text] for text in texts])
    assert found[:4] == ["one two three four five six seven", "", "", ""]
    assert "日本語" in found[4] and "é" in found[4]
    assert rows == [[text] for text in found]


def rouge_l() -> float:
    """The mean of (1 + b^2) P R / (R + b^2 P), b = 1.2, with the best P and the best R of a row."""
    total = 0.0
    for text, row in zip(PTB_PREDICTIONS, PTB_REFERENCES):
        common = [longest(text.split(), other.split()) for other in row]
        precision = max(common) / len(text.split())
        recall = max(each / len(other.split()) for each, other in zip(common, row))
        total += 2.44 * precision * recall / (recall + 1.44 * precision)
    return total / len(PTB_PREDICTIONS)


def cider() -> float:
    """Vedantam et al. 2015, CIDEr-D: ten times the mean over n = 1 to 4 and over references of the
    clipped cosine of tf-idf vectors, times a Gaussian of the difference of lengths, sigma 6.

    As in its authors' program the length of a text is the number of its bigrams.
    """

    def counts(text: str, order: int) -> Counter:
        tokens = text.split()
        return Counter(zip(*(tokens[start:] for start in range(order))))

    total = 0.0
    for text, row in zip(PTB_PREDICTIONS, PTB_REFERENCES):
        for order in (1, 2, 3, 4):

            def weights(text: str, order: int = order) -> dict:
                rows = [{n for each in row for n in counts(each, order)} for row in PTB_REFERENCES]
                return {
                    ngram: times * math.log(len(rows) / max(1, sum(ngram in row for row in rows)))
                    for ngram, times in counts(text, order).items()
                }

            own = weights(text)
            for other in row:
                there = weights(other)
                dot = sum(min(own[n], there[n]) * there[n] for n in own.keys() & there.keys())
                size = math.hypot(*own.values()) * math.hypot(*there.values())
                difference = len(text.split()) - len(other.split())
                total += 10 * dot / size * math.exp(-(difference**2) / 72) / 4 / len(row)
    return total / len(PTB_PREDICTIONS)


# Printed as "Final score" by
#   java -Dfile.encoding=UTF-8 -jar meteor-1.5.jar predictions.txt references.txt -l en -norm -r 3
# on two files: PTB_PREDICTIONS, two empty lines and "| | |"; and three lines for each row:
# its PTB_REFERENCES, again from the first where there are less, and for the last rows three empty
# lines; an empty one, "cotto" and an empty one; three times "near the river".
METEOR = 0.43314788595359965
# Rows in which nothing is predicted: an empty text matches no reference of punctuation, either.
NOTHING = {"": ["..."], "!": ["?", "Cotto"], " ||| ": ["near the river"]}


ALL = [*PREDICTIONS, *NOTHING], [*REFERENCES, *NOTHING.values()]


@needs_java
def test_values_from_definitions():
    found = score(["e2e_rouge_l"], *ALL)
    assert found.values["e2e_rouge_l"] == pytest.approx(rouge_l() * 4 / 7, rel=1e-9)
    plain = score(["cider"], PREDICTIONS, REFERENCES)
    assert plain.values["cider"] == pytest.approx(cider(), rel=1e-9)


@needs_java
@pytest.mark.slow  # METEOR's program reads paraphrases for a quarter of a minute
def test_meteor_is_what_its_program_says_by_hand():
    found = score(["meteor"], *ALL)
    assert found.values["meteor"] == pytest.approx(METEOR, rel=1e-9)
    assert "METEOR 1.5" in found.how["meteor"]


@needs_java
def test_degenerate_texts_score_nothing():
    fast = ["e2e_rouge_l", "cider"]  # METEOR's program takes seconds to start: above
    nothing = score(fast, ["", ""], [["a pub"], ["..."]])
    assert nothing.values == dict.fromkeys(fast, 0.0)
    assert score(["cider"], ["pub"], [["pub"]]).values == {"cider": 0.0}
    assert score(["cider"], ["pub"], [["!"]]).values == {"cider": 0.0}


@needs_java
def test_references_of_other_rows_score_lower():
    names = ["e2e_rouge_l", "cider"]
    own = score(names, PREDICTIONS, REFERENCES).values
    others = score(names, PREDICTIONS, [*REFERENCES[1:], REFERENCES[0]]).values
    assert all(others[name] < own[name] / 2 for name in names)


def test_without_java_they_are_not_available(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = score([*NAMES, "dialog_f1"], PREDICTIONS, REFERENCES)
    assert set(found.values) == {"dialog_f1"}
    assert set(found.not_available) == set(NAMES)
    assert "meteor not available: it needs Java, and no `java` is on the PATH" in str(found)


@pytest.mark.parametrize(
    "program", ["exit 1", "exit 0", "echo The Java of this machine >&2; exit 1"]
)
def test_a_java_that_fails_is_a_reason(program, tmp_path, monkeypatch):
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\n{program}\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = [f"a pub of {program}"]  # not tokenized before
    found = score(NAMES, rows, [rows])
    assert found.values == {} and set(found.not_available) == set(NAMES)
    if ">&2" in program:
        assert all("The Java of this machine" in why for why in found.not_available.values())
