"""What must hold of every accountant whatever the numbers, drawn by hypothesis."""

import math

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.accounting import BOUNDS, Gaussian, PoissonSampledGaussian, epsilon
from hf_dp.errors import AccountingRangeError

FAST = ["rdp", "gdp_clt"]
noise = st.floats(0.5, 20)
rates = st.floats(math.log(1e-4), math.log(0.3)).map(math.exp)
steps = st.integers(1, 2000)
deltas = st.floats(math.log(1.01e-8), math.log(1e-3)).map(math.exp)
same = settings(deadline=None, derandomize=True)  # examples in each run
few = settings(same, max_examples=20)  # PLD takes half a second, the oracle seconds
many = settings(same, max_examples=25)
EXACT = 1e-9  # of epsilon, for what only rounding may change


def cost(sigma: float, q: float, n: int, delta: float, accountant: str) -> float:
    """Infinite where the accountant refuses for size: it says so itself."""
    try:
        return epsilon(PoissonSampledGaussian(sigma, q, n), delta, accountant).value
    except AccountingRangeError:
        assert accountant in ("pld", "prv")
        return math.inf


def check_monotone(sigma, q, n, delta, accountant, slack):
    base = cost(sigma, q, n, delta, accountant)
    assert cost(sigma, q, 2 * n, delta, accountant) >= base - slack
    assert cost(sigma, min(1.0, 1.5 * q), n, delta, accountant) >= base - slack
    assert cost(1.2 * sigma, q, n, delta, accountant) <= base + slack
    assert cost(sigma, q, n, min(0.5, 3 * delta), accountant) <= base + slack


@many
@given(noise, rates, steps, deltas, st.sampled_from(FAST))
def test_monotone(sigma, q, n, delta, accountant):
    check_monotone(
        sigma, q, n, delta, accountant, EXACT * (1 + cost(sigma, q, n, delta, accountant))
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@few
@given(noise, rates, steps, deltas)
def test_monotone_pld(sigma, q, n, delta):
    # Two computations may differ by the grid's error; both are bounds.
    check_monotone(sigma, q, n, delta, "pld", 1e-3)


@many
@given(noise, rates, st.integers(2, 2000), deltas, st.sampled_from(FAST), st.floats(0, 1))
def test_splitting_a_run_and_composing_nothing_change_nothing(
    sigma, q, n, delta, accountant, share
):
    whole = PoissonSampledGaussian(sigma, q, n)
    first = round(share * n)
    parts = [
        PoissonSampledGaussian(sigma, q, first),
        Gaussian(sigma, 0),
        PoissonSampledGaussian(sigma, q, n - first),
    ]
    assert epsilon(parts, delta, accountant) == epsilon(whole, delta, accountant)
    assert epsilon([*parts, PoissonSampledGaussian(sigma, 0.0, 9)], delta, accountant) == epsilon(
        whole, delta, accountant
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@few
@given(st.floats(0.7, 20), rates, st.integers(1, 300), deltas)
def test_no_bound_is_below_the_oracle_and_pld_is_below_rdp(sigma, q, n, delta):
    truth = oracle.epsilon([(sigma, q, n)], delta)
    by_rdp = cost(sigma, q, n, delta, "rdp")
    assert cost(sigma, q, n, delta, "pld") <= by_rdp + EXACT or by_rdp > 500
    assert all(cost(sigma, q, n, delta, accountant) >= truth - 1e-5 for accountant in BOUNDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(same, max_examples=6)  # the oracle takes up to a minute for several kinds
@given(
    st.lists(st.tuples(st.floats(1, 20), rates, st.integers(1, 100)), min_size=2, max_size=3),
    deltas,
)
def test_different_mechanisms_compose(mechanisms, delta):
    events = [PoissonSampledGaussian(*each) for each in mechanisms]
    truth = oracle.epsilon(mechanisms, delta)
    found = epsilon(events, delta).value
    assert truth - 1e-5 <= found <= max(truth + 3e-3, epsilon(events, delta, "rdp").value)
    assert found >= max(epsilon(event, delta).value for event in events) - 1e-3


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-6), (1.0, 1e-5), (2.5, 1e-10)])
def test_the_oracle_on_a_gaussian_is_the_closed_form(mu, delta):
    assert oracle.epsilon([(1 / mu, 1.0, 1)], delta) == pytest.approx(
        oracle.gaussian(mu, delta), abs=1e-4
    )
    assert oracle.epsilon([(3 / mu, 1.0, 9)], delta) == pytest.approx(
        oracle.gaussian(mu, delta), abs=1e-4
    )
