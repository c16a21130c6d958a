"""Rows to prompts and targets, as Li et al. write them; questions with their references.

What each layout learns of a row: tests/tasks/test_padding_is_the_end.py.
"""

from dataclasses import replace

import datasets
import pytest
import tiny_text
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_dp.errors import ConfigError, DataError, InvalidArgumentError
from hf_dp.tasks.generation.arguments import (
    FORMATS,
    TextArguments,
    dart_triples,
    e2e_table,
    persona_dialog,
    read_row,
)
from hf_dp.tasks.generation.encoding import (
    CausalEncoding,
    Seq2SeqEncoding,
    columns_read,
    count_examples,
    encode,
    encode_training,
    encoding_of,
    questions,
)
from hf_dp.tasks.models import CAUSAL, SEQ2SEQ

# Li et al. (2021), appendix O, table 11, first row; its meaning representation is of the E2E test
# set, its dashes are the table's typesetting of "|".
PUNTER = (
    "name[The Punter], eatType[restaurant], food[Indian], priceRange[cheap], "
    "customer rating[average], area[riverside], familyFriendly[no], near[Express by Holiday Inn]"
)
PUNTER_IN_THE_PAPER = (
    "name : The Punter | Type : restaurant | food : Indian | price : cheap | "
    "customer rating : average | area : riverside | family friendly : no | "
    "near : Express by Holiday Inn"
)


def test_a_table_is_written_as_in_the_paper():
    assert e2e_table(PUNTER) == PUNTER_IN_THE_PAPER


@pytest.mark.parametrize(
    ("meaning", "text"),
    [
        ("name[Aromi]", "name : Aromi"),
        ("name[A, B], area[x]", "name : A, B | area : x"),
        ("priceRange[£20-25],near[Café]", "price : £20-25 | near : Café"),
        ("name[]", "name : "),
    ],
)
def test_commas_empty_cells_and_accents_stay(meaning, text):
    assert e2e_table(meaning) == text


@pytest.mark.parametrize("meaning", ["no table", "name[Aromi", "name[Aromi]] x", "[x]"])
def test_what_is_no_table_is_refused(meaning):
    with pytest.raises(DataError, match=r"like 'name\[Aromi\]"):
        e2e_table(meaning)


def test_triples_are_written_as_in_the_paper():
    # table 12, second row
    first = ["United States", "ETHNIC_GROUP", "Asian Americans"]
    expected = "United States : ethnic group : Asian Americans | Albany : is part of : Oregon"
    assert dart_triples([first, ["Albany", "IS_PART_OF", "Oregon"]]) == expected
    with pytest.raises(DataError, match="triples of subject"):
        dart_triples([["a", "b"]])


def test_a_dialog_keeps_its_latest_utterances_and_names_who_spoke():
    text = persona_dialog(["i ski.", "i cook."], list("abcdefg"))
    assert text == (
        "persona : i ski. i cook.\npartner : c\nself : d\npartner : e\nself : f\npartner : g\nself :"
    )
    assert persona_dialog(["i ski."], ["hi"]).splitlines()[1:] == ["partner : hi", "self :"]


def test_every_layout_reads_its_columns():
    named = {"prompt_column": "question", "target_column": "answer", "text_column": "note"}
    assert columns_read(TextArguments(**named)) == ["question", "answer"]
    assert columns_read(TextArguments(data_format="text", **named)) == ["note"]
    e2e = ["meaning_representation", "human_reference"]
    assert columns_read(TextArguments(data_format="e2e")) == e2e
    assert read_row(FORMATS["pairs"], ["q", "a"], 0).targets == ("a",)
    assert read_row(FORMATS["pairs"], ["q", ["a", "b"]], 0).targets == ("a", "b")
    assert read_row(FORMATS["text"], ["free"], 0).prompt == ""
    assert read_row(FORMATS["dart"], [[["a", "B", "c"]], {"text": ["x", "y"]}], 0).targets == (
        " x",
        " y",
    )
    assert read_row(FORMATS["persona_chat"], [["p"], ["h"], ["no", "yes"]], 0).targets == (" yes",)


@pytest.mark.parametrize("name", [" age", "age ", "first  name", "first\nname"])
def test_a_column_of_a_table_that_no_text_would_name_is_refused(name):
    assert TextArguments(data_format="table", columns=["first name", "age"]).layout
    with pytest.raises(InvalidArgumentError, match="`columns` to have names without white space"):
        _ = TextArguments(data_format="table", columns=["town", name]).layout


@pytest.mark.parametrize("name", ["pairs", "text"])
def test_a_column_that_is_not_named_is_refused(name):
    with pytest.raises(DataError, match=rf"{name}.*_column"):
        columns_read(TextArguments(data_format=name))


UNFIT = [
    ("pairs", ["q", None]), ("pairs", [3, "a"]), ("pairs", ["q", [1]]), ("pairs", ["q", []]),
    ("dart", [[["a", "b", "c"]], {"text": []}]), ("dart", [[["a", "b"]], {"text": ["x"]}]),
    ("persona_chat", [["p"], ["h"], []]), ("e2e", ["nonsense", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), UNFIT)
def test_a_row_that_does_not_fit_is_named(name, values):
    with pytest.raises(DataError, match="Row 17"):
        read_row(FORMATS[name], values, 17)


E2E = TextArguments(data_format="e2e", max_length=160)
PAIRS = TextArguments(data_format="pairs", prompt_column="q", target_column="a")


def rows(**columns):
    return datasets.Dataset.from_dict(columns)


def test_labels_stand_on_the_target_alone():
    words = tiny_text.tokenizer()
    encoded = encode(tiny_text.tables()["train"], E2E, encoding_of(CAUSAL, words, E2E))
    for row, text in zip(encoded, tiny_text.tables()["train"]["human_reference"]):
        at = row["input_ids"].index(words.bos_token_id)
        labels = row["labels"]
        assert labels[: at + 1] == [-100] * (at + 1)
        assert labels[at + 1 :] == row["input_ids"][at + 1 :]
        assert labels[-1] == words.eos_token_id
        assert words.decode(labels[at + 1 : -1]) == f" {text}"
        assert len(row["attention_mask"]) == len(labels) == len(row["input_ids"])


@pytest.mark.parametrize(("begin", "end"), [("<s>", "</s>"), ("</s>", "</s>")])
def test_what_a_tokenizer_puts_before_any_text_stands_before_a_prompt(begin, end):
    pieces = Tokenizer.from_str(tiny_text.tokenizer().backend_tokenizer.to_str())
    pieces.add_special_tokens([begin, end])
    number = pieces.token_to_id(begin)
    special = [(begin, number)]
    pieces.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    words = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token=begin, eos_token=end)
    (row,) = encode(rows(q=["food"], a=["Thai"]), PAIRS, encoding_of(CAUSAL, words, PAIRS))
    separator = begin if begin == end else "\n"
    assert words.decode(row["input_ids"]) == f"{begin}food{separator}Thai{end}"
    assert row["labels"].count(-100) == len(words("food" + separator)["input_ids"])


def test_several_references_are_rows_of_their_own_and_one_question():
    given = rows(q=["one", "two", "one"], a=[["x", "y"], ["z"], ["w"]])
    encoding = encoding_of(CAUSAL, tiny_text.tokenizer(), PAIRS)
    assert len(encode(given, PAIRS, encoding)) == 4
    prompts, references = questions(given, PAIRS, encoding)
    assert references == [["x", "y", "w"], ["z"]]
    assert [tiny_text.tokenizer().decode(p).split("<")[0] for p in prompts] == ["one", "two"]


def test_a_target_is_cut_and_a_prompt_is_refused():
    words = tiny_text.tokenizer()
    short = CausalEncoding(words, words.bos_token, max_length=12)
    row = short.example("food", "The Golden Fern is a cheap pub " * 3, 0)
    assert len(row["input_ids"]) == 12 and row["labels"][-1] != words.eos_token_id
    with pytest.raises(DataError, match=r"Row 5 has a prompt of .* `max_length` 12"):
        short.example("The Golden Fern is a cheap pub " * 3, "x", 5)


@pytest.mark.parametrize("kind", [CAUSAL, SEQ2SEQ])
def test_rows_that_would_be_cut_can_be_left_out_of_training_whole(kind):
    """What is kept is what is encoded without a limit; each row alone decides."""
    words = tiny_text.tokenizer()
    long = "The Golden Fern is a cheap pub " * 3
    given = rows(q=["food", "food", long, "a"], a=[["Thai", long], ["pub"], ["x"], ["a b c"]])
    data = replace(PAIRS, max_length=12, max_target_length=12, drop_long_rows=True)
    encoding = encoding_of(kind, words, data)
    kept, before = encode_training(given, data, encoding)
    whole = encode(given, PAIRS, encoding_of(kind, words, replace(PAIRS, max_target_length=100)))
    assert before == len(whole) == 5
    assert list(kept) == [whole[i] for i in (0, 2, 4)]
    alone = [encode_training(given.select([i]), data, encoding).kept for i in (0, 1, 3)]
    assert [row for each in alone for row in each] == list(kept)
    with pytest.raises(DataError, match="all 1 are longer"):
        encode_training(given.select([2]), data, encoding)
    cut = replace(data, drop_long_rows=False, cut_prompts=True)
    assert encode_training(given, cut, encoding_of(kind, words, cut)).before == 5


def test_the_longest_example_that_is_kept_has_max_length_tokens():
    words = tiny_text.tokenizer()
    given = rows(q=["food"] * 3, a=["a", "a a", "a a a"])
    lengths = [
        len(row["input_ids"]) for row in encode(given, PAIRS, encoding_of(CAUSAL, words, PAIRS))
    ]
    data = replace(PAIRS, max_length=lengths[1], drop_long_rows=True)
    kept = encode_training(given, data, encoding_of(CAUSAL, words, data)).kept
    assert [len(row["input_ids"]) for row in kept] == lengths[:2]


def test_a_plan_counts_the_rows_that_are_left(tmp_path):
    base = tiny_text.saved(tmp_path / "base", tiny_text.gpt2())
    file = tmp_path / "rows.parquet"
    rows(q=["food"] * 3, a=["a", "Thai " * 30, "b"]).to_parquet(str(file))
    recipe = {
        "task": CAUSAL, "model_name_or_path": base, "train_file": str(file), "data_format": "pairs",
        "prompt_column": "q", "target_column": "a", "max_length": 12,
    }  # fmt: skip
    assert count_examples(recipe) == 3
    assert count_examples({**recipe, "drop_long_rows": True}) == 2
    with pytest.raises(DataError, match=r"tokenizer of .*--num-examples"):
        count_examples({**recipe, "drop_long_rows": True, "model_name_or_path": "not/here"})


def test_a_prompt_can_be_cut_at_its_front():
    words = tiny_text.tokenizer()
    long = "The Golden Fern is a cheap pub in the riverside area"
    row = CausalEncoding(words, words.bos_token, 12, cut_prompts=True).example(long, "Thai", 0)
    at = row["input_ids"].index(words.bos_token_id)
    assert len(row["input_ids"]) <= 12
    assert long.endswith(words.decode(row["input_ids"][:at]))
    assert words.decode(row["labels"][at + 1 : -1]) == "Thai"  # whole


def test_a_long_prompt_of_an_encoder():
    words = tiny_text.tokenizer()
    with pytest.raises(DataError, match=r"Row 3 has a prompt .* cut_prompts"):
        Seq2SeqEncoding(words, 4, 8).prompt("The Golden Fern is a pub", 3, 0)
    assert len(Seq2SeqEncoding(words, 4, 8, True).prompt("The Golden Fern is a pub", 3, 0)) == 4


def test_missing_columns_are_named():
    with pytest.raises(DataError, match="human_reference"):
        encode(rows(x=["a"]), E2E, encoding_of(CAUSAL, tiny_text.tokenizer(), E2E))
    data = TextArguments(data_format="pairs", prompt_column="q", target_column="gone")
    with pytest.raises(DataError, match="gone"):
        encode(rows(q=["a"]), data, encoding_of(CAUSAL, tiny_text.tokenizer(), data))


def test_a_row_that_does_not_fit_is_named_by_its_index():
    encoding = encoding_of(CAUSAL, tiny_text.tokenizer(), PAIRS)
    with pytest.raises(DataError, match="Row 1"):
        encode(rows(q=["a", None], a=["b", "c"]), PAIRS, encoding)


def test_arguments_that_do_not_go_together():
    words = tiny_text.tokenizer()
    with pytest.raises(ConfigError, match="messages"):
        encoding_of(SEQ2SEQ, words, TextArguments(data_format="messages"))
    with pytest.raises(ConfigError, match="separator"):
        encoding_of(SEQ2SEQ, words, TextArguments(separator=" : "))
    for given in ({"separator": " : "}, {"cut_prompts": True}):
        with pytest.raises(
            ConfigError, match=f"`{min(given)}` to be unset with data_format 'messages'"
        ):
            encoding_of(CAUSAL, words, TextArguments(data_format="messages", **given))
