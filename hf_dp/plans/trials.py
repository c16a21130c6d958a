"""Which of many independent trials succeed: drawn exactly, at the cost of the successes alone.

Trials are cut into blocks of L = 2^j. A block draws first how many of its trials succeed, then
which. **This is the law of independent trials, with nothing rounded.** How many of L trials succeed
is Binomial(L, p), and given that number m each set of m trials is equally likely; both are drawn as
such. Blocks are independent, and so are trials beyond the last one, which are cut off.

- *How many.* Let U be uniform on [0, 1), with random bits as its digits. More than c succeed where
  U < T(c) = P(Binomial(L, p) > c). Whole numbers bound each T(c) from both sides, and 64 digits of
  U are compared with them. Where these do not decide (less than once in 2^59 blocks), U gets
  further digits and T(c) closer bounds, until they do.
- *Which.* m places of j random bits each; a block in which two are equal draws all m again. What is
  kept is uniform on the lists of m different places.

**The cost.** L p lies in (1/2, 1], except where one block holds all trials and L p is less. So n
trials have at most 2 n p + 1 blocks. m places all differ with the probability L! / ((L - m)! L^m);
m over that, on average over the binomial m, is at most L p e^(L p), so a block draws at most e
places on average. From p = 1/16 on L is 1: each trial compares its 64 bits with 2^64 p. (To skip
from success to success, as Bringmann and Friedrich 2013 do, costs the same, but the powers of 1 - p
that are compared with then differ from skip to skip. Those of one L are one small table.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

RandomBytes = Callable[[int], bytes]

WORD = 64  # digits of U at a time
_ONE_BY_ONE = 2 ** (WORD - 4)  # from this chance on, a block is a trial
_GUARD = 128  # further digits in between, so that bounds stay close


def successes(trials: int, rate: float, random_bytes: RandomBytes) -> np.ndarray:
    """Draw which of ``trials`` independent trials succeed, in increasing order, as int64.

    Args:
        trials: n, from 0 to 2^62.
        rate: each succeeds with the probability round(rate 2^64) / 2^64, exactly.
        random_bytes: the source of randomness, ``n -> n bytes``.
    """
    chance = round(rate * 2**WORD)
    if chance == 2**WORD:
        return np.arange(trials)
    if chance >= _ONE_BY_ONE:
        return np.flatnonzero(_words(trials, random_bytes) < np.uint64(chance))
    # Largest with 2^width p <= 1, and no more than all trials take.
    width = min(WORD - (chance - 1).bit_length(), max(0, trials - 1).bit_length())
    number = _numbers(-(-trials // 2**width), width, chance, random_bytes)
    blocks = np.repeat(np.arange(len(number)), number)
    found = [blocks[:0]]
    while len(blocks):
        places = _words(len(blocks), random_bytes) & np.uint64(2**width - 1)
        drawn = np.sort(blocks << width | places.astype(np.int64))  # block by block, as before
        again = np.isin(blocks, blocks[1:][drawn[1:] == drawn[:-1]])
        found.append(drawn[~again])
        blocks = blocks[again]
    together = np.sort(np.concatenate(found))
    return together[: np.searchsorted(together, trials)]


def _words(count: int, random_bytes: RandomBytes) -> np.ndarray:
    return np.frombuffer(random_bytes(WORD // 8 * count), dtype=np.uint64)


def _numbers(blocks: int, width: int, chance: int, random_bytes: RandomBytes) -> np.ndarray:
    """Draw how many trials succeed in each block, (blocks,)."""
    digits, bounds = _words(blocks, random_bytes), _tails(width, chance, WORD)
    low, high = (np.array(side[::-1], dtype=np.uint64) for side in zip(*bounds, strict=True))
    # Of tails in increasing order, those above U.
    least, most = (len(side) - np.searchsorted(side, digits, side="right") for side in (low, high))
    for block in np.flatnonzero(least != most):
        least[block] = _by_further_digits(int(digits[block]), width, chance, random_bytes)
    return least


def _by_further_digits(digits: int, width: int, chance: int, random_bytes: RandomBytes) -> int:
    known = WORD
    while True:
        digits = digits << WORD | int(_words(1, random_bytes)[0])
        known += WORD
        bounds = _tails(width, chance, known)
        least, most = (sum(digits < tail for tail in side) for side in zip(*bounds, strict=True))
        if least == most:
            return least


@functools.lru_cache(maxsize=64)
def _tails(width: int, chance: int, digits: int) -> list[tuple[int, int]]:
    """Return, for c = 0, 1, ..., whole numbers (at most, at least) 2^digits T(c): up to the first
    lower one that is 0. All that follow, then, are 0, and at most the last upper one."""
    size, one, fails = 2**width, 1 << digits + _GUARD, 2**WORD - chance
    least = most = fails << digits + _GUARD - WORD  # of one trial: that none succeeds
    for _ in range(width):
        least, most = _down(least * least, one), _up(most * most, one)
    none_above, at_most = least, most  # bounds of P(Binomial <= c), from both sides
    found: list[tuple[int, int]] = []
    for c in range(size):
        low = max(0, one - at_most) >> _GUARD
        found.append((low, _up(one - none_above, 1 << _GUARD)))
        if low == 0:
            break
        up, down = (size - c) * chance, (c + 1) * fails  # P(c + 1) / P(c)
        least, most = _down(least * up, down), _up(most * up, down)
        none_above, at_most = none_above + least, at_most + most
    return found


def _down(number: int, by: int) -> int:
    return number // by


def _up(number: int, by: int) -> int:
    return -(-number // by)
