"""Banded noise on paper: C against dense matrices, classes, draws, and the event against the exact
privacy of tiny runs, by integrals over all of their outcomes. With planted bugs."""

import itertools
from fractions import Fraction

import numpy as np
import oracle
import pytest
from banded import classes, matrix
from scipy import stats

from hf_dp.accounting import Ledger, epsilon
from hf_dp.accounting.events import (
    BandedGaussian,
    PoissonSampledGaussian,
    TruncatedBandedGaussian,
    TruncatedPoissonSampledGaussian,
)
from hf_dp.cli.recipes import PlannedArguments
from hf_dp.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedEventError,
)
from hf_dp.plans import PrivacyPlan, bands
from hf_dp.plans.bands import BandedSampler, square_root_column
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.trainer.privacy_arguments import plan_of
from hf_dp.trainer.weighing import weigh

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
    column, weights = square_root_column(width), np.linspace(1, 0.1, 50) ** 2
    inverse = np.linalg.inv(matrix(column, 50))
    assert bands.noise_of_sum(column, weights) == pytest.approx(np.linalg.norm(weights @ inverse))
    assert bands.noise_of_steps(column, 50) == pytest.approx(np.linalg.norm(inverse, axis=1))


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
    assert 2.9 < epsilon(banded.plan.events(), banded.plan.delta, "rdp").value <= 3
    inverse, of = np.linalg.inv(matrix(square_root_column(8), 40)), np.linalg.norm
    cut = inverse.copy()
    cut[20:, :20] = 0  # a block of 20 steps, and another
    ones, tri = np.ones(40), np.tri(40)
    weights, resumed, step = (of(each) / 40**0.5 for each in (ones @ inverse, ones @ cut, inverse))
    expected = sigma * np.array([weights, of(tri @ inverse) / of(tri), step, resumed])
    found = (banded.weights, banded.sums, banded.step, banded.resumed)
    assert found == pytest.approx(expected) and banded.resumed > banded.weights
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


def are_draws_of_their_classes(made: BandedSampler, first: int) -> bool:
    """Return whether each draw, from this step on, is of the class of its step, at the sampler's rate."""
    joined = np.array([np.isin(np.arange(made.num_examples), draw) for draw in made])
    turns = np.arange(first, first + len(joined)) % made.bands
    own = turns[:, None] == classes(made.num_examples, made.bands)[: made.num_examples]
    law, counts = stats.binom(own.sum(0), made.sample_rate), joined.sum(0)
    tails = 2 * np.minimum(law.cdf(counts), law.sf(counts - 1))
    return not (joined & ~own).any() and bool(tails.min() > REJECT)


def test_a_draw_is_of_its_steps_class_at_its_rate(monkeypatch):
    assert are_draws_of_their_classes(sampler(), 0)
    assert are_draws_of_their_classes(sampler(first=4), 4)
    assert not are_draws_of_their_classes(sampler(first=4), 5)  # planted
    honest = bands.member
    monkeypatch.setattr(bands, "member", lambda block, k, b: honest(block, (k + block) % b, b))
    assert not are_draws_of_their_classes(sampler(first=4), 4)


def test_draws_are_cut_and_those_of_a_step():
    assert sorted(sum(sampler(rate=1.0, steps=3), [])) == [*range(31)]
    cut = [*sampler(rate=0.5, max_batch_size=4)]
    assert max(map(len, cut)) == 4
    assert all(classes(31, 3)[place] == n % 3 for n, draw in enumerate(cut) for place in draw)
    with pytest.raises(ConfigError, match="step to draw for"):
        sampler().draw()
    numbered = [*bands.InTurn(sampler(steps=3), iter, lambda: 4)]
    assert [draw.step for draw in numbered] == [4, 5, 6]
    assert all(classes(31, 3)[place] == draw.step % 3 for draw in numbered for place in draw)
    with pytest.raises(ValueError, match="shorter"):  # a loader that loses a draw
        list(bands.InTurn(sampler(steps=3), lambda draws: [*draws][1:], lambda: 4))


# -- the event --


def test_steps_cost_what_those_of_the_busiest_class_do():
    event = BandedGaussian(1.3, 0.12, 197, 8)
    assert event.canonical() == (PoissonSampledGaussian(1.3, 0.12, 25),)
    low = oracle.epsilon([(1.3, 0.12, 25)], 1e-5)
    assert low - 1e-3 <= epsilon(event, 1e-5).value <= low + 2e-3
    cut = TruncatedBandedGaussian(1.3, 0.12, 17, 8, 1000, 130)
    assert cut.canonical() == (TruncatedPoissonSampledGaussian(1.3, 0.12, 3, 1000, 130),)
    (with_loss,) = BandedGaussian(3.0, 0.12, 8, 8, beside={"loss": 4.0}).canonical()
    assert with_loss.noise_multiplier == pytest.approx(2.4) and with_loss.steps == 1


@pytest.mark.parametrize(
    ("bands", "formula"),
    [(2, "(z_t - c_1 x_(t-1)) / c_0"), (8, "(z_t - c_1 x_(t-1) - ... - c_7 x_(t-7)) / c_0")],
)
def test_a_card_has_the_formula_of_the_noise(bands, formula):
    args = PlannedArguments(
        noise_multiplier=1, expected_batch_size=8, max_steps=16, bands=bands, learning_rate=1e-3
    )
    assert f"x_t = {formula}, with" in plan_of(args, 800, None).words.mechanism


def test_what_is_claimed_of_neighbors_and_of_other_runs():
    event = BandedGaussian(1.3, 0.12, 4, 8)
    with pytest.raises(UnsupportedEventError, match="does not hold for BandedGaussian"):
        epsilon(event, 1e-5, relation="add_remove")
    assert epsilon(event, 1e-5, relation="replace_one").value > epsilon(event, 1e-5).value
    # Both runs begin with class 0: 2 steps of it, and not 1 as 8 steps of one run have.
    both, own = Ledger(), Ledger()
    for number in range(4):
        own.append(BandedGaussian(1.3, 0.12, 1, 8), "training")
        if number < 2:
            both.append(event, "earlier run")
    for joined in (both, Ledger.from_list(own.to_list() * 2)):
        joined = Ledger.from_list(joined.to_list())
        assert joined.events == (event, event) and own.events == (event,)
        assert joined.epsilon(1e-5) == epsilon(PoissonSampledGaussian(1.3, 0.12, 2), 1e-5)


def delta(present, absent, column, sigma: float, epsilon: float) -> float:
    """The exact delta of the outcomes C G + z under two laws of G, the larger of both directions, by
    summing over a grid. Args: present, absent: pairs of a G (T,) and its probability."""
    steps = len(present[0][0])
    axis = np.arange(-6 * sigma - 2, 6 * sigma + 2, 0.2 * sigma)
    grid = np.stack(np.meshgrid(*[axis] * steps, indexing="ij"), -1)

    def density(law):
        means = [(matrix(column, steps) @ np.array(g), weight) for g, weight in law]
        squares = ((((grid - mean) / sigma) ** 2).sum(-1) for mean, _ in means)
        total = sum(w * np.exp(-one / 2) for (_, w), one in zip(means, squares, strict=True))
        return total / total.sum()

    p, q = density(present), density(absent)
    return max(np.clip(a - np.exp(epsilon) * b, 0, None).sum() for a, b in ((p, q), (q, p)))


def test_the_epsilon_is_that_of_all_outcomes_of_a_tiny_run():
    """Three steps, two bands; the example is of class 0, steps 0 and 2."""
    sigma, rate, column = 1.1, 0.4, square_root_column(2)
    claimed = epsilon(BandedGaussian(sigma, rate, 3, 2), 1e-3).value

    def exact(its_steps, column=column, claimed=claimed):
        law = []
        for joins in itertools.product((0, 1), repeat=len(its_steps)):
            gradients = np.zeros(3)
            gradients[its_steps] = joins
            law.append((gradients, np.prod([rate if join else 1 - rate for join in joins])))
        return delta(law, [([0, 0, 0], 1.0)], column, sigma, claimed)

    assert exact([0, 2]) <= 1e-3
    # Of two whole columns it would be exact; the last one is cut, so a little less is true, too.
    assert exact([0, 2], claimed=0.75 * claimed) > 1e-3
    # Planted: columns above norm 1; a draw of class 0 in the step after; one more step of it.
    assert exact([0, 2], np.multiply(column, 1.5)) > 1e-3
    assert exact([0, 1]) > 1e-3 and exact([0, 1, 2]) > 1e-3


def test_the_epsilon_of_truncated_draws_is_that_of_all_outcomes_of_a_tiny_run():
    """Two steps, two bands; class 0 is the example and another one, of which one is kept. If it is
    drawn, it may push out the other, whose gradient is the opposite."""
    sigma, rate, column = 1.6, 0.5, square_root_column(2)
    kept = rate * (1 - rate) + rate**2 / 2
    present = [((1, 0), kept), ((-1, 0), kept), ((0, 0), (1 - rate) ** 2)]
    absent = [((-1, 0), kept), ((0, 0), 1 - kept)]  # nothing in its place
    claimed = epsilon(TruncatedBandedGaussian(sigma, rate, 2, 2, 2, 1), 1e-3).value
    assert delta(present, absent, column, sigma, claimed) <= 1e-3
    assert delta(present, absent, column, sigma, claimed / 4) > 1e-3


# -- plans --

FIXED = {"noise_multiplier": 1.0, "target_epsilon": None, "accountant": "pld"}


def test_a_plan_draws_and_accounts_the_same():
    plan, words = planned(8, max_batch_size=130, **FIXED), planned(8, **FIXED).words
    assert plan.sample_rate == plan.sampler().sample_rate == plan.event().sample_rate == 0.2
    assert plan.event() == TruncatedBandedGaussian(1.0, 0.2, 40, 8, 500, 130)
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert "one of 8 parts" in plan.words.sampling and "130 rows" in plan.words.sampling
    assert "correlated over steps" in words.mechanism and words.sampling_code == "banded"
    assert "ceil(steps / 8) steps of each part" in words.proof
    assert "depends on no other's" in words.conditions[0]
    assert "correlated" not in planned(**FIXED).words.mechanism


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
    with pytest.raises(error, match=said):
        planned(**{**FIXED, **changes})


@pytest.mark.parametrize("other", [{"clipping_quantile": 0.5}, {"gradient_scaling_beta": 0.9}])
def test_a_clipping_norm_that_changes_is_refused(other):
    with pytest.raises(UnsupportedArgumentError, match="`bands` .*unset with"):
        DpSgdPlan.of(1.0, 1.0, bands=2, **other)
