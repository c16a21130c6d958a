"""Every accountant at its edges, against closed forms, and against the others; and calibration: on
the private side, tight, and refusing what cannot be done."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from hf_dp.accounting import (
    ACCOUNTANTS,
    Epsilon,
    Gaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SampledRecordRelease,
    SumAndRows,
    UserRowsGaussian,
    accountants,
    calibrate_noise_multiplier,
    calibrate_steps,
    epsilon,
    rdp,
    round_up,
)
from hf_dp.accounting import PoissonSampledGaussian as Sampled
from hf_dp.accounting import TruncatedPoissonSampledGaussian as Truncated
from hf_dp.errors import (
    AccountingRangeError,
    CalibrationError,
    InvalidArgumentError,
    UnsupportedEventError,
)

SST2 = Sampled(0.82539347, 1024 / 67349, 198)


@pytest.mark.parametrize(
    ("q", "sigma", "order"), [(0.02, 0.8, 4.0), (0.1, 1.0, 3.2), (1e-4, 5.0, 32.0)]
)
def test_rdp_curve_against_quadrature(q, sigma, order):
    """E over N(0, sigma^2) of (mixture density / noise density)^order, integrated directly."""

    def integrand(x: float) -> float:
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
        return stats.norm.pdf(x, scale=sigma) * math.expm1(order * math.log(ratio))

    edges = np.linspace(-12 * sigma, order + 12 * sigma, 40)
    excess = sum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in zip(edges, edges[1:])
    )
    exact = math.log1p(excess) / (order - 1)
    ours = rdp._curve(sigma, q)[rdp.ORDERS.index(order)]
    above = 1e-9 if order.is_integer() else 6e-3
    assert exact <= ours <= exact * (1 + above) + 1.1 * rdp.ROUNDING_ALLOWANCE


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_costs_nothing_and_no_noise_costs_everything(accountant):
    for nothing in ([], Gaussian(1.0, 0), Sampled(1.0, 0.0, 10), Sampled(0.0, 0.1, 0)):
        assert epsilon(nothing, 1e-5, accountant).value == 0
    for everything in (Gaussian(0.0), [SST2, Sampled(0.0, 0.1, 1)]):
        assert epsilon(everything, 1e-5, accountant).value == math.inf
    kind = "estimate" if accountant == "gdp_clt" else "bound"
    assert epsilon(SST2, 1e-5, accountant).kind == epsilon([], 1e-5, accountant).kind == kind
    assert type(epsilon(SST2, 1e-5, accountant).value) is float


SMALL = Sampled(1.0, 1e-6, 1000)
SEEN = SampledRecordRelease(2.0, 0.1, 3)


@pytest.mark.parametrize(
    ("event", "delta", "accountant", "match"),
    [
        (SST2, 1e-12, "pld", '`delta` >= 1e-11, got 1e-12. Use accountant="rdp"'),
        (SST2, 1e-12, "prv", '`delta` >= 1e-11.*accountant="rdp"'),
        (Sampled(0.2, 0.1, 1), 1e-5, "pld", "`noise_multiplier` in .0.3, 100.0., got 0.2"),
        (Gaussian(0.01), 1e-5, "pld", "`noise_multiplier` in .0.05, 10000.0., got 0.01"),
        (Gaussian(200.0), 1e-5, "prv", "`noise_multiplier`"),
        (Gaussian(0.001), 1e-5, "rdp", "`noise_multiplier`"),
        (Sampled(1.0, 1e-9, 10), 1e-5, "pld", "`sample_rate` >= 1e-08"),
        (Sampled(1.0, 1e-3, 10**7), 1e-5, "pld", "at most 1000000 `steps`"),
        (Sampled(0.5, 0.9, 1000), 1e-5, "pld", 'epsilon up to 500.*Use accountant="rdp"'),
        (Sampled(0.45, 0.02, 20000), 1e-5, "prv", "accountant=.pld. or accountant=.rdp."),
        (Sampled(0.6, 0.2, 100), 1e-5, "prv", "could not evaluate these"),
        ([SMALL, SEEN], 1e-6, "pld", "`sample_rate` >= 1e-05"),
        # Heavy tails, where rounding would show.
        ([Sampled(1.0, 0.1, 10), SEEN], 1e-9, "pld", "`delta` >= 1e-07"),
        (SumAndRows(100.0, 1.0, 1e-4, 1000), 1e-8, "pld", 'delta.*accountant="rdp"'),
        (Truncated(0.3, 1e-5, 100_000, 1_000_000, 15), 1e-8, "pld", "`delta` >= 1e-07"),
        (Truncated(1.0, 1e-3, 100_001, 10_000, 30), 1e-6, "pld", "at most 100000 `steps`"),
        (UserRowsGaussian(1.0, 0.5, 10, 2000), 1e-5, "pld", "."),
        (UserRowsGaussian(1.0, 0.5, 1000, 60), 1e-5, "pld", "."),
        (UserRowsGaussian(0.3, 0.9, 1, 900), 1e-5, "pld", "."),
        (UserRowsGaussian(1.0, 1e-4, 200_000, 2), 1e-5, "pld", "."),
        (RandomAllocationGaussian(0.3, 66, 66), 1e-5, "pld", "poisson"),
        (RandomAllocationGaussian(0.8, 66, 198), 1e-9, "pld", "poisson"),
    ],
)
def test_outside_its_range_an_accountant_refuses_and_names_another(event, delta, accountant, match):
    with pytest.raises(AccountingRangeError, match=match):
        epsilon(event, delta, accountant)


@pytest.mark.parametrize(
    ("event", "delta", "match"),
    [(SMALL, 1e-6, "`sample_rate` >= 1e-05"), (Sampled(1.0, 0.01, 10), 1e-8, "`delta` >= 1e-07")],
)
def test_one_example_replaced_by_another_has_heavy_tails_too(event, delta, match):
    with pytest.raises(AccountingRangeError, match=match):
        epsilon(event, delta, relation="replace_one")


def test_prv_mean_defect_is_measured_and_refused():
    """(1, 0.1, T): the mean is off by 6.8e-6 a step; harmless at T = 100, and 0.0027 at T = 400."""
    assert epsilon(Sampled(1.0, 0.1, 100), 1e-5, "prv").estimate == pytest.approx(7.04728, abs=1e-4)
    with pytest.raises(AccountingRangeError, match="error of its mean"):
        epsilon(Sampled(1.0, 0.1, 400), 1e-5, "prv")


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, "1e-5"])
def test_bad_delta(delta):
    with pytest.raises(InvalidArgumentError, match="delta"):
        epsilon(SST2, delta)


def test_unknown_accountant_and_event():
    with pytest.raises(InvalidArgumentError, match="Did you mean 'prv'"):
        epsilon(SST2, 1e-5, "prvv")
    with pytest.raises(UnsupportedEventError):
        epsilon([SST2, {"type": "Gaussian"}], 1e-5)


@pytest.mark.parametrize(
    ("value", "digits", "printed"),
    [(2.41, 3, 2.41), (2.41, 2, 2.41), (2.4101, 3, 2.411), (0.1 + 0.2, 2, 0.31), (0.0, 3, 0.0), (1e-12, 3, 0.001),
     (3.0, 3, 3.0), (1e20, 3, 1e20), (2.5e40, 3, 2.5e40), (2.0**53 - 1, 3, 2.0**53 - 1), (math.inf, 3, math.inf)],
)  # fmt: skip
def test_printed_epsilon_is_rounded_up(value, digits, printed):
    assert round_up(value, digits) == printed
    assert Epsilon(value, "bound").rounded_up(digits) == printed


def test_epsilon_is_checked():
    for value in (-0.1, math.nan):
        with pytest.raises(InvalidArgumentError):
            Epsilon(value, "bound")
    with pytest.raises(InvalidArgumentError, match="kind"):
        Epsilon(1.0, "guess")


Q, STEPS, DELTA = 1024 / 67349, 198, 1 / (2 * 67349)


def assert_private_and_tight(sigma, target, delta, q, steps, accountant, prior=()):
    def cost(value):
        return epsilon((*prior, PoissonSampledGaussian(value, q, steps)), delta, accountant).value

    assert cost(sigma) <= target, "the returned noise does not meet the target"
    assert cost(sigma / (1 + accountants.TOLERANCE)) > target, "less noise would have done"


# smallest sigmas: RDP from Opacus 1.6; PLD from dp-accounting's own calibration, without our slack
# (at most 3e-4 of sigma)
@pytest.mark.parametrize(
    ("target", "accountant", "sigma", "above"),
    [
        (3, "rdp", 0.82539, 2e-4),
        (8, "rdp", 0.58027, 1e-3),
        (3, "pld", 0.764883, 3e-4),
        pytest.param(3, "prv", 0.764883, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_sst2(target, accountant, sigma, above):
    found = calibrate_noise_multiplier(target, DELTA, Q, STEPS, accountant)
    assert sigma - 1e-5 <= found <= sigma * (1 + above)
    assert_private_and_tight(found, target, DELTA, Q, STEPS, accountant)
    assert float(f"{found:.6g}") == found  # the published digits are the number used


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps"),
    [(0.1, 1e-6, 0.001, 100), (1, 1e-5, 1.0, 1), (2, 1e-7, 0.2, 3)],
)
@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_corners(target, delta, q, steps, accountant):
    found = calibrate_noise_multiplier(target, delta, q, steps, accountant)
    assert_private_and_tight(found, target, delta, q, steps, accountant)


@pytest.mark.parametrize(("accountant", "sigma"), [("rdp", 1.765027), ("pld", 1.3)])
def test_prior_events_are_paid_for(accountant, sigma):
    # DP-FROST: the selection gets what 198 training steps leave of epsilon 0.5
    prior = (PoissonSampledGaussian(2.105664 if accountant == "rdp" else 1.94331, Q, STEPS),)
    found = calibrate_noise_multiplier(0.5, DELTA, 0.02, 5, accountant, prior)
    assert found == pytest.approx(sigma, rel=1e-4 if accountant == "rdp" else 0.02)
    assert_private_and_tight(found, 0.5, DELTA, 0.02, 5, accountant, prior)


def test_prior_events_that_only_pld_knows_are_paid_for():
    """RDP, which says where to begin the search, cannot describe them."""
    prior = (RandomAllocationGaussian(4.0, 8, 8),)
    found = calibrate_noise_multiplier(2.0, 1e-3, 0.1, 5, "pld", prior)
    assert_private_and_tight(found, 2.0, 1e-3, 0.1, 5, "pld", prior)


def test_the_test_above_would_notice_the_wrong_side():
    sigma = calibrate_noise_multiplier(3, DELTA, Q, STEPS, "rdp")
    with pytest.raises(AssertionError, match="does not meet"):
        assert_private_and_tight(sigma * (1 - 1e-4), 3, DELTA, Q, STEPS, "rdp")
    with pytest.raises(AssertionError, match="less noise"):
        assert_private_and_tight(sigma * (1 + 2e-4), 3, DELTA, Q, STEPS, "rdp")


def test_an_estimate_is_refused():
    needs = "Calibration needs a bound; 'gdp_clt' is an estimate"
    with pytest.raises(InvalidArgumentError, match=needs):
        calibrate_noise_multiplier(3, DELTA, Q, STEPS, "gdp_clt")
    with pytest.raises(InvalidArgumentError, match=needs):
        calibrate_steps(3, DELTA, 1.0, Q, "gdp_clt")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_unreachable_targets_say_why(accountant):
    said = "0.001 is not met even at noise multiplier 1000?.*take fewer steps .*draw fewer examples"
    with pytest.raises(CalibrationError, match=said):
        calibrate_noise_multiplier(1e-3, 1e-6, 1.0, 100000, accountant)
    with pytest.raises(CalibrationError, match="prior events alone cost epsilon"):
        calibrate_noise_multiplier(1, 1e-6, 0.01, 10, accountant, [Gaussian(1.0)])
    with pytest.raises(CalibrationError, match="met even at noise multiplier 0.*Lower `target_ep"):
        calibrate_noise_multiplier(1e5, 1e-6, 1e-4, 1, accountant)


def test_bad_values_and_ranges():
    good = (3, DELTA, Q, 1)
    for place, bad in ((0, 0), (0, -1), (1, 0), (2, 0), (2, 1.5), (3, 0)):
        with pytest.raises(InvalidArgumentError):
            calibrate_noise_multiplier(*good[:place], bad, *good[place + 1 :])
    with pytest.raises(AccountingRangeError, match="delta"):
        calibrate_noise_multiplier(3, 1e-12, Q, STEPS)
    with pytest.raises(AccountingRangeError, match="sample_rate"):
        calibrate_noise_multiplier(3, 1e-6, 1e-9, STEPS)


@pytest.mark.parametrize(
    ("accountant", "prior"),
    [("rdp", ()), pytest.param("pld", (), marks=pytest.mark.slow), ("rdp", (Gaussian(4.0),))],
)
def test_steps_are_the_most_that_fit(accountant, prior):
    steps = calibrate_steps(3, DELTA, 0.83, Q, accountant, prior)
    assert steps > 0

    def cost(count):
        return epsilon((*prior, PoissonSampledGaussian(0.83, Q, count)), DELTA, accountant).value

    assert cost(steps) <= 3 < cost(steps + 1)


def test_steps_edges():
    assert calibrate_steps(3, DELTA, 0.0, Q) == 0
    assert calibrate_steps(0.1, DELTA, 0.5, Q) == 0
    assert calibrate_steps(1, DELTA, 1.0, Q, prior_events=Gaussian(1.0)) == 0
    with pytest.raises(CalibrationError, match="stay inside target_epsilon"):
        calibrate_steps(3, DELTA, 50.0, 1e-5, "rdp")
    with pytest.raises(CalibrationError, match="stay inside target_epsilon"):
        calibrate_steps(3, DELTA, 1.0, 0.0, "rdp")
