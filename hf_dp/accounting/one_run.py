"""Bound epsilon from below by guesses about canaries that coins put in or left out.

There are m canaries; a fair coin each decided whether it took part. An auditor who sees what one
run released guesses for r of them whether they did, and v guesses are right. If the run is private,
many right guesses are unlikely. So enough of them refute the claim, and epsilon is at least the
largest value that they refute. It is a lower bound: few right guesses prove nothing.

Sources: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846); Mahloujifar, Melis, Chaudhuri 2024
(arXiv 2410.22235).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np

from hf_dp._validate import in_unit_interval, integer, invalid, non_negative
from hf_dp.accounting.accountants import epsilon
from hf_dp.accounting.event import Event, as_events
from hf_dp.accounting.gdp_clt import gaussian_mu
from hf_dp.errors import AccountingRangeError

_NORMAL = NormalDist()
_MOST = 100.0  # epsilon or mu: m guesses, all right, reach log2(m) or so
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of canaries to guess about
_DELTAS = (*np.geomspace(1e-7, 0.3, 20).tolist(),)

Inverse = Callable[[float], float]


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses under (epsilon, delta)-DP.

    With W binomial, of r guesses that are right with probability e^epsilon / (1 + e^epsilon), it is
    P(W >= v) + 2 m delta max_i P(v > W >= v - i) / i (Steinke et al., theorem 5.2 and appendix D).

    Args:
        canaries: m. guesses: r <= m. correct: v <= r.

    Raises: InvalidArgumentError.
    """
    from scipy.stats import binom  # a second to import, for which no command's help should wait

    _check(canaries, guesses, correct)
    right = 1 / (1 + math.exp(-epsilon))
    certain = float(binom.sf(correct - 1, guesses, right))
    if correct == 0:
        return 1.0
    fewer = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right).cumsum()
    slack = float((fewer / np.arange(1, correct + 1)).max())
    return min(1.0, certain + 2 * canaries * delta * slack)


def epsilon_at_least(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return an epsilon that an (epsilon, delta)-private run has at least, with this confidence."""
    level = 1 - in_unit_interval("confidence", confidence)
    p = partial(p_value, canaries, guesses, correct, delta=delta)
    return _largest(lambda value: p(value) <= level)


def mu_at_least(canaries: int, guesses: int, correct: int, confidence: float = 0.95) -> float:
    """Return a mu that the run has at least, with this confidence, if it is mu-GDP for any mu."""
    level = 1 - in_unit_interval("confidence", confidence)

    def refuted(mu: float) -> bool:
        def inverse(y: float) -> float:
            return 0.0 if y <= 0 else _NORMAL.cdf(_NORMAL.inv_cdf(min(y, 1 - 1e-16)) - mu)

        return refutes_curve(canaries, guesses, correct, inverse, level)

    return _largest(refuted)


def refutes_curve(
    canaries: int, guesses: int, correct: int, inverse: Inverse, level: float
) -> bool:
    """Return whether so many right guesses have a probability below ``level`` for a trade-off.

    Let N be the number of right guesses, a_i = P(N = i) i / m the probability that it is i and that
    the guess about a random canary is right, and b_i = P(N = i) (r - i) / m that it is wrong. The
    sums over i >= k are A_k and B_k. Turning the random canary's coin turns a right guess into a
    wrong one, and one right guess less remains; so A_k <= F(B_(k-1)) for the largest F(x) that the
    probability of an event can become from x between neighbors, and B_(k-1) >= F^-1(A_k). Since
    a_i = b_i i / (r - i), both sums follow downward from k = v, where A_v >= level v / m if
    P(N >= v) >= level. If they come to more than all there is, A_0 + B_0 = r / m, then it is not.
    (Mahloujifar et al., theorem 9 and algorithm 3, here for r guesses among m canaries.)

    Args:
        inverse: F^-1, rising, F^-1(y) <= y.

    Raises: InvalidArgumentError.
    """
    _check(canaries, guesses, correct)
    right = level * correct / canaries  # A_k
    wrong = level * (guesses - correct) / canaries  # B_k
    everything = guesses / canaries
    for count in range(correct - 1, -1, -1):
        more = max(wrong, inverse(right))
        right += (more - wrong) * count / (guesses - count)
        wrong = more
        if right + wrong > everything:
            return True
    return False


def claimed_curve(events: Event | Iterable[Event], accountant: str = "pld") -> Inverse:
    """Return F^-1 of what an accountant proves of these events.

    Each (epsilon, delta) gives F(x) <= delta + e^epsilon x, and so F^-1(y) >= (y - delta) /
    e^epsilon; the largest of several counts.
    """
    events = as_events(events)
    pairs = []
    for delta in _DELTAS:
        try:
            pairs.append((epsilon(events, delta, accountant).value, delta))
        except AccountingRangeError:
            continue
    epsilons, deltas = np.array([pair for pair in pairs if math.isfinite(pair[0])]).reshape(-1, 2).T
    slopes = np.exp(-epsilons)

    def inverse(y: float) -> float:
        return max(0.0, float(((y - deltas) * slopes).max(initial=0.0)))

    return inverse


def best_number_of_guesses(canaries: int, epsilon: float, delta: float) -> int:
    """Return about how many canaries to guess about, the clearest ones, to learn the most.

    It is decided from the claim alone, before anything is seen: as if scores were normal, those of
    canaries that took part larger by the mu that the claim allows.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    # An epsilon that was rounded to 0 is delta's alone.
    mu = gaussian_mu(max(non_negative("epsilon", epsilon), 1e-6), delta)

    def learned(guesses: int) -> tuple[float, float]:
        def too_many(cut: float) -> float:
            return (norm.sf(cut - mu) + norm.sf(cut)) / 2 - guesses / (2 * canaries)

        cut = brentq(too_many, -10.0, mu + 40.0)
        right = norm.sf(cut - mu) / (norm.sf(cut - mu) + norm.sf(cut))
        # Where the claim is too small for any bound above 0, the clearest sign of more.
        bound = epsilon_at_least(canaries, guesses, int(right * guesses), delta)
        return bound, (right - 0.5) * math.sqrt(guesses)

    choices: Sequence[int] = sorted({2 * max(1, round(s * canaries / 2)) for s in _SHARES})
    return max((each for each in choices if each <= canaries), key=learned)


def _largest(refuted: Callable[[float], bool]) -> float:
    """Return a refuted value, within 1e-4 of one that is not; 0 if that is not refuted.

    Whatever refutes a value refutes all smaller ones, so it does not matter which edge is found.
    """
    low, high = 0.0, _MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _check(canaries: int, guesses: int, correct: int) -> None:
    integer("canaries", canaries, 1)
    integer("guesses", guesses, 1)
    integer("correct", correct, 0)
    if not correct <= guesses <= canaries:
        raise invalid(
            "guesses", guesses, f"to be from correct ({correct}) to canaries ({canaries})"
        )
