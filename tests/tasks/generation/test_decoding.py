"""Writing: a batch as each prompt alone, reproducible, and apart from all private randomness."""

from __future__ import annotations

import pytest
import tiny_text
import torch
from peft import PromptTuningConfig, get_peft_model

from hf_dp.errors import DataError
from hf_dp.tasks.generation.arguments import DecodingArguments
from hf_dp.tasks.generation.evaluation import check_prompts, decode

PROMPTS = ["food", "The Golden Fern is a cheap pub", "area : riverside | food", "a"]


def words():
    made = tiny_text.tokenizer()
    made.pad_token = made.eos_token
    return made


def ids(texts=PROMPTS):
    return [words()(text)["input_ids"] for text in texts]


def settings(**given):
    return DecodingArguments(**{"max_new_tokens": 12, "decoding_batch_size": 4, **given})


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
    together = decode(model, words(), ids(), settings(decoding=decoding), progress=False)
    for prompt, text in zip(ids(), together):
        alone = decode(model, words(), [prompt], settings(decoding=decoding), progress=False)
        assert alone == [text]
    assert len(set(together)) > 1  # or nothing would have been compared


def test_greedy_is_the_most_likely_token_each_time():
    model = tiny_text.gpt2()
    (text,) = decode(model, words(), ids(["food"]), settings(decoding="greedy"), progress=False)
    sequence = list(ids(["food"])[0])
    for _ in range(12):
        token = int(model(torch.tensor([sequence])).logits[0, -1].argmax())
        if token == words().eos_token_id:
            break
        sequence.append(token)
    assert (
        text == words().decode(sequence[len(ids(["food"])[0]) :], skip_special_tokens=True).strip()
    )


def test_sampling_repeats_by_its_seed_and_leaves_the_generator_alone():
    model = tiny_text.gpt2()

    def write(seed):
        given = settings(decoding="nucleus", decoding_seed=seed)
        return decode(model, words(), ids(), given, progress=False)

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
    one = settings(decoding="nucleus", top_p=1e-6)
    assert decode(model, words(), ids(), one, progress=False) == decode(
        model, words(), ids(), settings(decoding="greedy"), progress=False
    )


def test_a_text_ends_at_a_stop():
    model = tiny_text.gpt2()
    (whole,) = decode(model, words(), ids(["food"]), settings(decoding="greedy"), progress=False)
    stop = whole[len(whole) // 2]
    (cut,) = decode(
        model, words(), ids(["food"]), settings(decoding="greedy", stop=[stop]), progress=False
    )
    assert cut == whole.split(stop)[0].strip()


def test_the_mode_of_the_model_is_restored():
    model = tiny_text.gpt2().train()
    decode(model, words(), ids(), settings(decoding="greedy"), progress=False)
    assert model.training


def test_prompts_that_cannot_be_written_after_are_named():
    with pytest.raises(DataError, match="Prompt 1 has no token"):
        decode(tiny_text.gpt2(), words(), [[1], []], settings(), progress=False)
    with pytest.raises(DataError, match=r"Prompt 1 has 150 tokens.* passes the 160 positions"):
        decode(tiny_text.gpt2(), words(), [[1], [1] * 150], settings(), progress=False)
    with pytest.raises(DataError, match=r"146 tokens.* passes the 157 positions"):
        decode(prompt_tuned(), words(), [[1] * 146], settings(), progress=False)
    with pytest.raises(DataError, match=r"146 tokens.* passes the 157 positions"):
        check_prompts(tiny_text.gpt2(), [[1] * 146], settings(), virtual=3)
    check_prompts(tiny_text.gpt2(), [[1] * 146], settings())


@pytest.mark.parametrize(
    "given",
    [{"decoding": "best"}, {"num_beams": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": 0}],
)
def test_settings_are_checked(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        DecodingArguments(**given)
