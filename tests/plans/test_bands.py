"""Banded noise on paper: C against dense matrices, classes, draws, and the event against the exact
privacy of tiny runs, by integrals over all of their outcomes. With planted bugs."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from banded import matrix
from dp_accounting import dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import stats

from hf_dp.accounting import (
    BandedGaussian,
    Ledger,
    PoissonSampledGaussian,
    TruncatedBandedGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedEventError,
)
from hf_dp.plans import PrivacyPlan, bands
from hf_dp.plans.bands import BandedSampler, classes, square_root_column
from hf_dp.plans.samplers import Share
from hf_dp.plans.weighing import best, weigh

REJECT = 1e-9


# -- C --


@pytest.mark.parametrize(("width", "steps"), [(2, 7), (8, 197), (16, 40)])
def test_the_column_is_the_square_root_of_prefix_sums_cut_and_of_norm_one(width, steps):
    whole = matrix(square_root_column(steps), steps)
    prefix_sums = whole @ whole
    np.testing.assert_allclose(prefix_sums / prefix_sums[0, 0], np.tri(steps), atol=1e-12)
    column = square_root_column(width)
    np.testing.assert_allclose(np.divide(column, column[0]), whole[:width, 0] / whole[0, 0])
    assert 1 - 1e-12 < sum(Fraction(number) ** 2 for number in column) <= 1


@pytest.mark.parametrize("width", [1, 2, 8])
def test_what_is_left_in_sums_is_that_of_the_dense_inverse(width):
    steps, column = 50, square_root_column(width)
    inverse = np.linalg.inv(matrix(column, steps))
    weights = np.linspace(1, 0.1, steps) ** 2
    assert bands.noise_of_sum(column, weights) == pytest.approx(np.linalg.norm(weights @ inverse))
    of_prefixes = np.linalg.norm(np.tri(steps) @ inverse, axis=1)
    assert bands.noise_of_prefixes(column, steps) == pytest.approx(of_prefixes)
    assert bands.noise_of_steps(column, steps) == pytest.approx(np.linalg.norm(inverse, axis=1))


def planned(width=None, **changes):
    given = {"num_examples": 4000, "expected_batch_size": 100, "clipping_norm": 0.1}
    given |= {"max_steps": 40, "target_epsilon": 3.0, "accountant": "rdp", **changes}
    return PrivacyPlan.create(**given, **({} if width is None else {"bands": width}))


def test_the_comparison_is_that_of_the_dense_matrices_at_equal_epsilon():
    """The error that is compared is that of the weights: here, the plain sum over all steps."""
    plain, banded = weigh(planned, lambda steps: [1.0] * steps, (8, 80))  # 80: too many
    assert (plain.bands, banded.bands) == (1, 8)
    assert (plain.weights, plain.sums, plain.step, plain.resumed) == pytest.approx((1, 1, 1, 1))
    sigma = banded.plan.noise_multiplier / plain.plan.noise_multiplier
    assert (
        1 < sigma < 3 and 2.9 < epsilon(banded.plan.events(), banded.plan.delta, "rdp").value <= 3
    )
    column, ones = square_root_column(8), np.ones(40)
    inverse = np.linalg.inv(matrix(column, 40))
    assert banded.weights == pytest.approx(sigma * np.linalg.norm(ones @ inverse) / 40**0.5)
    assert banded.step == pytest.approx(sigma * np.linalg.norm(inverse) / 40**0.5)
    inverse[20:, :20] = 0  # a block of 20 steps, and another
    resumed = np.linalg.norm(ones @ inverse) / 40**0.5
    assert banded.resumed == pytest.approx(sigma * resumed) and banded.resumed > banded.weights
    assert best([plain, banded]) is (banded if banded.weights < 1 else plain)
    assert [one.bands for one in weigh(planned, lambda steps: [1.0] * steps, (80, 99))] == [1]


# -- classes and draws --


def mixed(number: int) -> int:
    """SplitMix64's output of this number, from 0 on, at seed 0."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize(("count", "width"), [(40, 3), (64, 8), (7, 7), (5, 8)])
def test_the_class_of_a_place_is_fixed_for_good(count, width):
    assert mixed(0) == 0xE220A8397B1DCDAF  # the reference implementation's
    found = classes(count, width)
    assert len(found) == -(-count // width) * width
    for start in range(0, len(found), width):
        keys = [mixed(start + offset) for offset in range(width)]
        expected = sorted(range(width), key=keys.__getitem__)
        assert found[start : start + width].tolist() == expected
    assert (classes(count + 100, width)[: len(found)] == found).all()  # of no other place


def test_each_class_has_rows_of_each_label_and_each_process_rows_of_each_class():
    found = classes(8000, 8)
    for label in np.split(found, 4):  # rows that are sorted by label
        assert (np.bincount(label, minlength=8) == 250).all()
    for rank in range(8):
        counts = np.bincount(found[rank::8], minlength=8)
        assert stats.chisquare(counts).pvalue > REJECT and counts.min() > 80


def sampler(width=3, rate=0.3, count=31, steps=600, **changes) -> BandedSampler:
    return BandedSampler(count, rate, steps, bands=width, **changes)


def are_draws_of_their_classes(made: BandedSampler, first: int = 0) -> bool:
    """Whether each draw is of the class of its step, at the sampler's rate."""
    of_place, drawn = classes(made.num_examples, made.bands), np.zeros((made.bands, 40))
    steps = np.zeros(made.bands)
    for number, draw in enumerate(made, first):
        expected = number % made.bands
        if draw.step != number or any(of_place[place] != expected for place in draw):
            return False
        drawn[expected, draw] += 1
        steps[expected] += 1
    in_class = of_place[: made.num_examples]
    counts = drawn[in_class, np.arange(made.num_examples)]
    law = stats.binom(steps[in_class], made.sample_rate)
    tails = 2 * np.minimum(law.cdf(counts), law.sf(counts - 1))
    return bool(tails.min() > REJECT)


@pytest.mark.parametrize("first", [0, 4])
def test_a_draw_is_of_its_steps_class_at_its_rate(first):
    assert are_draws_of_their_classes(sampler(begin=lambda: first), first)


def test_planted_draws_are_seen(monkeypatch):
    made = sampler(begin=lambda: 4)
    assert not are_draws_of_their_classes(made, 5)
    honest = BandedSampler.drawn_from
    everyone = lambda self, examples: honest(self, np.arange(self.num_examples))  # noqa: E731
    monkeypatch.setattr(BandedSampler, "drawn_from", everyone)
    assert not are_draws_of_their_classes(made, 4)


def test_processes_share_one_draw_and_a_draw_without_a_step_is_refused():
    parts = [set(), set()]
    for rank in range(2):
        for draw in sampler(rate=1.0, steps=3, share=Share(rank, 2)):
            assert all(place % 2 == rank for place in draw)
            parts[rank] |= {*draw}
    assert parts[0] | parts[1] == {*range(31)}
    with pytest.raises(ConfigError, match="step to draw for"):
        sampler().draw()


# -- the event --


def test_steps_cost_what_those_of_the_busiest_class_do():
    event = BandedGaussian(1.3, 0.12, 197, 8)
    assert event.canonical() == (PoissonSampledGaussian(1.3, 0.12, 25),)
    theirs = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    theirs.compose(dp_event.PoissonSampledDpEvent(0.12, dp_event.GaussianDpEvent(1.3)), count=25)
    low = theirs.get_epsilon(1e-5)
    assert low - 1e-3 <= epsilon(event, 1e-5).value <= low + 2e-3
    cut = TruncatedBandedGaussian(1.3, 0.12, 17, 8, 1000, 130)
    assert cut.canonical() == (TruncatedPoissonSampledGaussian(1.3, 0.12, 3, 1000, 130),)
    (with_loss,) = BandedGaussian(3.0, 0.12, 8, 8, beside={"loss": 4.0}).canonical()
    assert with_loss.noise_multiplier == pytest.approx(2.4) and with_loss.steps == 1


def test_what_is_claimed_of_neighbors_and_of_other_runs():
    event = BandedGaussian(1.3, 0.12, 4, 8)
    with pytest.raises(UnsupportedEventError, match="does not hold for BandedGaussian"):
        epsilon(event, 1e-5, relation="add_remove")
    assert epsilon(event, 1e-5, relation="replace_one").value > epsilon(event, 1e-5).value
    # Both runs begin with class 0: 2 steps of it, and not 1 as 8 steps of one run have.
    both, own = Ledger(), Ledger()
    for _ in range(2):
        both.append(event, "earlier run")
    for _ in range(4):
        own.append(BandedGaussian(1.3, 0.12, 1, 8), "training")
    twice = epsilon(PoissonSampledGaussian(1.3, 0.12, 2), 1e-5)
    for joined in (both, Ledger.from_list(own.to_list() + own.to_list())):
        joined = Ledger.from_list(joined.to_list())
        assert joined.events == (event, event) and joined.epsilon(1e-5) == twice
    assert own.events == (event,) and own.epsilon(1e-5) == epsilon(event, 1e-5)


def delta(present: dict, absent: dict, sigma: float, epsilons) -> list[float]:
    """The exact delta of mixtures of Gaussians in R^T against each other, the larger of both
    directions, by summing over a grid. Args: the probability of each mean."""
    steps = len(next(iter(present)))
    axis = np.arange(-6 * sigma - 2, 6 * sigma + 2, 0.2 * sigma)
    grid = np.meshgrid(*[axis] * steps, indexing="ij")

    def density(law):
        total = np.zeros_like(grid[0])
        for mean, weight in law.items():
            square = sum((g - m) ** 2 for g, m in zip(grid, mean, strict=True))
            total += weight * np.exp(-square / (2 * sigma**2))
        return total / total.sum()

    p, q = density(present), density(absent)
    ways = [(p, q), (q, p)]
    return [max(np.clip(a - np.exp(e) * b, 0, None).sum() for a, b in ways) for e in epsilons]


def exact(column, of_class, rate, sigma, epsilons) -> list[float]:
    """Of an example that joins each of these steps of a run, in the outcomes C G + z."""
    steps, law = 3, {}
    for joins in itertools.product((0, 1), repeat=len(of_class)):
        g = np.zeros(steps)
        g[of_class] = joins
        mean = tuple(matrix(column, steps) @ g)
        law[mean] = law.get(mean, 0) + rate ** sum(joins) * (1 - rate) ** (len(joins) - sum(joins))
    return delta(law, {(0.0,) * steps: 1.0}, sigma, epsilons)


def test_the_epsilon_is_that_of_all_outcomes_of_a_tiny_run():
    """Three steps, two bands; the example is of class 0, steps 0 and 2."""
    sigma, rate, column = 1.1, 0.4, square_root_column(2)
    claimed = epsilon(BandedGaussian(sigma, rate, 3, 2), 1e-3).value
    assert exact(column, [0, 2], rate, sigma, [claimed])[0] <= 1e-3
    # Of two whole columns it would be exact; the last one is cut, so a little less is true, too.
    assert exact(column, [0, 2], rate, sigma, [0.75 * claimed])[0] > 1e-3
    # Planted: columns above norm 1; a draw of class 0 in the step after; one more step of it.
    assert exact(np.multiply(column, 1.5), [0, 2], rate, sigma, [claimed])[0] > 1e-3
    assert exact(column, [0, 1], rate, sigma, [claimed])[0] > 1e-3
    assert exact(column, [0, 1, 2], rate, sigma, [claimed])[0] > 1e-3


def test_the_epsilon_of_truncated_draws_is_that_of_all_outcomes_of_a_tiny_run():
    """Two steps, two bands; class 0 is the example and another one, of which one is kept. If it is
    drawn, it may push out the other, whose gradient is the opposite."""
    sigma, rate, column = 1.6, 0.5, square_root_column(2)
    alone, both = rate * (1 - rate), rate**2
    laws = []
    for own in (1.0, 0.0):  # the example, or nothing in its place
        law: dict = {}
        kept = [(own, alone + both / 2), (-1.0, alone + both / 2), (0.0, (1 - rate) ** 2)]
        for value, weight in kept:
            mean = tuple(matrix(column, 2) @ np.array([value, 0.0]))
            law[mean] = law.get(mean, 0) + weight
        laws.append(law)
    event = TruncatedBandedGaussian(sigma, rate, 2, 2, 2, 1)
    claimed = epsilon(event, 1e-3).value
    assert delta(*laws, sigma, [claimed])[0] <= 1e-3
    assert delta(*laws, sigma, [claimed / 4])[0] > 1e-3


# -- plans --


def test_a_plan_draws_and_accounts_the_same():
    fixed = {"noise_multiplier": 1.0, "target_epsilon": None, "accountant": "pld"}
    plan = planned(8, max_batch_size=130, **fixed)
    assert plan.sample_rate == plan.sampler().sample_rate == plan.event().sample_rate == 0.2
    assert plan.event() == TruncatedBandedGaussian(plan.noise_multiplier, 0.2, 40, 8, 500, 130)
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert plan.event(1).correlated_steps == len(plan.mechanism.draw.noise_column) == 8
    assert "one of 8 parts" in plan.words.sampling and "130 rows" in plan.words.sampling
    assert "correlated over steps" in plan.words.mechanism
    assert "ceil(steps / 8) steps of each part" in plan.words.proof
    assert (
        plan.words.sampling_code == "banded" and "depends on no other's" in plan.words.conditions[0]
    )
    assert "correlated" not in planned(**fixed).words.mechanism


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"bands": 41}, InvalidArgumentError, r"`bands` to be at most N / expected_batch_size \(40"),
        ({"bands": 8, "max_steps": 7}, InvalidArgumentError, r"at most the steps of the run \(7"),
        ({"bands": 1}, InvalidArgumentError, "bands"),
        ({"bands": 8, "sampling": "random_allocation"}, UnsupportedArgumentError, "are implemented"),
        ({"bands": 8, "mean_runs": 3.0, "accountant": "rdp"}, UnsupportedArgumentError, "not impl"),
        ({"bands": 8, "max_batch_size": 99}, InvalidArgumentError, "max_logical_batch_size"),
    ],
)  # fmt: skip
def test_what_bands_do_not_go_with_is_named(changes, error, said):
    given = {"noise_multiplier": 1.0, "target_epsilon": None, "accountant": "pld", **changes}
    with pytest.raises(error, match=said):
        planned(**given)
