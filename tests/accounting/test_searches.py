"""The bound for the best of a random number of runs, against the exact distribution of the best."""

from __future__ import annotations

import pytest
from scipy.integrate import quad
from scipy.stats import norm

from hf_dp.accounting import BestOfRandomRuns, Gaussian, Ledger, epsilon
from hf_dp.accounting.ledger import EARLIER, TRAINING

DELTA = 1e-4


def exact_delta(sigma: float, mean: float, eps: float) -> float:
    """The hockey-stick divergence of the largest of K outputs, K geometric, where one output is
    N(1, sigma^2) with the record and N(0, sigma^2) without; the score is the output itself.

    The largest of K has the distribution function E F^K = p F / (1 - (1 - p) F), p = 1 / mean, and
    so the density p f / (1 - (1 - p) F)^2.
    """
    p = 1 / mean

    def density(x: float, center: float) -> float:
        below = norm.cdf(x, center, sigma)
        return p * norm.pdf(x, center, sigma) / (1 - (1 - p) * below) ** 2

    def excess(x: float, one: float, other: float) -> float:
        return max(0.0, density(x, one) - 2.718281828459045**eps * density(x, other))

    low, high = -12 * sigma, 1 + 12 * sigma
    return max(
        quad(excess, low, high, args=pair, limit=400, points=[0, 1])[0] for pair in ((1, 0), (0, 1))
    )


@pytest.mark.parametrize("mean", [1.5, 3, 10, 100])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_the_bound_holds_for_the_exact_best_of_random_runs(sigma, mean):
    run = Gaussian(sigma, 1)
    bound = epsilon(BestOfRandomRuns((run,), mean), DELTA, "rdp").value
    assert exact_delta(sigma, mean, bound) <= DELTA


def test_what_one_run_costs_is_too_little_for_a_search():
    """The planted bug: the best is released, and only its own run is counted."""
    one = epsilon(Gaussian(1.0, 1), DELTA, "pld").value
    assert exact_delta(1.0, 10, one) > 1.2 * DELTA


def test_a_run_goes_on_with_its_own_search_and_no_other():
    step = BestOfRandomRuns((Gaussian(2.0, 1),), 5)
    ledger = Ledger()
    for _ in range(3):
        ledger.append(step, TRAINING)
    (entry,) = ledger.entries
    assert entry.event == step.with_steps(3) and ledger.steps(TRAINING) == 3
    for _ in range(2):
        ledger.append(step.with_steps(3), EARLIER)
    assert len(ledger.entries) == 3
    assert Ledger.from_list(ledger.to_list()) == ledger
    assert ledger.extends(Ledger.from_list(ledger.to_list()))
    assert ledger.epsilon(DELTA, "rdp") == epsilon([step.with_steps(3)] * 3, DELTA, "rdp")
    # Two searches of three steps cost more than one of six.
    assert (
        epsilon([step.with_steps(3)] * 2, DELTA, "rdp").value
        > epsilon(step.with_steps(6), DELTA, "rdp").value
    )


def test_an_earlier_search_may_be_the_last_entry_of_a_checkpoint():
    ledger, step = Ledger(), BestOfRandomRuns((Gaussian(2.0, 4),), 5)
    ledger.append(step, EARLIER)
    longer = Ledger.from_list(ledger.to_list())
    longer.append(Gaussian(1.0, 1), TRAINING)
    assert ledger.extends(ledger) and longer.extends(ledger) and not ledger.extends(longer)
