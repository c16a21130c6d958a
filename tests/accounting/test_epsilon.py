"""Every accountant at its edges, against closed forms, and against the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from hf_dp.accounting import (
    ACCOUNTANTS,
    Epsilon,
    Gaussian,
    RandomAllocationGaussian,
    SampledRecordRelease,
    SumAndRows,
    UserRowsGaussian,
    epsilon,
    rdp,
    round_up,
)
from hf_dp.accounting import PoissonSampledGaussian as Sampled
from hf_dp.accounting import TruncatedPoissonSampledGaussian as Truncated
from hf_dp.errors import AccountingRangeError, InvalidArgumentError, UnsupportedEventError

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
