"""Synthetic rows of every layout."""

import copy

import datasets
import pytest
import tiny_text

from hf_dp.errors import ConfigError, DataError, InvalidArgumentError
from hf_dp.tasks.generation import evaluation
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.encoding import columns_read, encode, encoding_of
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
    asked = None if given is None else datasets.Dataset.from_dict(given)
    encoding = encoding_of(CAUSAL, words, data)
    settings = DecodingArguments(**{"decoding": "nucleus", "max_new_tokens": 6, **decoding})
    model = tiny_text.gpt2()
    rows = write_rows(model, words, data, encoding, asked, settings, count, progress=False)
    return rows, data, words


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_have_the_columns_that_training_reads(name):
    rows, data, words = written(name)
    assert len(rows) == 3
    assert len(encode(rows, data, encoding_of(CAUSAL, words, data))) == 3


def test_rows_of_several_columns(monkeypatch, caplog):
    """Written without prompts; texts that are no rows go, and whole numbers are numbers again."""
    LAYOUTS["table"] = {"columns": ["name", "age", "note"]}, None
    texts = ["name: Ann\nage: 31\nnote: a: b\n", "name: Ben\nage: 40", "name: C\nage: -7\nnote: "]
    monkeypatch.setattr(evaluation, "decode", lambda *args, **options: [*texts])
    rows, data, words = written("table")
    kept = [("Ann", 31, "a: b"), ("C", -7, "")]
    assert [tuple(row.values()) for row in rows] == kept
    assert "1 of 3 texts lack columns of ['name', 'age', 'note']" in caplog.text
    for codes in (["02139", "00501", "1"], ["1" * 20, "2", "3"]):
        texts = [f"name: A\nage: {code}\nnote: " for code in codes]
        assert written("table")[0]["age"] == codes
    texts = ["name: Ann\nage: 31\nnote: a: b\n"] * 3
    example = encode(rows, data, encoding_of(CAUSAL, words, data))[0]
    learned = words.decode([token for token in example["labels"] if token != -100])
    assert learned.startswith("name: Ann\nage: 31\nnote: a: b")
    monkeypatch.setattr(evaluation, "decode", lambda *args, **options: ["nonsense"] * 3)
    with pytest.raises(DataError, match="so there is no row. Train longer"):
        written("table")
    with pytest.raises(InvalidArgumentError, match="at least one column"):
        columns_read(TextArguments(data_format="table"))


def test_prompts_are_taken_in_turn():
    rows, *_ = written("pairs", 5)
    assert rows["q"] == ["food", "area", "food", "area", "food"]


def test_prompts_that_are_missing_or_not_used_are_refused():
    with pytest.raises(ConfigError, match="no prompts"):
        written("text", prompts={"t": ["x"]})
    with pytest.raises(DataError, match="tripleset"):
        written("dart", prompts={"x": ["y"]})
    with pytest.raises(DataError, match="Row 1 does not have the values of its data_format"):
        written("dart", prompts={"tripleset": [[["a", "B", "c"]], None]})


def test_the_same_text_is_not_written_twice():
    with pytest.raises(ConfigError, match="nucleus"):
        written("pairs", 3, decoding="beam")
    assert len(written("pairs", 2, decoding="greedy")[0]) == 2
