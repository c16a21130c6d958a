"""Writing: a batch as each prompt alone, reproducible, and apart from all private randomness; and
perplexity against a loop over single examples and tokens in float64."""

import math

import pytest
import tiny_text
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq

from hf_dp.errors import DataError
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.generation.encoding import encode, encoding_of
from hf_dp.tasks.generation.evaluation import (
    check_prompts,
    decode,
    negative_log_likelihood,
    perplexity,
)
from hf_dp.tasks.models import CAUSAL, SEQ2SEQ

PROMPTS = ["food", "The Golden Fern is a cheap pub", "area : riverside | food", "a"]


def words():
    made = tiny_text.tokenizer()
    made.pad_token = made.eos_token
    return made


def ids(texts=PROMPTS):
    return [words()(text)["input_ids"] for text in texts]


def settings(**given):
    return DecodingArguments(**{"max_new_tokens": 8, "decoding_batch_size": 4, **given})


def written(model, prompts=None, **given):
    """What a model writes after these prompts, by default all."""
    prompts = ids() if prompts is None else prompts
    return decode(model, words(), prompts, settings(**given), progress=False)


def prompt_tuned():
    torch.manual_seed(0)
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    made = get_peft_model(tiny_text.gpt2(), config)
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.25)
    return made


@pytest.mark.parametrize("make", [tiny_text.gpt2, tiny_text.t5, prompt_tuned])
@pytest.mark.parametrize("decoding", ["beam", "greedy"])
def test_a_batch_writes_what_each_prompt_alone_writes(make, decoding):
    model = make().double()
    together = written(model, decoding=decoding)
    for prompt, text in zip(ids(), together):
        assert written(model, [prompt], decoding=decoding) == [text]
    assert len(set(together)) > 1  # or nothing would have been compared


def test_greedy_is_the_most_likely_token_each_time():
    model = tiny_text.gpt2()
    (asked,) = ids(["food"])
    sequence = list(asked)
    for _ in range(8):
        token = int(model(torch.tensor([sequence])).logits[0, -1].argmax())
        if token == words().eos_token_id:
            break
        sequence.append(token)
    expected = words().decode(sequence[len(asked) :], skip_special_tokens=True).strip()
    assert written(model, [asked], decoding="greedy") == [expected]


def test_sampling_repeats_by_its_seed_and_leaves_the_generator_alone():
    model = tiny_text.gpt2()

    def write(seed):
        return written(model, decoding="nucleus", decoding_seed=seed)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = write(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert write(1) == first
    assert write(2) != first


def test_nucleus_keeps_to_the_share_of_probability():
    """With a share so small that one token holds it, sampling is greedy."""
    model = tiny_text.gpt2()
    one = written(model, decoding="nucleus", top_p=1e-6)
    assert one == written(model, decoding="greedy")


def test_a_text_ends_at_a_stop():
    model = tiny_text.gpt2().train()
    (whole,) = written(model, ids(["food"]), decoding="greedy")
    stop = whole[len(whole) // 2]
    (cut,) = written(model, ids(["food"]), decoding="greedy", stop=[stop])
    assert cut == whole.split(stop)[0].strip()
    assert model.training  # as before


@pytest.mark.parametrize("decoding", ["beam", "nucleus", "greedy"])
def test_a_text_of_one_line_has_no_line_break_and_is_else_the_most_likely(decoding):
    """A model that would always break the line writes its second choice."""
    model, tokenizer = tiny_text.gpt2(), words()
    (broken,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    (second,) = tokenizer("a", add_special_tokens=False)["input_ids"]

    class Always(torch.nn.Module):
        def forward(self, hidden):
            scores = torch.zeros(*hidden.shape[:-1], len(tokenizer))
            scores[..., broken], scores[..., second] = 60.0, 30.0
            return scores

    model.lm_head = Always()
    assert written(model, ids(["food"]), decoding=decoding) == [""]  # stripped
    assert written(model, ids(["food"]), decoding=decoding, one_line=True) == ["a" * 8]


def test_prompts_that_cannot_be_written_after_are_named():
    with pytest.raises(DataError, match="Prompt 1 has no token"):
        written(tiny_text.gpt2(), [[1], []])
    with pytest.raises(DataError, match=r"Prompt 1 has 154 tokens.* passes the 160 positions"):
        written(tiny_text.gpt2(), [[1], [1] * 154])
    with pytest.raises(DataError, match=r"150 tokens.* passes the 157 positions"):
        written(prompt_tuned(), [[1] * 150])
    with pytest.raises(DataError, match=r"150 tokens.* passes the 157 positions"):
        check_prompts(tiny_text.gpt2(), [[1] * 150], settings(), virtual=3)
    check_prompts(tiny_text.gpt2(), [[1] * 150], settings())


@pytest.mark.parametrize(
    "given",
    [{"decoding": "best"}, {"num_beams": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": 0}],
)
def test_settings_are_checked(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        DecodingArguments(**given)


# -- perplexity --

E2E = TextArguments(data_format="e2e")


def assert_likelihood(model, words, rows, kind):
    """Compare with the sum over rows and tokens; return the number of tokens."""
    total, count = negative_log_likelihood(model, DataCollatorForSeq2Seq(words), rows, 5)
    by_hand = [one_by_one(model, row, kind) for row in rows]
    assert count == sum(each for _, each in by_hand)
    assert math.isclose(total, sum(each for each, _ in by_hand), rel_tol=1e-9)
    return count


def one_by_one(model, row, kind):
    """The sum of -ln p over one row's labeled tokens, and their number, by the model's logits."""
    labels = row["labels"]
    given = {"input_ids": torch.tensor([row["input_ids"]])}
    if kind == SEQ2SEQ:
        start = model.config.decoder_start_token_id
        given["decoder_input_ids"] = torch.tensor([[start, *labels[:-1]]])
    scores = model(**given).logits[0].log_softmax(-1).detach()
    at = range(len(labels)) if kind == SEQ2SEQ else range(1, len(labels))
    before = 0 if kind == SEQ2SEQ else 1
    terms = [-float(scores[t - before, labels[t]]) for t in at if labels[t] != -100]
    return sum(terms), len(terms)


# Encoders of T5's kind are padded on the right.
CASES = [
    (tiny_text.gpt2, CAUSAL, "right"), (tiny_text.gpt2, CAUSAL, "left"), (tiny_text.t5, SEQ2SEQ, "right")
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "side"), CASES)
def test_perplexity_is_the_mean_over_all_target_tokens(make, kind, side):
    words = tiny_text.tokenizer()
    words.pad_token, words.padding_side = words.eos_token, side
    model = make().double()
    encoded = encode(tiny_text.tables()["validation"], E2E, encoding_of(kind, words, E2E))
    assert_likelihood(model, words, [dict(row) for row in encoded], kind)
    words.padding_side = "right"


def test_a_first_token_that_nothing_stands_before_is_not_counted():
    words = tiny_text.tokenizer()
    words.pad_token = words.eos_token
    ids = [words(text)["input_ids"] for text in ("The Golden Fern", "a cheap pub", "food")]
    rows = [{"input_ids": i, "attention_mask": [1] * len(i), "labels": i} for i in ids]
    count = assert_likelihood(tiny_text.gpt2().double(), words, rows, CAUSAL)
    assert count == sum(len(i) - 1 for i in ids)


def test_a_model_that_knows_nothing_is_in_doubt_between_all_tokens():
    assert perplexity(3 * math.log(50), 3) == pytest.approx(50)
    assert perplexity(1e6, 1) == math.inf
