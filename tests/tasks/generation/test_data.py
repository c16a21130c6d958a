"""Token ids and labels of prompts, targets and conversations; questions with their references."""

from __future__ import annotations

import datasets
import pytest
import tiny_text
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import TextArguments
from hf_dp.tasks.generation.encoding import (
    CausalEncoding,
    Seq2SeqEncoding,
    encode,
    encoding_of,
    questions,
)
from hf_dp.tasks.models import CAUSAL, SEQ2SEQ

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


def test_an_encoder_decoder_has_prompt_and_target_apart():
    words = tiny_text.tokenizer()
    given = rows(q=["food : Thai"], a=["Thai food"])
    (row,) = encode(given, PAIRS, encoding_of(SEQ2SEQ, words, PAIRS))
    assert words.decode(row["input_ids"]) == "food : Thai"
    assert words.decode(row["labels"]) == "Thai food"


def test_free_text_is_predicted_from_its_first_token_on():
    words = tiny_text.tokenizer()
    data = TextArguments(data_format="text", text_column="t")
    (row,) = encode(rows(t=["The Golden Fern"]), data, encoding_of(CAUSAL, words, data))
    assert row["input_ids"][0] == words.bos_token_id  # something stands before the first token
    assert row["labels"][0] == -100
    assert words.decode(row["labels"][1:-1]) == "The Golden Fern"


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


def test_the_stock_collator_pads_what_was_encoded():
    words = tiny_text.tokenizer()
    words.pad_token = words.eos_token
    encoded = encode(tiny_text.tables()["train"], E2E, encoding_of(CAUSAL, words, E2E))
    batch = DataCollatorForSeq2Seq(words)([encoded[i] for i in range(4)])
    padding = batch["attention_mask"] == 0
    assert padding.any() and (batch["labels"][padding] == -100).all()
