"""Privacy random variables with Microsoft's ``prv-accountant``: an upper end and an estimate.

Gopi, Lee, Wutschitz 2021 (arXiv 2106.02848), Theorem 5.5: the loss of each step is discretized on a
mesh chosen so that the composed epsilon is within EPS_ERROR, and composed by FFT in extended
precision. ``Epsilon.value`` is the upper end, ``Epsilon.estimate`` the point estimate that papers
report.
"""

from __future__ import annotations

import math
import warnings
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant
from prv_accountant.accountant import compute_safe_domain_size

from hf_dp.accounting import rdp
from hf_dp.accounting.composition import Composition, Epsilon, Range
from hf_dp.errors import AccountingRangeError

# Compared with PLD and a third computation for noise multipliers from 0.3 up, 1e-5 <= rate <= 1 and
# delta down to 1e-11 (33 cases, steps up to 1e6; its extended-precision FFT stays right where PLD's
# does not).
RANGE = Range(
    "prv",
    min_noise_multiplier=0.3,
    max_noise_multiplier=100.0,
    min_sample_rate=1e-5,
    max_steps=10**6,
    min_delta=1e-11,
    next_move='Use accountant="rdp", or accountant="pld" for sample rates from 1e-8.',
)

# Half-width of the certified interval, as the package advises; smaller values take longer.
EPS_ERROR = 0.01
# delta_error / delta, as the paper's authors choose it.
DELTA_ERROR_RATIO = 1e-3
# Mesh points of about 150 bytes, so near 1.2 GB; above it the package runs out of memory or swaps.
MAX_MESH_POINTS = 2**23
# The largest correction for the defect described in _mean_error that is added to the upper end;
# beyond it we refuse.
MAX_MEAN_ERROR = 1e-3

Mechanism: TypeAlias = GaussianMechanism | PoissonSubsampledGaussianMechanism

_OTHER = 'Use accountant="pld" or accountant="rdp".'


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return the upper end of the certified interval at ``delta``, with the point estimate.

    Raises:
        AccountingRangeError: outside RANGE; the mesh would not fit in memory; the package failed;
            or its discretized mean is off by more than MAX_MEAN_ERROR over all steps (released
            versions integrate it with fixed break points).
    """
    RANGE.check(composition, delta)
    prvs, counts = _random_variables(composition)
    delta_error = delta * DELTA_ERROR_RATIO
    try:
        _check_mesh(prvs, counts, delta_error, composition, delta)
        with warnings.catch_warnings():
            # exp overflows in cells that hold no mass.
            warnings.simplefilter("ignore", RuntimeWarning)
            accountant = PRVAccountant(prvs, EPS_ERROR, delta_error, max_self_compositions=counts)
            mean_error = _mean_error(accountant, prvs, counts)
            _, estimate, upper = accountant.compute_epsilon(delta, counts)
    except (RuntimeError, MemoryError, ValueError, AssertionError, IndexError) as error:
        if isinstance(error, AccountingRangeError):
            raise
        # Notes of accountants stand on cards: the package's own words are for who reads the cause.
        raise RANGE.error(
            "parameters that prv-accountant can evaluate, and it could not evaluate these", _OTHER
        ) from error
    if not mean_error <= MAX_MEAN_ERROR:
        raise RANGE.error(
            f"an error of its mean up to {MAX_MEAN_ERROR} over all steps, got {mean_error:.3g}",
            _OTHER,
        )
    if not (math.isfinite(estimate) and math.isfinite(upper)):
        raise RANGE.error(f"parameters that it can evaluate; it returned {upper!r}", _OTHER)
    return Epsilon(max(0.0, upper + mean_error), "bound", estimate=max(0.0, estimate))


def _random_variables(composition: Composition) -> tuple[list[Mechanism], list[int]]:
    sampled = composition.sampled
    prvs: list[Mechanism] = [
        _sampled(event.sample_rate, event.noise_multiplier) for event in sampled
    ]
    counts = [event.steps for event in sampled]
    if composition.gaussian_mu > 0:
        prvs.append(GaussianMechanism(1 / composition.gaussian_mu))
        counts.append(1)
    return prvs, counts


class _Sampled(PoissonSubsampledGaussianMechanism):
    """The package's mechanism, each order's Renyi divergence computed once: it asks four times to
    size one mesh, which took nine tenths of an evaluation."""

    def __init__(self, sample_rate: float, noise_multiplier: float) -> None:
        super().__init__(sample_rate, noise_multiplier)
        self.rdp = cache(super().rdp)


_sampled = lru_cache(maxsize=64)(_Sampled)  # a run asks again with more steps


def _check_mesh(
    prvs: list[Mechanism],
    counts: list[int],
    delta_error: float,
    composition: Composition,
    delta: float,
) -> None:
    """Raise before the package allocates more than MAX_MESH_POINTS (its formula, Theorem 5.5)."""
    half_width = float(compute_safe_domain_size(prvs, counts, EPS_ERROR, delta_error))
    mesh = EPS_ERROR / math.sqrt(sum(counts) / 2 * math.log(12 / delta_error))
    points = 2 * half_width / mesh
    if not points <= MAX_MESH_POINTS:
        about, _ = rdp.epsilon_and_order(composition, delta)
        raise RANGE.error(
            f"at most {MAX_MESH_POINTS} mesh points, got {points:.3g} (epsilon about {about:.3g})",
            _OTHER,
        )


def _mean_error(accountant: PRVAccountant, prvs: list[Mechanism], counts: list[int]) -> float:
    """Return how far the package's means, summed over all steps, are from ours.

    This is exactly the shift of epsilon. The package shifts each discretized variable to have the
    mean it integrated. Release 0.2.0 integrates with fixed break points and can silently be wrong
    by 2e-5 a step (sigma 0.3, q 0.01, T 1000, delta 1e-5: interval [69.823, 69.850], truth
    69.8157). We integrate the same distribution function on panels that follow its scale.
    """
    total = 0.0
    for prv, discrete, count in zip(prvs, accountant.composer.prvs, counts):
        points = discrete.domain.ts()
        theirs = float(np.dot(points, discrete.pmf))
        shift = discrete.domain.shifts()
        ours = _truncated_mean(
            prv, discrete.domain.t_min() - shift, discrete.domain.t_max() - shift
        )
        total += count * abs(theirs - float(ours))
    return total


def _truncated_mean(prv: Mechanism, low: float, high: float) -> float:
    """Return the mean conditioned on [low, high]: high - integral of the distribution function."""
    ladder = np.geomspace(1e-9, max(high, -low), 600)
    edges = np.unique(
        np.clip(np.concatenate([-ladder, [0.0], ladder, _support_edge(prv)]), low, high)
    )
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(edges) / 2
    points = (edges[:-1] + half)[:, None] + half[:, None] * nodes
    below, above = float(prv.cdf(low)), float(prv.cdf(high))
    values = (np.asarray(prv.cdf(points), dtype=float) - below) / (above - below)
    return float(high) - float(np.sum(half[:, None] * weights * values))


def _support_edge(prv: Mechanism) -> np.ndarray:
    """Return panel edges near log(1 - q), where the distribution function jumps up from 0."""
    if not isinstance(prv, PoissonSubsampledGaussianMechanism):
        return np.array([prv.mu**2 / 2 + prv.mu * z for z in np.linspace(-10, 10, 201)])
    edge = float(np.log1p(-prv.p))
    return np.concatenate(
        [edge + np.geomspace(1e-15, -edge, 200), edge - np.geomspace(1e-15, 1.0, 2)]
    )
