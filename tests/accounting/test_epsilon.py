"""Every accountant against numbers computed elsewhere, at its edges, and against the others.

Golden values: ``tight`` from an independent implementation (exponentially tilted FFT of the
remove-direction loss, exact cell masses, mean corrected), ``rdp`` from Opacus 1.6 (exact series),
``clt`` from the closed form; computed with Python 3.11.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import integrate, stats

from hf_dp.accounting import (
    ACCOUNTANTS,
    Epsilon,
    Gaussian,
    PoissonSampledGaussian,
    epsilon,
    rdp,
    round_up,
)
from hf_dp.errors import AccountingRangeError, InvalidArgumentError, UnsupportedEventError

# sigma, q, steps, delta, tight, rdp, clt
GRID = [
    (0.5, 0.001, 1000, 1e-6, 4.23507239, 5.32906757, 0.976383775),
    (0.4, 0.01, 100, 1e-5, 12.2246901, 14.8077275, 11.7223744),
    (1.0, 0.01, 1000, 1e-5, 1.82823743, 2.10136527, 1.61771181),
    (0.8, 0.0625, 100, 1e-5, 7.04194564, 8.07663349, 5.4858473),
    (1.0, 0.1, 100, 1e-5, 7.04660264, 7.899255, 6.00707731),
    (5.0, 0.1, 1000, 1e-5, 2.65067745, 2.87958462, 2.62391098),
    (2.0, 0.5, 10, 1e-5, 3.95899557, 4.36685055, 3.59416002),
    (
        2.0,
        0.0001,
        100000,
        1e-6,
        0.0593450952,
        0.148969534,
        0.0590490843,
    ),  # per-step loss below the coarse grid
]
# unsampled Gaussians, tight is the closed form
GAUSSIAN = [(1.0, 1, 1e-5, 4.3771781), (2.0, 10, 1e-5, 7.5112759), (10.0, 1, 1e-5, 0.340669365)]

# Li et al. 2021 (arXiv 2110.05679), Table 1, settings recovered: 1024 x (1, 2, 6, 6) examples a
# step, 3 x (1, 2, 6, 6) epochs, delta 1/(2N), sigma by RDP at epsilon 3 or 8; "printed" is the
# paper's PRV column (the point estimate). N, batch, steps, target, sigma, prv estimate, printed
LI_2021 = [
    (67349, 1024, 198, 3.0, 0.825393470, 2.41015, 2.41),
    (67349, 1024, 198, 8.0, 0.580270, 6.6853, 6.69),
    (104743, 2048, 307, 3.0, 0.951232924, 2.571005, 2.57),
    (104743, 2048, 307, 8.0, 0.654358542, 6.86978413, 6.87),
    (392702, 6144, 1151, 3.0, 1.15537163, 2.75027645, 2.75),
]
SST2 = PoissonSampledGaussian(0.82539347, 1024 / 67349, 198)
SST2_DELTA = 1 / (2 * 67349)


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "tight", "by_rdp", "clt"), GRID)
def test_grid(sigma, q, steps, delta, tight, by_rdp, clt):
    event = PoissonSampledGaussian(sigma, q, steps)
    pld = epsilon(event, delta)
    assert pld.kind == "bound"
    assert tight <= pld.value <= tight + 1.5e-3  # slack 1e-3, and the coarse grid's error
    assert (
        by_rdp <= epsilon(event, delta, "rdp").value <= by_rdp * 1.003
    )  # fractional orders are an upper bound
    assert epsilon(event, delta, "gdp_clt").value == pytest.approx(clt, rel=1e-6)
    prv = epsilon(event, delta, "prv")
    assert tight <= prv.value <= tight + 0.013
    assert prv.estimate == pytest.approx(tight, abs=1e-3)


@pytest.mark.parametrize(("sigma", "steps", "delta", "exact"), GAUSSIAN)
def test_gaussian_against_closed_form(sigma, steps, delta, exact):
    for event in (Gaussian(sigma, steps), PoissonSampledGaussian(sigma, 1.0, steps)):
        assert exact <= epsilon(event, delta).value <= exact + 1.1e-3
        assert epsilon(event, delta, "gdp_clt").value == pytest.approx(exact, rel=1e-7)
        assert exact <= epsilon(event, delta, "prv").value <= exact + 0.011
    assert epsilon(Gaussian(sigma, steps), delta) == epsilon([Gaussian(sigma)] * steps, delta)


@pytest.mark.parametrize(("n", "batch", "steps", "target", "sigma", "estimate", "printed"), LI_2021)
def test_li_2021_table_1(n, batch, steps, target, sigma, estimate, printed):
    event, delta = PoissonSampledGaussian(sigma, batch / n, steps), 1 / (2 * n)
    assert epsilon(event, delta, "rdp").value == pytest.approx(target, rel=2e-3)
    prv = epsilon(event, delta, "prv")
    assert prv.estimate == pytest.approx(estimate, abs=1e-3)
    assert round(prv.estimate, 2) == printed
    assert prv.estimate <= epsilon(event, delta).value <= prv.estimate + 1.5e-3


def test_sst2_clt_is_an_estimate_and_far_below():
    result = epsilon(SST2, SST2_DELTA, "gdp_clt")
    assert result.kind == "estimate"
    assert result.value == pytest.approx(1.544, abs=1e-3)


# DP-FROST on SST-2: 198 training steps and 5 selection steps (q 0.02); sigmas split by RDP epsilon
# 0.9 / 0.1.
@pytest.mark.parametrize(
    ("training", "selection", "delta", "by_rdp", "tight", "clt"),
    [
        (2.10566358, 1.76502701, SST2_DELTA, 0.5, 0.42001, 0.390436723),
        (0.602245954, 0.504159569, SST2_DELTA, 8.0, 6.60266443, 3.84173271),
    ],
)
def test_heterogeneous_composition(training, selection, delta, by_rdp, tight, clt):
    events = [
        PoissonSampledGaussian(selection, 0.02, 5),
        PoissonSampledGaussian(training, 1024 / 67349, 198),
    ]
    assert tight - 1e-5 <= epsilon(events, delta).value <= tight + 1.1e-3
    assert by_rdp - 1e-6 <= epsilon(events, delta, "rdp").value <= by_rdp * 1.001
    assert epsilon(events, delta, "prv").estimate == pytest.approx(tight, abs=1e-3)
    assert epsilon(events, delta, "gdp_clt").value == pytest.approx(clt, rel=1e-6)
    assert epsilon(reversed(events), delta) == epsilon(events, delta)


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
    assert (
        exact
        <= ours
        <= exact * (1 + (1e-9 if order.is_integer() else 6e-3)) + 1.1 * rdp.ROUNDING_ALLOWANCE
    )


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_costs_nothing_and_no_noise_costs_everything(accountant):
    for nothing in (
        [],
        Gaussian(1.0, 0),
        PoissonSampledGaussian(1.0, 0.0, 10),
        PoissonSampledGaussian(0.0, 0.1, 0),
    ):
        assert epsilon(nothing, 1e-5, accountant).value == 0
    for everything in (Gaussian(0.0), [SST2, PoissonSampledGaussian(0.0, 0.1, 1)]):
        assert epsilon(everything, 1e-5, accountant).value == math.inf
    kind = "estimate" if accountant == "gdp_clt" else "bound"
    assert epsilon(SST2, 1e-5, accountant).kind == epsilon([], 1e-5, accountant).kind == kind
    assert type(epsilon(SST2, 1e-5, accountant).value) is float


@pytest.mark.parametrize(
    "accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp", "gdp_clt"]
)
def test_monotone_in_steps_noise_rate_and_delta(accountant):
    def cost(sigma=1.0, q=0.01, steps=500, delta=1e-6):
        return epsilon(PoissonSampledGaussian(sigma, q, steps), delta, accountant).value

    def increasing(values):
        values = list(values)
        return all(a < b for a, b in zip(values, values[1:]))

    assert increasing(cost(steps=n) for n in (1, 2, 10, 100, 101, 500, 2000))
    assert increasing(cost(sigma=s) for s in (4.0, 2.0, 1.0, 0.7, 0.5))
    assert increasing(cost(q=q) for q in (1e-4, 1e-3, 0.01, 0.02, 0.1))
    assert increasing(cost(delta=d) for d in (1e-4, 1e-5, 1e-6, 1e-8))


def test_default_is_never_above_rdp():
    random.seed(0)
    for _ in range(8):
        event = PoissonSampledGaussian(
            random.uniform(0.6, 20), 10 ** random.uniform(-4, -1), random.randint(1, 500)
        )
        assert epsilon(event, 1e-6).value <= epsilon(event, 1e-6, "rdp").value


@pytest.mark.parametrize(
    ("event", "delta", "accountant", "match"),
    [
        (SST2, 1e-12, "pld", '`delta` >= 1e-11, got 1e-12. Use accountant="rdp"'),
        (SST2, 1e-12, "prv", '`delta` >= 1e-11.*accountant="rdp"'),
        (
            PoissonSampledGaussian(0.2, 0.1, 1),
            1e-5,
            "pld",
            "`noise_multiplier` in .0.3, 100.0., got 0.2",
        ),
        (Gaussian(0.01), 1e-5, "pld", "`noise_multiplier` in .0.05, 10000.0., got 0.01"),
        (Gaussian(200.0), 1e-5, "prv", "`noise_multiplier`"),
        (Gaussian(0.001), 1e-5, "rdp", "`noise_multiplier`"),
        (PoissonSampledGaussian(1.0, 1e-9, 10), 1e-5, "pld", "`sample_rate` >= 1e-08"),
        (PoissonSampledGaussian(1.0, 1e-3, 10**7), 1e-5, "pld", "at most 1000000 `steps`"),
        (
            PoissonSampledGaussian(0.5, 0.9, 1000),
            1e-5,
            "pld",
            'epsilon up to 500.*Use accountant="rdp"',
        ),
        (
            PoissonSampledGaussian(0.45, 0.02, 20000),
            1e-5,
            "prv",
            "accountant=.pld. or accountant=.rdp.",
        ),
        (PoissonSampledGaussian(0.6, 0.2, 100), 1e-5, "prv", "could not evaluate these"),
    ],
)
def test_outside_its_range_an_accountant_refuses_and_names_another(event, delta, accountant, match):
    with pytest.raises(AccountingRangeError, match=match):
        epsilon(event, delta, accountant)


def test_prv_mean_defect_is_measured_and_refused():
    """(1, 0.1, T): the mean is off by 6.8e-6 a step; harmless at T = 100, and 0.0027 at T = 400."""
    assert epsilon(PoissonSampledGaussian(1.0, 0.1, 100), 1e-5, "prv").estimate == pytest.approx(
        7.04728, abs=1e-4
    )
    with pytest.raises(AccountingRangeError, match="error of its mean"):
        epsilon(PoissonSampledGaussian(1.0, 0.1, 400), 1e-5, "prv")


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
