"""Synthetic rows of every layout."""

import copy

import datasets
import pytest
import tiny_text

from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.encoding import encode, encoding_of
from hf_dp.tasks.generation.evaluation import write_rows
from hf_dp.tasks.models import CAUSAL

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
