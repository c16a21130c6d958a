"""Writing: a batch as each prompt alone, reproducible, and apart from all private randomness."""

import math

import pytest
import tiny_text
import torch
from peft import PromptTuningConfig, get_peft_model

from hf_dp.errors import DataError
from hf_dp.tasks.generation.arguments import DecodingArguments
from hf_dp.tasks.generation.evaluation import check_prompts, decode, perplexity

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


@pytest.mark.parametrize("make", [tiny_text.gpt2, tiny_text.t5])
@pytest.mark.parametrize("decoding", ["beam", "greedy", "nucleus"])
@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "encoder_repetition_penalty": 9.0},
        {"min_p": 0.5, "typical_p": 0.1, "epsilon_cutoff": 0.5, "eta_cutoff": 0.5},
        {"temperature": 9.0, "top_k": 1, "top_p": 0.01},
        {"length_penalty": -9.0, "early_stopping": True, "num_beams": 3, "do_sample": True},
        {"bad_words_ids": [[token] for token in range(5, 200)]},
        {"suppress_tokens": [*range(5, 200)], "begin_suppress_tokens": [*range(5, 200)]},
        {"sequence_bias": [[[7], 99.0]], "min_new_tokens": 7, "max_length": 3},
        {"exponential_decay_length_penalty": (1, 9.0), "max_time": 1e-9, "min_length": 9},
        {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True},
    ],
    ids=lambda own: next(iter(own)),
)
def test_what_a_bases_generation_config_says_decides_nothing(own, decoding, make):
    model = make()
    expected = written(model, decoding=decoding)
    model.generation_config.update(**own)
    assert written(model, decoding=decoding) == expected


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
    with pytest.raises(DataError, match=r"Prompt 1 has 154 tokens.* exceeds the 160 positions"):
        written(tiny_text.gpt2(), [[1], [1] * 154])
    with pytest.raises(DataError, match=r"150 tokens.* exceeds the 157 positions"):
        written(prompt_tuned(), [[1] * 150])
    with pytest.raises(DataError, match=r"150 tokens.* exceeds the 157 positions"):
        check_prompts(tiny_text.gpt2(), [[1] * 150], settings(), virtual=3)
    check_prompts(tiny_text.gpt2(), [[1] * 150], settings())


@pytest.mark.parametrize(
    "given",
    [
        {"decoding": "best"},
        {"num_beams": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": 0},
        {"stop": [""]},
    ],
)
def test_settings_are_checked(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        DecodingArguments(**given)


# -- perplexity; its sums of losses are in tests/tasks/test_padding_is_the_end.py --


def test_a_model_that_knows_nothing_is_in_doubt_between_all_tokens():
    assert perplexity(3 * math.log(50), 3) == pytest.approx(50)
    assert perplexity(1e6, 1) == math.inf
