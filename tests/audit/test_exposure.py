"""Canaries in the form of the paper, written as every other row, and scored one by one. Exposure: ranks
by sorting, skew-normals by sums on a grid, and what epsilon allows by adding up ranks."""

import itertools
import math

import datasets
import numpy as np
import pytest
import tiny_text
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from scipy.integrate import quad
from scipy.special import log_ndtr, logsumexp
from scipy.stats import norm, skewnorm
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_dp.audit import canaries as made
from hf_dp.audit import exposure as scoring
from hf_dp.audit.exposure import AT_RANDOM, approximate, exact, log_cdf, most_exposed
from hf_dp.errors import ConfigError, DataError, InvalidArgumentError, UnsupportedModelError
from hf_dp.tasks.generation.arguments import TextArguments
from hf_dp.tasks.generation.encoding import encode, encoding_of
from hf_dp.tasks.generation.evaluation import negative_log_likelihood
from hf_dp.tasks.models import CAUSAL

E2E = TextArguments(data_format="e2e", max_length=150)
PAIRS = TextArguments(
    data_format="pairs",
    prompt_column="meaning_representation",
    target_column="human_reference",
    max_length=150,
)


def make(data=E2E, count=3, repetitions=1, seed=0):
    return made.make(tiny_text.tokenizer(), data, count=count, repetitions=repetitions, seed=seed)


@pytest.mark.parametrize("data", [E2E, PAIRS])
@pytest.mark.parametrize("listed", [False, True])
def test_canaries_are_rows_of_the_papers_form(data, listed):
    words = tiny_text.tokenizer()
    canaries, rows = make(data, repetitions=4), tiny_text.tables()["train"]
    if listed:  # several references of a row, beside a column that no layout needs
        rows = datasets.Dataset.from_list(
            [{**row, "human_reference": [row["human_reference"]], "more": 1} for row in rows]
        )
    encoded = encode(made.insert(rows, data, canaries), data, encoding_of(CAUSAL, words, data))
    assert len(encoded) == 60 + 12 == len(rows) + canaries.num_rows
    for place, canary in enumerate(canaries.canaries):
        name, kind, area = canary.prompt
        asked = f" name : {name} | Type : {kind} | area : {area}{words.eos_token}"
        told = f" {' '.join(canary.suffix)}{words.eos_token}"
        for row in encoded.select(range(60 + 4 * place, 60 + 4 * place + 4)):
            assert words.decode(row["input_ids"]) == asked + told
            learned = [token for token in row["labels"] if token != -100]
            assert words.decode(learned) == told and len(learned) == made.LENGTH + 1


def test_a_seed_draws_the_same_whatever_the_repetitions():
    assert make(repetitions=1).canaries == make(repetitions=100).canaries
    assert make(seed=1).canaries != make().canaries
    many = make(count=500)
    assert len({canary.prompt for canary in many.canaries}) == 500
    assert len(set(many.words)) == 10 and many.size == 100_000
    used = {word for canary in many.canaries for word in canary.prompt + canary.suffix}
    assert used == set(many.words)


def test_the_space_is_every_suffix_and_candidates_are_no_canaries():
    words, canaries = tiny_text.tokenizer(), make(count=20)
    space = made.every_suffix(canaries, words)
    assert space.shape == (100_000, 5) and len(space.unique(dim=0)) == 100_000
    taken = [made.number(canary, canaries) for canary in canaries.canaries]
    for canary, place in zip(canaries.canaries, taken, strict=True):
        assert words.decode(space[place]) == f" {' '.join(canary.suffix)}"
    rest = made.candidates(canaries, 100_000 - len(set(taken)), seed=0)
    assert set(rest) | set(taken) == set(range(100_000)) and not set(rest) & set(taken)
    assert made.candidates(canaries, 100, seed=0) != made.candidates(canaries, 100, seed=1)
    with pytest.raises(ConfigError, match="candidates.*at most"):
        made.candidates(canaries, 100_000, seed=0)


def few_words() -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0} | {f"\u0120word{'abcdefghi'[i]}": i + 1 for i in range(9)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_what_cannot_have_canaries_is_refused():
    with pytest.raises(DataError, match="at least 10 whole words.*found 9"):
        made.make(few_words(), E2E, count=1, repetitions=1, seed=0)
    with pytest.raises(ConfigError, match="data_format.*'dart'"):
        make(TextArguments(data_format="dart"))
    for wrong in ({"repetitions": 0}, {"count": 0}):
        with pytest.raises(InvalidArgumentError, match="whole number >= 1"):
            make(**wrong)
    with pytest.raises(ConfigError, match="at most 1,000"):
        make(count=1001)
    short = TextArguments(data_format="e2e", max_length=24)
    with pytest.raises(DataError, match="max_length"):
        made.check_encoding(make(), short, encoding_of(CAUSAL, tiny_text.tokenizer(), short))


def test_a_file_says_what_was_inserted(tmp_path):
    canaries = make(repetitions=7)
    canaries.save(tmp_path / "run")
    assert made.load(tmp_path / "run") == canaries
    with pytest.raises(ConfigError, match=r"no canaries\.json that can be read"):
        made.load(tmp_path)
    (tmp_path / made.FILE_NAME).write_text('{"words": []}')
    with pytest.raises(ConfigError, match="KeyError"):
        made.load(tmp_path)


# -- scores --


def scored(model, canary, canaries, rows, data=E2E):
    words = tiny_text.tokenizer()
    begin = made.prefix(canary, data, encoding_of(CAUSAL, words, data))
    space = made.every_suffix(canaries, words)
    return scoring.log_perplexities(model, begin, space[rows], progress=False), begin, space


def adapted(kind):
    """A tiny GPT-2 with an adapter that changes what it says."""
    torch.manual_seed(1)
    adapter = get_peft_model(tiny_text.gpt2(), kind)
    for weights in adapter.parameters():
        if weights.requires_grad:
            torch.nn.init.normal_(weights)
    return adapter


def qwen():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    words = len(tiny_text.tokenizer())
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=words, **sizes, **heads))


MODELS = {
    "gpt2": tiny_text.gpt2,
    "qwen": qwen,
    "lora": lambda: adapted(LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)),
    "prefix": lambda: adapted(PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3)),
    "prompt": lambda: adapted(PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", [1, 60_000])  # one beginning at a time, and several
def test_scores_are_those_of_the_rows_by_themselves(name, limit, monkeypatch):
    monkeypatch.setattr(scoring, "_LOGITS", limit)
    model, words, canaries = MODELS[name]().train(), tiny_text.tokenizer(), make()
    words.pad_token = words.eos_token
    rows = [5, 4, 77_777, 5, 99_999, 0, 77_770, 12_345, 40]
    found, begin, space = scored(model, canaries.canaries[0], canaries, rows)
    assert model.training
    for row, bits in zip(rows, found, strict=True):
        ids = [*begin, *space[row].tolist()]
        example = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        example["labels"] = [-100] * len(begin) + ids[len(begin) :]
        alone, count = negative_log_likelihood(model, DataCollatorForSeq2Seq(words), [example], 1)
        assert count == made.LENGTH
        assert bits == pytest.approx(alone / np.log(2), rel=1e-5)


def test_a_model_without_attention_is_refused():
    words = len(tiny_text.tokenizer())
    model = MambaForCausalLM(MambaConfig(vocab_size=words, hidden_size=16, num_hidden_layers=1))
    canaries = make()
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM keeps no cache"):
        scored(model, canaries.canaries[0], canaries, [0])


def test_what_is_learned_by_heart_is_exposed_and_what_was_never_seen_is_not():
    canaries, model = make(count=1), tiny_text.gpt2()
    (canary,) = canaries.canaries
    own, everything = made.number(canary, canaries), range(100_000)
    drawn = made.candidates(canaries, 2000, seed=0)
    before, begin, space = scored(model, canary, canaries, everything)
    chosen = np.random.default_rng(0).choice(100_000, 400, replace=False)
    by_chance = [exact(before[i], np.delete(before, i)).exposure for i in chosen]
    assert np.mean(by_chance) == pytest.approx(AT_RANDOM, abs=4 * AT_RANDOM / 20)
    fitted = [approximate(before[i], before[drawn]).exposure for i in chosen[:10]]
    assert fitted == pytest.approx(by_chance[:10], abs=0.5)

    ids = torch.tensor([[*begin, *space[own].tolist()]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    after, *_ = scored(model, canary, canaries, everything)
    assert exact(after[own], np.delete(after, own)).rank == 1
    found = approximate(after[own], after[drawn])
    assert found.exposure > 12 and found.extrapolated


# A language model of three words by itself: -log2 p of a suffix of four is a sum over its words.
BITS = {"a": 0.5, "b": 2.25, "c": 3.0}
SPACE = {suffix: sum(BITS[word] for word in suffix) for suffix in itertools.product(BITS, repeat=4)}


def test_the_rank_is_the_place_in_the_sorted_space_behind_all_ties():
    in_order = sorted(SPACE, key=lambda suffix: (SPACE[suffix], suffix))
    for suffix, bits in SPACE.items():
        others = [value for other, value in SPACE.items() if other != suffix]
        found = exact(bits, others)
        places = [i + 1 for i, other in enumerate(in_order) if SPACE[other] == bits]
        assert (found.rank, found.tied, found.size) == (max(places), len(places) - 1, 81)
        assert found.exposure == pytest.approx(math.log2(81 / max(places)))


def test_of_a_model_that_knows_nothing_the_mean_is_1_44():
    values = np.random.default_rng(0).permutation(2000) / 7
    ranks = [exact(values[i], np.delete(values, i)).exposure for i in range(2000)]
    assert np.mean(ranks) == pytest.approx(AT_RANDOM, abs=0.01)
    assert AT_RANDOM == pytest.approx(quad(lambda u: -math.log2(u), 0, 1)[0])


def on_a_grid(z: float, shape: float) -> float:
    """ln P(Z <= z) by the trapezoid rule in logarithms, down to where nothing is left."""
    t = np.linspace(z - 12, z, 200_001)
    density = math.log(2) + norm.logpdf(t) + log_ndtr(shape * t)
    return float(logsumexp(density)) + math.log(t[1] - t[0])


@pytest.mark.parametrize("shape", [-6.0, -1.0, 0.0, 0.7, 3.0, 20.0])
@pytest.mark.parametrize("z", [-25.0, -8.0, -3.0, -1.0, 0.0, 2.0])
def test_the_distribution_function_is_the_integral_of_the_density(z, shape):
    assert log_cdf(z, shape) == pytest.approx(on_a_grid(z, shape), rel=1e-3, abs=1e-4)
    if shape == 0:
        assert log_cdf(z, shape) == pytest.approx(float(log_ndtr(z)), rel=1e-9)


@pytest.mark.parametrize("shape", [-3.0, 4.0])
def test_the_approximation_finds_a_known_skew_normal(shape):
    location, scale = 60.0, 5.0
    sample = skewnorm.rvs(shape, location, scale, size=8000, random_state=1)
    density = skewnorm(shape, location, scale).pdf
    for probability, bits in ((0.5, 0.05), (1e-2, 0.2), (1e-3, 0.5)):
        canary = float(skewnorm.ppf(probability, shape, location, scale))
        found = approximate(canary, sample)
        known = -math.log2(quad(density, -math.inf, canary, epsabs=1e-12)[0])
        assert known == pytest.approx(-math.log2(probability), rel=1e-3)
        assert found.exposure == pytest.approx(known, abs=bits)
        assert not found.extrapolated and found.distance < 0.02 and found.p_value > 0.05


def test_what_a_sample_cannot_tell_is_called_extrapolated():
    sample = skewnorm.rvs(2, 60, 5, size=1000, random_state=2)
    assert approximate(60.0, sample).extrapolated is False
    found = approximate(40.0, sample)
    assert found.exposure > 30 and found.extrapolated
    assert math.isfinite(approximate(-1e4, sample).exposure)


def test_a_bad_fit_shows():
    two_heaps = np.concatenate([np.linspace(0, 1, 500), np.linspace(50, 51, 500)])
    found = approximate(0.5, two_heaps)
    assert found.distance > 0.2 and found.p_value < 1e-6


@pytest.mark.parametrize(
    ("canary", "sample", "message"),
    [
        (1.0, [1.0, math.nan] * 100, "not all finite"),
        (math.inf, np.arange(200.0), "not all finite"),
        (1.0, np.arange(99.0), "at least 100"),
        (1.0, np.ones(200), "nothing to measure"),
    ],
)
def test_numbers_that_tell_nothing_are_refused(canary, sample, message):
    with pytest.raises(DataError, match=message):
        approximate(canary, sample)
    if message == "not all finite":
        with pytest.raises(DataError, match=message):
            exact(canary, sample)


@pytest.mark.parametrize(("epsilon", "delta", "r"), [(0.5, 0, 1), (3, 1e-4, 1), (1, 1e-3, 4)])
def test_epsilon_allows_what_the_leakiest_model_does(epsilon, delta, r):
    """Its canary is among the first k as often as the privacy of r rows allows, for every k."""
    size = 20_000
    k = np.arange(1, size + 1)
    slack = sum(delta * math.exp(i * epsilon) for i in range(r))
    among = np.minimum(1, math.exp(r * epsilon) * k / size + slack)
    mean = float(np.diff(among, prepend=0) @ (math.log2(size) - np.log2(k)))
    bound = most_exposed(epsilon, delta, r, size)
    assert mean <= bound <= mean + 0.02 + slack * 14.3 / 2


def test_epsilon_of_many_rows_allows_everything():
    assert most_exposed(3, 1e-5, 100, 100_000) == math.log2(100_000)
    assert most_exposed(1e-9, 0, 1, 100_000) == pytest.approx(AT_RANDOM, abs=1e-4)
    for wrong in ((0, 0, 1, 9), (1, -1, 1, 9), (1, 0, 0, 9), (1, 0, 1, 1)):
        with pytest.raises(InvalidArgumentError):
            most_exposed(*wrong)
