"""The exact draw of independent trials: its law, found by feeding it every word that matters, its
table, its cost, and what it draws. With planted bugs."""

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from hf_dp.plans import trials
from hf_dp.plans.trials import successes

REJECT = 1e-9
WORD = 2**64


class Again(Exception):
    """More was asked for than there is."""


def source(*words: int) -> Callable[[int], bytes]:
    """These numbers of 64 bits, one after the other."""
    left = list(words)

    def given(count: int) -> bytes:
        taken = [left.pop(0) for _ in range(count // 8) if left]
        if len(taken) < count // 8:
            raise Again
        return np.array(taken, np.uint64).tobytes()

    return given


def number(digits: list[int], rate: float, size: int) -> int:
    """How many of ``size`` trials, which are one block, succeed by these digits of U."""
    return len(successes(size, rate, source(*digits, *range(size))))


def law(rate: float) -> dict[tuple[int, ...], Fraction]:
    """The probability of each set of at most 3 of 8 trials, within 2^-60: by bisection, how many
    words make m of them succeed; and which sets the 8^m lists of places make, if all differ."""
    found: dict[tuple[int, ...], Fraction] = {}
    above = [WORD]  # how many words make m or more succeed
    for m in range(1, 5):
        low, high = 0, WORD - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if number([middle], rate, 8) >= m else (low, middle)
        above.append(low)
    for m in range(4):
        word, sets = max(0, above[m] - 2), Counter()
        for places in itertools.product(range(8), repeat=m):
            try:  # what stands above the 3 bits that are used is another number each time
                words = [place + 8 * hash(places) % 2**60 for place in places]
                sets[tuple(successes(8, rate, source(word, *words)).tolist())] += 1
            except Again:  # the block draws all its places again
                assert len(set(places)) < m
        for one, times in sets.items():
            share = Fraction(times, sum(sets.values()))
            found[one] = share * Fraction(above[m] - above[m + 1], WORD)
    return found


def is_law(found: dict[tuple[int, ...], Fraction], rate: float) -> bool:
    p = Fraction(round(rate * WORD), WORD)
    sets = [one for m in range(4) for one in itertools.combinations(range(8), m)]
    exact = {one: p ** len(one) * (1 - p) ** (8 - len(one)) for one in sets}
    return found.keys() == exact.keys() and all(
        abs(found[one] - exact[one]) < Fraction(1, 2**60) for one in sets
    )


@pytest.mark.parametrize("rate", [0.06, 1 / 3000, 1e-5])
def test_the_law_is_that_of_independent_trials(rate, monkeypatch):
    assert is_law(law(rate), rate)
    assert not is_law(law(rate * 1.001), rate)  # planted
    honest = trials._words
    for planted in (
        lambda count, given: honest(count, given) & np.uint64(WORD - 2),  # no odd place
        lambda count, given: honest(count, given) // np.uint64(2),  # places by other bits; U halved
        lambda count, given: np.repeat(honest(count, given)[:1], count),  # a word used twice
    ):
        monkeypatch.setattr(trials, "_words", planted)
        with pytest.raises((AssertionError, IndexError, Again)):
            assert is_law(law(rate), rate)


def tail(width: int, chance: int, c: int) -> Fraction:
    """P(Binomial(2^width, chance / 2^64) > c), within 10^-90."""
    size = 2**width
    with localcontext() as context:
        context.prec = 120
        p = Decimal(chance) / WORD
        below = sum(math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(c + 1))
        return Fraction(1 - below)


SIZES = [(6, 1024 / 67_349), (13, 1e-4), (29, 1e-9), (3, 1e-9), (62, 2.0**-63)]


@pytest.mark.parametrize(("width", "rate"), SIZES)
@pytest.mark.parametrize("digits", [64, 128])
def test_each_tail_lies_between_two_neighboring_numbers(width, rate, digits):
    chance = round(rate * WORD)
    bounds, near = trials._tails(width, chance, digits), Fraction(1, 10**40)
    for c, (low, high) in enumerate(bounds):
        assert high - low == 1
        assert low - near <= tail(width, chance, c) * 2**digits <= high + near
    assert bounds[-1][0] == 0 or len(bounds) == 2**width


def test_further_digits_decide_where_64_do_not():
    rate, width = 1e-4, 13
    for c in (0, 1, 5):
        digits = int(tail(width, round(rate * WORD), c) * WORD**3)
        first, second, third = (digits // WORD**k % WORD for k in (2, 1, 0))
        for words, m in (
            ([first - 1], c + 1), ([first + 1], c), ([first, second - 1], c + 1),
            ([first, second + 1], c), ([first, second, third - 1], c + 1),
            ([first, second, third + 1], c),
        ):  # fmt: skip
            assert number(words, rate, 2**width) == m
    # Below all that 64 digits tell apart, and 128.
    chance, least = round(1e-9 * WORD), Fraction(9, WORD**3)
    m = sum(least < tail(10, chance, c) for c in range(12))
    assert number([0, 0, 9], 1e-9, 1024) == m == 8


def test_blocks_follow_one_another_and_trials_beyond_the_last_are_cut_off():
    """40 trials are 3 blocks of 16 at 1/20; U = 0.6, 0.3, 0.2 make 0, 1 and 1 or 2 succeed."""
    words = [int(u * WORD) for u in (0.6, 0.3, 0.15)]
    assert successes(40, 0.05, source(*words, 3, 5, 9)).tolist() == [16 + 3, 32 + 5]
    assert successes(40, 0.05, source(*words, 3, 5, 5, 7, 2)).tolist() == [16 + 3, 32 + 2, 32 + 7]


def test_the_cost_is_that_of_the_successes():
    """10^5 of 10^9, 10^12, and few of as many."""
    asked: list[int] = []
    rng = np.random.default_rng(1)
    counted = lambda count: (asked.append(count), rng.bytes(count))[1]  # noqa: E731
    for n, expected in ((10**9, 10**5), (10**12, 10**5), (10**9, 1), (2**62, 1e-6)):
        asked.clear()
        tracemalloc.start()
        drawn = successes(n, expected / n, counted)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert abs(len(drawn) - expected) <= 6 * expected**0.5 + 1
        assert sum(asked) < 8 * (2 + math.e) * 1.1 * expected + 1000
        assert memory < 100 * expected + 100_000


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("rate", [1.0, 1 - 2**-53, 0.3, 1 / 17, 1e-3, 1e-9, 2.0**-64, 2.0**-70])
def test_what_is_drawn_is_trials_in_increasing_order(n, rate):
    bits = np.random.default_rng(n).bytes
    drawn = successes(n, rate, bits)
    assert drawn.dtype == np.int64 and drawn.tolist() == sorted({*drawn.tolist()} & {*range(n)})
    if rate in (1.0, 1 - 2**-53):
        assert len(drawn) == n
    if rate < 1e-8:
        assert not len(drawn)


def gaps(drawn: np.ndarray, rate: float) -> float:
    """The p-value of the gaps in a draw of 4 million trials against the geometric law: those below
    100, of the successes that leave room for as long a one."""
    own = np.diff(drawn)[drawn[:-1] < 4_000_000 - 100] - 1
    counts = np.bincount(np.minimum(own, 100), minlength=101)
    expected = stats.geom.pmf(np.arange(1, 101), rate)
    return float(stats.chisquare(counts, np.append(expected, 1 - expected.sum()) * counts.sum())[1])


def test_gaps_are_geometric():
    """200,000 of them: a rate off by 1 % is seen at 4.5 standard deviations, by 5 % at 22."""
    rng = np.random.default_rng(5)
    draw = lambda rate: successes(4_000_000, rate, rng.bytes)  # noqa: E731
    assert gaps(drawn := draw(0.05), 0.05) > REJECT
    assert gaps(draw(0.0525), 0.05) < REJECT
    assert gaps(drawn + np.arange(len(drawn)), 0.05) < REJECT  # each a gap off by one
    asked: list[int] = []

    def twice(count: int) -> bytes:  # two blocks have as many each; places are honest
        asked.append(count)
        words = np.frombuffer(rng.bytes(count), np.uint64)
        return (np.repeat(words, 2)[: len(words)] if len(asked) == 1 else words).tobytes()

    assert gaps(successes(4_000_000, 0.05, twice), 0.05) < REJECT
