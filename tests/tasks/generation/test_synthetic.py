"""Synthetic rows of every layout, and how like real texts they are, against counts by hand."""

from __future__ import annotations

import copy
import math
from collections import Counter

import datasets
import pytest
import tiny_text

from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.data import encode, encoding_of
from hf_dp.tasks.generation.language_models import CAUSAL
from hf_dp.tasks.generation.synthetic import compare, divergence, nearest, texts_of, write_rows

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAYOUTS = {
    "text": ({"text_column": "t"}, None),
    "pairs": ({"prompt_column": "q", "target_column": "a"}, {"q": ["food", "area"]}),
    "dart": ({}, {"tripleset": [[["a", "B", "c"]]]}),
    "persona_chat": ({}, {"personality": [["i ski."]], "history": [["hi"]]}),
    "messages": ({}, {"messages": [[{"role": "user", "content": "hi"}]]}),
}


def written(name, count=3, prompts=None, **decoding):
    columns, given = LAYOUTS[name]
    data = TextArguments(data_format=name, max_length=140, **columns)
    words = copy.deepcopy(tiny_text.tokenizer())
    words.pad_token, words.chat_template = words.eos_token, CHAT
    given = given if prompts is None else prompts
    rows = write_rows(
        tiny_text.gpt2(),
        words,
        data,
        encoding_of(CAUSAL, words, data),
        None if given is None else datasets.Dataset.from_dict(given),
        DecodingArguments(**{"decoding": "nucleus", "max_new_tokens": 6, **decoding}),
        count,
        progress=False,
    )
    return rows, data, words


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_have_the_columns_that_training_reads(name):
    rows, data, words = written(name)
    assert len(rows) == 3
    assert len(encode(rows, data, encoding_of(CAUSAL, words, data))) == 3
    assert len(texts_of(rows, data)) == 3


def test_prompts_are_taken_in_turn():
    rows, *_ = written("pairs", 5)
    assert rows["q"] == ["food", "area", "food", "area", "food"]


def test_prompts_that_are_missing_or_not_used_are_refused():
    with pytest.raises(ConfigError, match="no prompts"):
        written("text", prompts={"t": ["x"]})
    with pytest.raises(DataError, match="tripleset"):
        written("dart", prompts={"x": ["y"]})


def test_the_same_text_is_not_written_twice():
    with pytest.raises(ConfigError, match="nucleus"):
        written("pairs", 3, decoding="beam")
    assert len(written("pairs", 2, decoding="greedy")[0]) == 2


def test_the_nearest_text_shares_the_most_phrases():
    real = ["a b c d e f", "the cat sat on the mat today", "x y"]
    found = nearest(["The cat sat on the mat", "a b c d z z", "q"], real)
    assert found == [(1.0, 0, 1), (1 / 3, 1, 0), (0.0, 2, 0)]


def test_the_comparison_by_hand():
    found = compare(["a b a b", "a"], ["a b c", "c d e f"], ["B", "zz"])
    assert found[0] == "words in a text, median: 2.5 (real: 3.5)"
    assert found[2] == "different 2-grams: 0.667 (real: 1.000)"  # ab ba ab; ab bc, cd de ef
    assert found[-2:] == [
        "texts with 'B': 0.500 (real: 0.500)",
        "texts with 'zz': 0.000 (real: 0.000)",
    ]
    p = {"a": 3 / 5, "b": 2 / 5}
    q = {"a": 1 / 7, "b": 1 / 7, "c": 2 / 7, "d": 1 / 7, "e": 1 / 7, "f": 1 / 7}
    m = {w: (p.get(w, 0) + q.get(w, 0)) / 2 for w in q}
    by_hand = sum(0.5 * side[w] * math.log2(side[w] / m[w]) for side in (p, q) for w in side)
    assert f"divergence of 1-grams: {by_hand:.3f} of 1" in found[3]
    assert divergence(Counter("abababa"[:3] + "ab"), Counter("abccdef")) == pytest.approx(by_hand)


def test_the_divergence_ends_at_nothing_and_all():
    one = Counter({("a",): 3})
    assert divergence(one, Counter({("a",): 9})) == 0
    assert divergence(one, Counter({("b",): 1})) == 1
    assert divergence(one, Counter()) == 1
    with pytest.raises(ValueError, match="real"):
        compare(["a"], [])
