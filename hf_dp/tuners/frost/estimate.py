"""PGM-EST: estimate partition gradient magnitudes from noisy observations.

DP-FROST, section 4.5, Algorithm 5. In iteration t the noisy magnitude of each remaining partition i
was observed: ``o_ti = lambda_t v_i + noise``, with standard deviation ``sigma Delta_t``. Unknown
are the magnitudes v_i on all data and the scales lambda_t of the samples; the first scale is the
sample rate. The likelihood is maximized in alternation over magnitudes and scales, each in closed
form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ITERATIONS = 1000  # J


def estimate(
    observed: np.ndarray,
    sensitivities: Sequence[float],
    sample_rate: float,
    iterations: int = ITERATIONS,
) -> np.ndarray:
    """Estimate the magnitudes v, (M,).

    Args:
        observed: (t, M) noisy magnitudes, NaN for a partition that no longer remained.
        sensitivities: (t,), Delta.
        sample_rate: q_ps, the value of the first scale. At t = 1 the estimate is therefore
            o_1 / q_ps, as in section 4.5. Algorithm 5, line 2, returns o_1 itself, which differs
            by a common factor.
        iterations: J, how often magnitudes and scales are updated.
    """
    observed = np.atleast_2d(np.asarray(observed, dtype=np.float64))
    there = ~np.isnan(observed)
    values = np.where(there, observed, 0.0)
    inverse = 1 / np.asarray(sensitivities, dtype=np.float64) ** 2
    scales = np.ones(len(observed))
    scales[0] = sample_rate
    magnitudes = values[0] / sample_rate
    for _ in range(iterations if len(observed) > 1 else 0):
        # Lemma 5: v_i = sum_t (o_ti lambda_t / Delta_t^2) / sum_t (lambda_t^2 / Delta_t^2), over
        # the iterations t that observed i.
        weight = scales * inverse
        magnitudes = (weight @ values) / ((weight * scales) @ there)
        # Lemma 4: lambda_t = sum_i o_ti v_i / sum_i v_i^2, over the partitions i observed in t.
        squares = there @ magnitudes**2
        again = np.divide(values @ magnitudes, squares, out=np.ones_like(scales), where=squares > 0)
        scales[1:] = again[1:]
    return magnitudes


def scales_of(observed: np.ndarray, magnitudes: np.ndarray, sample_rate: float) -> np.ndarray:
    """Return the scales (t,) that fit these magnitudes (Lemma 4); the first is the sample rate."""
    there = ~np.isnan(observed)
    squares = there @ magnitudes**2
    found = np.divide(
        np.nansum(observed * magnitudes, axis=1),
        squares,
        out=np.ones(len(observed)),
        where=squares > 0,
    )
    found[0] = sample_rate
    return found


def variance(noise_multiplier: float, scales: np.ndarray, sensitivities: Sequence[float]) -> float:
    """Return the variance of the estimate for a partition that remained in all iterations.

    By Lemma 6 it is ``sigma^2 / sum_t (lambda_t^2 / Delta_t^2)``.
    """
    ratios = np.asarray(scales, dtype=np.float64) / np.asarray(sensitivities, dtype=np.float64)
    return float(noise_multiplier**2 / np.sum(ratios**2))
