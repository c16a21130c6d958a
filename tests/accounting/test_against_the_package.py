"""What is computed for all orders or points at once is what dp-accounting computes one by one.

Its private fields are read in one module, and are named as they are today.
"""

import functools
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy.stats import binom

from hf_dp.accounting import grid, one_step, rdp
from hf_dp.accounting.events import TruncatedPoissonSampledGaussian
from hf_dp.accounting.rdp import ORDERS, RANGE

# -- Renyi divergences --

# (noise multiplier, sample rate); the last leaves out orders whose series do not converge
CURVES = [
    (1.0, 0.01), (0.3, 1e-5), (0.3, 0.999), (100.0, 0.3), (RANGE.min_noise_multiplier, 0.5),
    (RANGE.max_noise_multiplier, RANGE.min_sample_rate), (30.0, 0.5),
]  # fmt: skip


def difference_of_moments(sigma: float, rate: float) -> float:
    """Between the logarithms of our moments and theirs, relative where they are large; infinity
    where only one of the two converges."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # of series that do not converge
    ours = rdp.log_moments(sigma, rate)
    theirs = np.array([google_rdp._compute_log_a(rate, sigma, order) for order in ORDERS])
    finite = np.isfinite(theirs)
    if (np.isfinite(ours) != finite).any():
        return math.inf
    ours, theirs = ours[finite], theirs[finite]
    return float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))).max())


@pytest.mark.parametrize(("sigma", "rate"), CURVES)
def test_the_moments_of_a_step(sigma, rate):
    assert difference_of_moments(sigma, rate) < 1e-14


def test_series_that_do_not_converge_are_left_out():
    found = rdp.log_moments(*CURVES[-1])
    assert {order for order, moment in zip(ORDERS, found) if math.isinf(moment)} < {
        order for order in ORDERS if not order.is_integer()
    }
    assert np.isinf(found).any()


@pytest.mark.parametrize(("name", "wrong"), [("_NEGLIGIBLE", 10.0), ("MOST_TERMS", 10)])
def test_planted_errors_of_the_moments_are_seen(name, wrong, monkeypatch):
    monkeypatch.setattr(rdp, "_FEW_TERMS", 10)
    assert difference_of_moments(1.0, 0.5) < 1e-14
    monkeypatch.setattr(rdp, name, wrong)
    assert difference_of_moments(1.0, 0.5) > 1e-9


# -- one step --


@functools.cache
def by_the_package(sigma: float, rate: float, interval: float, relation: str, *cut: int):
    options = {
        "value_discretization_interval": interval,
        "neighboring_relation": NeighboringRelation[RELATIONS[relation]],
    }
    if cut:
        return google_pld.from_truncated_subsampled_gaussian_mechanism(
            cut[0], rate, cut[1], sigma, **options
        )
    return google_pld.from_gaussian_mechanism(sigma, sampling_prob=rate, **options)


def difference_of_steps(
    sigma: float, rate: float, interval: float, relation: str = "zero_out", *cut: int
) -> float:
    """Between ours and theirs, over all points of both directions and the infinite loss.

    In units of the rounding of a delta, which connect-the-dots divides by the interval.
    """
    if cut:
        event = TruncatedPoissonSampledGaussian(sigma, rate, 1, *cut)
        ours = one_step.truncated_gaussian(event, interval, relation)
    else:
        ours = one_step.sampled_gaussian(sigma, rate, interval, relation)
    theirs = by_the_package(sigma, rate, interval, relation, *cut)
    found = []
    for pair in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        mine, other = (pmf.to_dense_pmf() for pmf in pair)
        assert mine._discretization == other._discretization == interval
        assert mine._pessimistic_estimate and other._pessimistic_estimate
        assert mine._lower_loss == other._lower_loss and mine.size == other.size
        found.append(np.abs(np.asarray(mine._probs) - np.asarray(other._probs)).max())
        found.append(abs(mine._infinity_mass - other._infinity_mass))
    assert ours._symmetric is theirs._symmetric
    return float(max(found)) / (np.finfo(float).eps / interval)


RELATIONS = {"zero_out": "REPLACE_SPECIAL", "replace_one": "REPLACE_ONE"}
ROUNDINGS = 4
STEPS = [
    (1.0, 0.2, 1e-3),
    (0.3, 1e-5, 1e-3),
    (0.3, 0.999, 1e-3),
    (0.6, 0.01, 1e-3),
    (1.0, 0.5, 1e-3),
    (2.0, 0.002, 1e-5),
    (100.0, 0.3, 1e-5),
    (100.0, 1e-5, 1e-5),
    (1.0, 1.0, 1e-3),
    *[(sigma, rate, 1e-3, "replace_one") for sigma, rate in [(1.0, 0.2), (0.3, 0.5), (1.0, 1.0)]],
    # examples, and how many of them a step takes
    (1.0, 0.2, 1e-3, "zero_out", 40, 8),
    (0.5, 0.01, 1e-3, "zero_out", 1000, 20),
    (1.0, 0.2, 1e-3, "replace_one", 40, 8),
    (1.0, 0.2, 1e-3, "zero_out", 40, 40),
]


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_the_packages(case):
    assert difference_of_steps(*case) < ROUNDINGS


# (At a rate of 1, its planted error makes two directions of one.)
@pytest.mark.parametrize("case", [*STEPS[:5], *STEPS[9:11], *STEPS[12:15]])
@pytest.mark.parametrize("planted", ["rate", "shift"])
def test_planted_errors_of_a_step_are_seen(case, planted, monkeypatch):
    original = one_step._deltas

    def wrong(step, epsilons):
        if planted == "shift":
            return original(step, epsilons + 1e-6)
        other = one_step.GaussianPrivacyLoss(
            step.standard_deviation,
            sampling_prob=step.sampling_prob * (1 - 1e-6),
            adjacency_type=step.adjacency_type,
        )
        return original(other, epsilons)

    monkeypatch.setattr(one_step, "_deltas", wrong)
    assert difference_of_steps(*case) > 10 * ROUNDINGS


def test_a_planted_error_of_a_cut_is_seen(monkeypatch):
    wrong = SimpleNamespace(sf=lambda *law: binom.sf(*law) * (1 - 1e-6))
    monkeypatch.setattr(one_step, "binom", wrong)
    assert difference_of_steps(1.0, 0.2, 1e-3, "zero_out", 40, 8) > 10 * ROUNDINGS


def test_a_grid_point_at_the_end_of_the_losses():
    """Where an example's step has lost its least possible loss, log(1 - q), or rounds to it."""
    rate = -np.expm1(-0.5)
    for adjacency in (one_step.AdjacencyType.REMOVE, one_step.AdjacencyType.ADD):
        step = one_step.GaussianPrivacyLoss(1.0, sampling_prob=rate, adjacency_type=adjacency)
        end = np.log1p(-rate) * (1 if adjacency == one_step.AdjacencyType.REMOVE else -1)
        near = np.array([end, np.nextafter(end, -1), np.nextafter(end, 1), end * (1 - 1e-13)])
        expected = [float(step.get_delta_for_epsilon(float(epsilon))) for epsilon in near]
        np.testing.assert_allclose(one_step._deltas(step, near), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sigma", "q", "rows"), [(1.0, 0.3, 2), (2.0, 0.05, 7), (0.8, 0.5, 3), (1.0, 0.001, 40)]
)
def test_a_step_of_a_users_rows_is_the_packages(sigma, q, rows):
    counts = np.arange(rows + 1)
    theirs = google_pld.from_mixture_gaussian_mechanism(
        sigma,
        counts.tolist(),
        binom.pmf(counts, rows, q).tolist(),
        value_discretization_interval=0.02,
    )
    ours = one_step.sampled_rows(sigma, q, rows, 0.02)
    for eps in np.linspace(0, 4, 9):
        assert ours.get_delta_for_epsilon(eps) == pytest.approx(
            theirs.get_delta_for_epsilon(eps), rel=1e-7, abs=1e-13
        )


# -- compositions and their epsilons --

# (noise multiplier, sample rate, steps, interval)
COMPOSED = [
    (1.0, 0.2, 4, 1e-3),
    (0.3, 1e-5, 10_000, 1e-3),
    (0.8, 0.0152, 198, 1e-4),
    (0.3, 0.999, 1, 1e-3),
    (100.0, 0.3, 5, 1e-5),
    (100.0, 1e-5, 1, 1e-4),
]


@pytest.mark.parametrize("case", COMPOSED)
def test_composed_distributions_and_their_epsilons_are_equal(case):
    """Up to rounding, of which the package's transforms have more."""
    sigma, rate, steps, interval = case
    one = one_step.sampled_gaussian(sigma, rate, interval)
    ours, theirs = grid.self_composed(one, steps), one.self_compose(steps)
    for pair in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        mine, other = pair
        assert (mine._lower_loss, mine.size) == (other._lower_loss, other.size)
        assert mine._infinity_mass == other._infinity_mass
        assert np.abs(mine._probs - other._probs).max() <= 1e-13
    for delta in (0.0125, 1e-5, 1e-8):
        # (The package adds up the interval, whose rounding the losses then have.)
        assert grid.epsilon_at(ours, delta) == pytest.approx(
            ours.get_epsilon_for_delta(delta), rel=1e-9, abs=1e-12
        )


def test_a_tail_is_that_of_the_binomial_distribution():
    """The package's transforms, which take a power of each coefficient, are 1.2e-12 off."""
    steps, p = 10**5, 1e-3
    one = pld_pmf.DensePLDPmf(1e-3, 0, np.array([1 - p, p]), 0.0, True)
    (found,) = grid.directions(grid.self_composed(google_pld.PrivacyLossDistribution(one), steps))
    lowest, _, probabilities, _ = grid.on_grid(found)
    exact = binom(steps, p).pmf(np.arange(len(probabilities)) + lowest)
    assert np.abs(probabilities - exact).max() <= 2e-14
    tail = exact < 1e-12
    assert tail.any() and abs(float((probabilities - exact)[tail].sum())) <= 1e-13


@pytest.mark.parametrize("symmetric", [True, False])
def test_epsilons_of_few_points_and_infinite_losses(symmetric):
    """Sparse distributions; infinite losses; losses whose exp(-loss) rounds to 0; none above 0."""
    for losses in ({0: 0.5, 3: 0.3}, {3: 0.3, 900: 0.5}, {-5: 0.6, -1: 0.2}, {2: 0.8}, {900: 0.8}):
        for infinite in (0.0, 0.2):
            pmf = google_pld.pld_pmf.create_pmf(losses, 1.0, infinite, True)
            loss = google_pld.PrivacyLossDistribution(*[pmf] * (1 if symmetric else 2))
            for delta in (0.01, 0.2, 0.25, 0.5, 0.9):
                found = grid.epsilon_at(loss, delta)
                assert found == pytest.approx(loss.get_epsilon_for_delta(delta), rel=1e-14)


def test_the_worse_direction_counts():
    strong, weak = (google_pld.pld_pmf.create_pmf({at: 1.0}, 1.0, 0.0, True) for at in (5, 1))
    for pair in ((strong, weak), (weak, strong)):
        loss = google_pld.PrivacyLossDistribution(*pair)
        assert grid.epsilon_at(loss, 0.1) == pytest.approx(5 + math.log(0.9))


# -- private fields --

FIELDS = ("_pmf_remove", "_pmf_add", "_symmetric", "_lower_loss", "_discretization", "_probs",
          "_infinity_mass", "_pessimistic_estimate", "_pld")  # fmt: skip
LOSS = google_pld.from_gaussian_mechanism(
    1.0, sampling_prob=0.1, value_discretization_interval=0.01
)
ACCOUNTANT = PLDAccountant(value_discretization_interval=0.01).compose(GaussianDpEvent(1.0))


@pytest.mark.parametrize("name", [*FIELDS, "_compute_rdp_repeat_and_select"])
def test_a_private_field_has_its_name(name):
    owners = (LOSS, LOSS._pmf_remove.to_dense_pmf(), ACCOUNTANT, google_rdp)
    assert any(hasattr(owner, name) for owner in owners), f"dp-accounting has no {name} any more"


def test_no_other_module_reads_one():
    folder = Path(grid.__file__).parent
    pattern = re.compile(rf"\w\.({'|'.join(FIELDS)})\b")
    readers = {path.name for path in folder.glob("*.py") if pattern.search(path.read_text())}
    assert readers == {"grid.py"}


def test_they_mean_what_they_meant():
    removal = grid.on_grid(grid.directions(LOSS)[0])
    assert removal.interval == 0.01 and len(grid.directions(LOSS)) == 2
    assert removal.probabilities.sum() + removal.infinite == pytest.approx(1.0)
    for value in (0.1, 0.5):
        above = removal.losses > value
        hidden = removal.probabilities[above] @ -np.expm1(value - removal.losses[above])
        delta = LOSS._pmf_remove.get_delta_for_epsilon(value)
        assert hidden + removal.infinite == pytest.approx(delta, rel=1e-9)
