"""Perplexity against a loop over single examples and tokens in float64."""

from __future__ import annotations

import math

import pytest
import tiny_text
import torch
from transformers import DataCollatorForSeq2Seq

from hf_dp.tasks.generation.arguments import TextArguments
from hf_dp.tasks.generation.encoding import encode, encoding_of
from hf_dp.tasks.generation.evaluation import negative_log_likelihood, perplexity
from hf_dp.tasks.generation.language_models import CAUSAL, SEQ2SEQ

E2E = TextArguments(data_format="e2e")


def one_by_one(model, row, kind):
    """The sum of -ln p over one row's labeled tokens, and their number, by the model's logits."""
    labels = row["labels"]
    given = {"input_ids": torch.tensor([row["input_ids"]])}
    if kind == SEQ2SEQ:
        given["decoder_input_ids"] = torch.tensor(
            [[model.config.decoder_start_token_id, *labels[:-1]]]
        )
    scores = model(**given).logits[0].log_softmax(-1).detach()
    at = range(len(labels)) if kind == SEQ2SEQ else range(1, len(labels))
    before = 0 if kind == SEQ2SEQ else 1
    terms = [-float(scores[t - before, labels[t]]) for t in at if labels[t] != -100]
    return sum(terms), len(terms)


@pytest.mark.parametrize(("make", "kind"), [(tiny_text.gpt2, CAUSAL), (tiny_text.t5, SEQ2SEQ)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_it_is_the_mean_over_all_target_tokens(make, kind, side):
    words = tiny_text.tokenizer()
    words.pad_token, words.padding_side = words.eos_token, side
    if kind == SEQ2SEQ and side == "left":
        pytest.skip("encoders of T5's kind are padded on the right")
    model = make().double()
    rows = [
        dict(row)
        for row in encode(tiny_text.tables()["validation"], E2E, encoding_of(kind, words, E2E))
    ]
    found = negative_log_likelihood(model, DataCollatorForSeq2Seq(words), rows, 5)
    by_hand = [one_by_one(model, row, kind) for row in rows]
    assert found[1] == sum(count for _, count in by_hand)
    assert math.isclose(found[0], sum(total for total, _ in by_hand), rel_tol=1e-9)
    words.padding_side = "right"


def test_a_first_token_that_nothing_stands_before_is_not_counted():
    words = tiny_text.tokenizer()
    words.pad_token = words.eos_token
    ids = [words(text)["input_ids"] for text in ("The Golden Fern", "a cheap pub", "food")]
    rows = [{"input_ids": i, "attention_mask": [1] * len(i), "labels": i} for i in ids]
    model = tiny_text.gpt2().double()
    found = negative_log_likelihood(model, DataCollatorForSeq2Seq(words), rows, 3)
    by_hand = [one_by_one(model, row, CAUSAL) for row in rows]
    assert found[1] == sum(count for _, count in by_hand) == sum(len(i) - 1 for i in ids)
    assert math.isclose(found[0], sum(total for total, _ in by_hand), rel_tol=1e-9)


def test_a_model_that_knows_nothing_is_in_doubt_between_all_tokens():
    assert perplexity(3 * math.log(50), 3) == pytest.approx(50)
    assert perplexity(1e6, 1) == math.inf
