"""The law of banded noise, as dense matrices have it."""

import numpy as np
from scipy import stats
from scipy.linalg import toeplitz

from hf_dp.plans.bands import member, square_root_column

REJECT = 1e-8
BANDS = 3
COLUMN = square_root_column(BANDS)
# Of 55 entries one is 7 standard errors off by chance less than once in 10^9. One that is off by 14
# of them is missed as rarely.
LIMIT = 7.0


def matrix(column, steps: int) -> np.ndarray:
    """C, (T, T), of its first column."""
    return toeplitz(np.resize([*column, *[0.0] * steps], steps), np.zeros(steps))


def classes(count: int, bands: int) -> np.ndarray:
    """The class of each place, (b ceil(N / b),)."""
    blocks = np.arange(-(-count // bands))
    found = np.full(len(blocks) * bands, -1)
    for k in range(bands):
        found[member(blocks, k, bands)] = k
    return found


def covariance(blocks) -> np.ndarray:
    """C^-1 C^-T of blocks of so many steps, each with a z of its own."""
    found = np.zeros((sum(blocks), sum(blocks)))
    for end, length in zip(np.cumsum(blocks), blocks, strict=True):
        inverse = np.linalg.inv(matrix(COLUMN, length))
        found[end - length : end, end - length : end] = inverse @ inverse.T
    return found


def errors(expected: np.ndarray, size: int) -> np.ndarray:
    """The standard errors of a covariance that is estimated from so many samples."""
    variances = np.outer(np.diag(expected), np.diag(expected)) + expected**2
    return np.sqrt(variances / size)


def power(planted: np.ndarray, blocks, size: int) -> float:
    """The probability with which :func:`is_banded` sees noise of another covariance."""
    expected = covariance(blocks)
    off, of_planted = np.abs(planted - expected), errors(planted, size)
    beyond = stats.norm.sf((LIMIT * errors(expected, size) - off) / of_planted)
    return float(beyond.max())


def is_banded(noise: np.ndarray, blocks) -> bool:
    """Return whether noise (T, n), in units of z, has the covariance and is normal."""
    expected, size = covariance(blocks), noise.shape[1]
    if np.abs((noise @ noise.T / size - expected) / errors(expected, size)).max() > LIMIT:
        return False
    ends = np.cumsum(blocks)
    z = [matrix(COLUMN, n) @ noise[end - n : end] for end, n in zip(ends, blocks, strict=True)]
    return bool(stats.kstest(np.concatenate(z).ravel(), "norm").pvalue > REJECT)
