"""Random allocation: the bound against Monte Carlo, quadrature and another package's bounds."""

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.special import ndtr

from hf_dp.accounting import (
    Gaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    allocation,
    calibrate_noise_multiplier,
    epsilon,
)
from hf_dp.accounting.grid import self_composed

# (noise multiplier, steps of an allocation, allocations)
ALL = [
    (sigma, *counts)
    for sigma in (0.5, 0.7, 1.0, 1.5, 3.0)
    for counts in ((2, 1), (5, 3), (20, 2), (60, 1))
]
FAST = {(0.5, 5, 3), (0.7, 2, 1), (1.0, 20, 2), (1.5, 60, 1)}
SETTINGS = [pytest.param(*each, marks=[] if each in FAST else [pytest.mark.slow]) for each in ALL]
SAMPLES = 100_000


def losses(sigma: float, steps: int, allocations: int) -> np.ndarray:
    """Privacy losses log(P / Q), (2, samples), drawn under P (with the example) and under Q."""
    random = np.random.default_rng(7)
    total = np.zeros((2, SAMPLES))
    for _ in range(allocations):
        outcomes = random.standard_normal((SAMPLES, steps))
        ratios = np.exp(outcomes / sigma - 1 / (2 * sigma**2))
        without = ratios.mean(1)
        # The example moves one outcome by 1 / sigma; in which step is all the same.
        with_it = without + ratios[:, 0] * math.expm1(1 / sigma**2) / steps
        total += np.log([with_it, without])
    return total


@pytest.mark.parametrize(("sigma", "steps", "allocations"), SETTINGS)
def test_the_bound_is_what_monte_carlo_finds(sigma, steps, allocations):
    """Of the two sides, six standard errors: one of 40 comparisons is beyond once in 10^7."""
    found = self_composed(allocation.allocated(sigma, steps, 1e-4), allocations)
    with_it, without = losses(sigma, steps, allocations)
    for direction, drawn in ((found._pmf_remove, with_it), (found._pmf_add, -without)):
        at = float(np.quantile(drawn, 0.98))
        lost = np.maximum(0.0, -np.expm1(at - drawn))
        delta = direction.get_delta_for_epsilon(at)
        assert 1e-4 < delta < 0.05
        assert abs(delta - lost.mean()) < 6 * lost.std() / math.sqrt(SAMPLES) + 1e-3 * delta


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5, 20, 66])
@pytest.mark.parametrize("sigma", [0.45, 0.6, 1.0, 3.0])
def test_far_into_the_tail_by_importance_sampling(sigma, steps):
    """Outcomes are drawn farther out than P's and weighted back: deltas down to 10^-7.

    Monte Carlo may miss what its samples do not reach, so it only bounds from below.
    """
    random, mu = np.random.default_rng(3), 1 / sigma
    found = allocation.allocated(sigma, steps, 1e-4)._pmf_remove
    for shift in (2.0, 3.5, 4.5):
        outcomes = random.standard_normal((2 * SAMPLES, steps))
        outcomes[:, 0] += mu + shift
        weights = np.exp(-shift * (outcomes[:, 0] - mu) + shift**2 / 2)
        drawn = np.log(np.exp(mu * outcomes - mu * mu / 2).mean(1))
        at = float(np.median(drawn))
        lost = weights * np.maximum(0.0, -np.expm1(at - drawn))
        error = lost.std() / math.sqrt(len(lost))
        assert found.get_delta_for_epsilon(at) > lost.mean() - 6 * error


def exact_delta(sigma: float, epsilon: float) -> float:
    """P(A) - exp(epsilon) Q(A) for one of two steps, by quadrature over the outcome of the first.

    Given it, the loss is above epsilon exactly above some outcome of the second.
    """
    mu = 1 / sigma

    def density(y: float) -> float:
        left = 2 * math.exp(epsilon) - math.exp(mu * y - mu * mu / 2)
        z = (math.log(left) + mu * mu / 2) / mu if left > 0 else -math.inf
        here, there = np.exp(-(y**2) / 2), np.exp(-((y - mu) ** 2) / 2)
        with_it = (there * ndtr(-z) + here * ndtr(mu - z)) / 2
        return float(with_it - math.exp(epsilon) * here * ndtr(-z)) / math.sqrt(2 * math.pi)

    bend = (math.log(2 * math.exp(epsilon)) + mu * mu / 2) / mu
    value, _ = integrate.quad(density, -12, mu + 12, points=[bend], limit=400, epsabs=1e-14)
    return value


@pytest.mark.parametrize("sigma", [0.6, 1.0, 2.0])
def test_two_steps_by_quadrature(sigma):
    """Far into the tail, where Monte Carlo sees nothing."""
    found = allocation.allocated(sigma, 2, 1e-4)._pmf_remove
    for loss in (0.2, 1.0, 2.0, 4.0):
        exact = exact_delta(sigma, loss)
        if exact > 1e-9:
            assert exact <= found.get_delta_for_epsilon(loss) <= 1.005 * exact + 2e-9


def test_moving_weight_without_its_mean_is_no_bound(monkeypatch):
    """A planted bug: W is moved to the point below."""

    def lower(mu, points, beyond=True):
        kept, every = np.zeros(len(points)), max(1, len(points) // 5000)
        z = np.log(np.maximum(points[::every], 1e-300)) / mu + mu / 2
        kept[::every] = np.append(np.diff(ndtr(z)), ndtr(-z[-1]) if beyond else 0.0)
        return kept

    monkeypatch.setattr(allocation, "_lognormal", lower)
    wrong = allocation.allocated(1.0, 2, 1e-4)._pmf_remove
    assert wrong.get_delta_for_epsilon(1.0) < exact_delta(1.0, 1.0)


@pytest.mark.parametrize(
    ("sigma", "above", "below"),
    [(0.82543, 2.11644, 2.19997), pytest.param(0.5803, 5.77794, 5.84935, marks=pytest.mark.slow)],
)
def test_between_the_bounds_of_another_package(sigma, above, below):
    """PLD-accounting 2.0, ``gaussian_allocation_epsilon_range``, SST-2: 3 epochs of 66 steps."""
    assert above <= epsilon(RandomAllocationGaussian(sigma, 66, 198), 1 / 134698).value <= below


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 2), (2.0, 300), (4.0, 10)])
def test_it_costs_at_most_what_no_sampling_costs(sigma, steps):
    """One Gaussian an epoch, with all that is secret known; and some of it is worth something."""
    allocated = epsilon(RandomAllocationGaussian(sigma, steps, 2 * steps), 1e-5).value
    assert allocated < epsilon(Gaussian(sigma, 2), 1e-5).value


def test_less_noise_and_more_allocations_cost_more():
    of = [epsilon(RandomAllocationGaussian(s, 30, 60), 1e-5).value for s in (4.0, 2.0, 1.5)]
    assert of == sorted(of)
    of = [epsilon(RandomAllocationGaussian(2.0, 30, 30 * n), 1e-5).value for n in (1, 2, 5)]
    assert of == sorted(of)


def test_it_composes_with_other_events():
    allocated, poisson = RandomAllocationGaussian(1.0, 30, 60), PoissonSampledGaussian(1.0, 0.1, 9)
    together = epsilon((allocated, poisson), 1e-5).value
    alone = [epsilon(event, 1e-5).value for event in (allocated, poisson)]
    assert max(alone) < together < sum(alone)
    split = (RandomAllocationGaussian(1.0, 30, 30), RandomAllocationGaussian(1.0, 30, 30))
    assert epsilon(split, 1e-5).value == epsilon(allocated, 1e-5).value


def test_calibration_finds_its_noise():
    def event(sigma: float, steps: int) -> RandomAllocationGaussian:
        return RandomAllocationGaussian(sigma, 8, steps)

    sigma = calibrate_noise_multiplier(1.0, 1e-5, 1 / 8, 16, event=event)
    assert 0.999 < epsilon(event(sigma, 16), 1e-5).value <= 1
    assert sigma < calibrate_noise_multiplier(1.0, 1e-5, 1 / 8, 16)
