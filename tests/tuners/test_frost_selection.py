"""Partitions, estimation and selection of DP-FROST, against slow implementations written from the
paper's text alone."""

import json
import math

import numpy as np
import pytest
from models import ARCHITECTURES
from scipy.optimize import minimize

from hf_dp.cli.main import main
from hf_dp.errors import InvalidArgumentError
from hf_dp.tuners.frost.select import (
    Partition,
    _last_frozen,
    estimate,
    partitions,
    scales_of,
    select,
    variance,
)


@pytest.mark.parametrize(
    "name",
    ["bert", "albert", "bert_masked_lm", "gpt2_tied", "gemma3", "t5", "bart", "vit", "dinov2"],
)
def test_every_trainable_parameter_is_in_exactly_one(name):
    model = ARCHITECTURES[name].build()
    found = partitions(model)
    parameters = dict(model.named_parameters())
    assert sorted(n for p in found for n in p.parameters) == sorted(parameters)
    assert [p.size for p in found] == [
        sum(parameters[n].numel() for n in p.parameters) for p in found
    ]
    assert len({p.name for p in found}) == len(found)
    assert partitions(ARCHITECTURES[name].build()) == found


def by_name(name: str, **options):
    return {p.name: p for p in partitions(ARCHITECTURES[name].build(), **options)}


def test_a_weight_goes_with_its_bias():
    found = by_name("bert")
    query = found["bert.encoder.layer.0.attention.self.query"]
    assert query.parameters == (f"{query.name}.weight", f"{query.name}.bias")
    assert query.owners == (query.name,)
    assert found["bert.embeddings.word_embeddings"].parameters == (
        "bert.embeddings.word_embeddings.weight",
    )
    assert found["bert.encoder.layer.0.output.LayerNorm"].size == 32


def test_bare_parameters_are_their_own():
    found = by_name("vit")
    assert found["vit.embeddings.cls_token"].parameters == ("vit.embeddings.cls_token",)
    assert found["vit.embeddings.position_embeddings"].parameters == (
        "vit.embeddings.position_embeddings",
    )


def test_tied_parameters_are_one_partition_with_all_its_owners():
    found = by_name("gpt2_tied")
    assert found["transformer.wte"].owners == ("transformer.wte", "lm_head")
    assert "lm_head" not in found
    # BERT's decoder is tied to the embedding; the vocabulary's bias belongs to it.
    found = by_name("bert_masked_lm")
    tied = found["bert.embeddings.word_embeddings"]
    bias = "cls.predictions.bias"
    assert set(tied.parameters) == {"bert.embeddings.word_embeddings.weight", bias}
    assert "cls.predictions.decoder" in tied.owners
    t5 = by_name("t5")
    assert set(t5["shared"].owners) >= {"shared", "encoder.embed_tokens", "decoder.embed_tokens"}


def test_frozen_parameters_are_left_out():
    model = ARCHITECTURES["bert"].build()
    model.bert.embeddings.requires_grad_(False)
    assert not any("embeddings" in p.name for p in partitions(model))


def test_the_command(tmp_path, capsys):
    model = ARCHITECTURES["bert"].build()
    model.save_pretrained(tmp_path)
    assert main(["partitions", str(tmp_path), "--num-labels", "3"]) == 0
    text = capsys.readouterr().out
    head = sum(p.numel() for p in model.classifier.parameters())
    count, numbers = len(partitions(model)) - 1, model.num_parameters() - head
    assert f"{count} partitions, {numbers:,} parameters" in text
    assert f"{head} of a new head, which always train" in text
    assert main(["partitions", str(tmp_path), "--num-labels", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found[name] for name in ("parameters", "always_train", "stay_frozen")) == (
        model.num_parameters()
    )
    vision = ARCHITECTURES["vit"].build()
    vision.save_pretrained(tmp_path)
    labels = str(vision.config.num_labels)
    assert main(["partitions", str(tmp_path), "--num-labels", labels, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["always_train"] == sum(p.numel() for p in vision.classifier.parameters())
    assert not any(row["name"].startswith("classifier") for row in found["partitions"])
    assert main(["partitions", "no/such"]) == 2
    assert "'no/such' could not be loaded" in capsys.readouterr().err


def partition(name: str, size: int) -> Partition:
    return Partition(name, (f"{name}.weight",), (name,), size)


# -- PGM-EST ---


def observations(seed: int = 0, t: int = 3, m: int = 6):
    """Shrinking sets: each iteration after the first no longer observes one more partition."""
    source = np.random.default_rng(seed)
    truth, scales = source.uniform(1, 5, m), source.uniform(0.01, 0.03, t)
    sensitivities = source.uniform(0.5, 2, t)
    observed = scales[:, None] * truth + 0.001 * sensitivities[:, None] * source.normal(size=(t, m))
    for row in range(1, t):
        observed[row, :row] = np.nan
    return observed, sensitivities, scales


def by_the_text(observed, sensitivities, sample_rate, rounds):
    """Algorithm 5, loop by loop; the first iteration's result divided by q as section 4.5 has
    it."""
    t_max, m = observed.shape
    if t_max == 1:
        return [observed[0, i] / sample_rate for i in range(m)]
    scales = [sample_rate] + [1.0] * (t_max - 1)
    v = [0.0] * m
    for _ in range(rounds):
        before = list(scales)
        for i in range(m):
            seen = [t for t in range(t_max) if not math.isnan(observed[t, i])]
            above = sum(observed[t, i] * scales[t] / sensitivities[t] ** 2 for t in seen)
            v[i] = above / sum(scales[t] ** 2 / sensitivities[t] ** 2 for t in seen)
        for t in range(1, t_max):
            there = [i for i in range(m) if not math.isnan(observed[t, i])]
            delta = sensitivities[t] ** 2
            scales[t] = sum(observed[t, i] * v[i] / delta for i in there) / sum(
                v[i] ** 2 / delta for i in there
            )
        if scales == before:
            break  # all further rounds are the same
    return v


@pytest.mark.parametrize(("t", "rounds"), [(1, 10), (2, 1), (2, 30), (4, 30)])
def test_pgm_est_is_algorithm_5(t, rounds):
    observed, sensitivities, _ = observations(t=t)
    found = estimate(observed, sensitivities, 0.02, rounds)
    assert found == pytest.approx(by_the_text(observed, sensitivities, 0.02, rounds), rel=1e-12)


def test_pgm_est_maximizes_the_likelihood():
    """Against a general optimizer on the likelihood of equation (1), all magnitudes and all scales
    but the first free."""
    observed, sensitivities, _ = observations()
    rate, (t, m) = 0.02, observed.shape

    def loss(parameters):
        v, scales = parameters[:m], np.concatenate([[rate], parameters[m:] / 50])
        return np.nansum(((observed - scales[:, None] * v) / sensitivities[:, None]) ** 2) * 1e6

    start = np.concatenate([observed[0] / rate, np.ones(t - 1)])
    options = {"maxiter": 20000, "maxfun": 200000, "ftol": 1e-15, "gtol": 1e-12}
    best = minimize(loss, start, method="L-BFGS-B", options=options)
    found = estimate(observed, sensitivities, rate)
    scales = scales_of(observed, found, rate)
    ours = loss(np.concatenate([found, scales[1:] * 50]))
    assert ours <= best.fun * (1 + 1e-4) + 1e-9


def test_variance_is_lemma_6():
    """Against the spread of the estimate over drawn noise, scales known: a partition that remained
    throughout."""
    _, sensitivities, scales = observations()
    source = np.random.default_rng(1)
    truth, sigma = 3.0, 0.4
    noisy = scales * truth + sigma * sensitivities * source.normal(size=(20_000, len(scales)))
    weights = scales / sensitivities**2
    estimates = noisy @ weights / np.sum(weights * scales)
    expected = math.sqrt(variance(sigma, scales, sensitivities))
    assert estimates.std() == pytest.approx(expected, rel=0.02)


# -- PSEL ---


def chosen(sizes, observe, gamma=0.3, iterations=1, rate=1.0, gap=5.0, sigma=0.0, names=None):
    """Select among partitions of these sizes. ``observe`` takes the numbers of those that remain."""
    names = names or [f"p{i}" for i in range(len(sizes))]
    numbers = {name: number for number, name in enumerate(names)}
    return select(
        [partition(name, size) for name, size in zip(names, sizes, strict=True)],
        lambda rest: observe([numbers[part.name] for part in rest]),
        unfreeze_ratio=gamma,
        iterations=iterations,
        sample_rate=rate,
        gap_coefficient=gap,
        noise_multiplier=sigma,
    )


def psel_by_the_text(sizes, observe, gamma, iterations, rate, gap, sigma):
    """Algorithm 4, where hf_dp/tuners/frost/select.py says that it departs from it, too; partitions
    by number, 0 to M - 1."""
    total, m = sum(sizes), len(sizes)
    remaining, chosen = list(range(m)), []
    rows, deltas = [], []
    for t in range(1, iterations + 1):
        values, delta = observe(remaining)
        rows.append([values[remaining.index(i)] if i in remaining else math.nan for i in range(m)])
        deltas.append(delta)
        v = by_the_text(np.array(rows), deltas, rate, 1000)
        scales = scales_of(np.array(rows), np.array(v), rate)
        deviation = math.sqrt(
            sigma**2 / sum((scale / d) ** 2 for scale, d in zip(scales, deltas, strict=True))
        )
        order = sorted(remaining, key=lambda i: (v[i], i))
        j, held = 0, sizes[order[0]]
        while held < (1 - gamma) * total:
            j += 1
            held += sizes[order[j]]
        threshold = v[order[j]] + gap * deviation
        limit = gamma * total * (1 if t == iterations else t / iterations)
        for i in reversed(order):
            if not (t == iterations or v[i] > threshold):
                break
            if sizes[i] + sum(sizes[k] for k in chosen) <= limit:
                chosen.append(i)
        remaining = [i for i in remaining if i not in chosen]
    return chosen


@pytest.mark.parametrize("sigma", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_psel_is_algorithm_4(seed, sigma):
    source = np.random.default_rng(seed)
    sizes = source.integers(5, 60, 9).tolist()
    truth = source.uniform(0.1, 5, 9)
    settings = {"gamma": 0.4, "iterations": 4, "rate": 0.05, "gap": 1.5, "sigma": sigma}

    def observer():
        noise = np.random.default_rng(seed + 100)
        return lambda numbers: (
            [0.05 * truth[i] + sigma * 0.3 * noise.normal() * len(numbers) / 9 for i in numbers],
            0.3 * len(numbers) / 9,
        )

    plain = observer()
    ours = observer()
    found = chosen(sizes, ours, **settings)
    assert [int(name[1:]) for name in found.names] == psel_by_the_text(sizes, plain, **settings)
    assert sum(sizes[int(name[1:])] for name in found.names) <= 0.4 * sum(sizes)


def line_20_as_printed(order, sizes, limit):
    """Lines 20 to 23 of Algorithm 4 in the last iteration: ``order`` by falling magnitude."""
    chosen, j = [], 0
    while j < len(order) and sizes[order[j]] + sum(sizes[i] for i in chosen) <= limit:
        chosen.append(order[j])
        j += 1
    return chosen


@pytest.mark.parametrize("seed", range(20))
def test_a_single_shot_begins_with_what_the_papers_loop_selects(seed):
    """The paper's stops at the first that does not fit, and ours goes on to those that do."""
    source = np.random.default_rng(seed)
    sizes = source.integers(5, 60, 9).tolist()
    noisy = source.normal(3, 1, 9)
    found = chosen(sizes, lambda rest: (noisy.tolist(), 1.0), gamma=0.4, sigma=1.0)
    ours = [int(name[1:]) for name in found.names]
    papers = line_20_as_printed(np.argsort(-noisy).tolist(), sizes, 0.4 * sum(sizes))
    assert ours[: len(papers)] == papers
    smallest_left = min(size for i, size in enumerate(sizes) if i not in ours)
    assert sum(sizes[i] for i in ours) + smallest_left > 0.4 * sum(sizes)


def test_without_noise_the_largest_that_fit_are_chosen():
    truth = [9.0, 5.0, 1.0, 3.0]
    found = chosen([60, 10, 10, 20], lambda rest: ([truth[i] for i in rest], 1.0), iterations=3)
    # The first is the largest and does not fit (60 of 30): it is skipped, not stopped at.
    assert set(found.names) == {"p1", "p3"}
    assert len(found.observed[0]) == len(truth)
    assert len(found.sensitivities) == len(found.observed) == 3


def test_ties_are_broken_by_name():
    for names in ("dbca", "acbd"):
        found = chosen([10] * 4, lambda rest: ([1.0] * len(rest), 1.0), gamma=0.5, names=names)
        assert found.names == ("d", "c")


def test_rounding_of_what_stays_frozen_ends_at_the_largest():
    """0.3 of ten numbers is 3.0000000000000004 in floating point: more than the three that are
    left."""
    order = [partition(name, 1) for name in "abc"]
    assert _last_frozen(order, (1 - 0.7) * 10).name == "c"
    found = [_last_frozen(order, numbers).name for numbers in (0.5, 1, 1.5, 2, 3)]
    assert "".join(found) == "aabbc"


def test_more_noise_chooses_worse_as_lemma_6_says():
    """Planted truth: three of twelve matter. The share found falls as the standard deviation of
    lemma 6 nears their gap."""
    truth = np.array([3.0] * 3 + [1.0] * 9)

    def found(sigma):
        hits = 0
        for seed in range(4):
            noise = np.random.default_rng(seed)

            def observe(rest, noise=noise):
                return [0.02 * truth[i] + sigma * 0.01 * noise.normal() for i in rest], 0.01

            picked = chosen([10] * 12, observe, gamma=0.25, iterations=3, rate=0.02, sigma=sigma)
            hits += len({"p0", "p1", "p2"} & set(picked.names))
        return hits / 12

    # One iteration's deviation of v is sigma * 0.01 / 0.02 = sigma / 2, beside a gap of 2.
    little, more, most = (found(sigma) for sigma in (0.2, 2.0, 20.0))
    assert little == 1.0
    assert most < 0.6
    assert little >= more >= most


def test_a_budget_that_no_partition_fits_is_refused():
    with pytest.raises(
        InvalidArgumentError,
        match="`unfreeze_ratio` to leave room.*smallest partition, 'p1' with 40",
    ):
        chosen([60, 40], lambda rest: ([1.0] * len(rest), 1.0))
