"""Cut a logical batch into physical ones; this affects memory and padding, never the result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from hf_dp import _validate


def physical_batches(
    lengths: Sequence[int],
    size: int,
    max_tokens: int | None = None,
    shapes: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Cut the positions 0..len(lengths)-1 into as few groups of at most ``size`` as possible.

    Among the cuts with the fewest groups, one with the least padding is chosen. The group of an
    example affects padding and memory; it changes the clipped sum by no more than rounding. An
    empty draw gives no group. The longest example comes first, so that a group too large for the
    memory fails at once.

    Args:
        max_tokens: the largest number of tokens in a group, including padding to its longest
            example. An example that is longer gets a group of its own.
        shapes: the shape of each example; only examples of equal shape share a group.
    """
    _validate.integer("size", size, 1)
    if max_tokens is not None:
        _validate.integer("max_tokens", max_tokens, 1)
    kind: Sequence[Hashable] = [None] * len(lengths) if shapes is None else shapes
    longest_of: dict[Hashable, int] = {}
    for of_kind, length in zip(kind, lengths, strict=True):
        longest_of[of_kind] = max(length, longest_of.get(of_kind, 0))
    place = {
        each: number
        for number, each in enumerate(sorted(longest_of, key=lambda each: -longest_of[each]))
    }
    order = sorted(
        range(len(lengths)), key=lambda position: (place[kind[position]], -lengths[position])
    )
    longest = np.array([lengths[position] for position in order], np.int64)

    def together(start: int, end: int) -> bool:
        tokens = (end - start) * max(1, int(longest[start]))
        alike = kind[order[start]] == kind[order[end - 1]]
        return end - start == 1 or (
            alike and end - start <= size and (max_tokens is None or tokens <= max_tokens)
        )

    # The best cut of the first `end` examples is a last group plus the best cut of those before it.
    # Examples are sorted, so a group that is allowed is also allowed without its first example. The
    # possible starts of the last group are therefore all those from `earliest` on.
    # One more group must cost more than any padding.
    one_more = int(longest.sum() + len(order) * longest.max(initial=0)) + 1
    cost, start_of = np.zeros(len(order) + 1, np.int64), [0] * (len(order) + 1)
    earliest = 0
    for end in range(1, len(order) + 1):
        while not together(earliest, end):
            earliest += 1
        costs = cost[earliest:end] + np.arange(end - earliest, 0, -1) * longest[earliest:end]
        start_of[end] = earliest + int(costs.argmin())
        cost[end] = costs.min() + one_more
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[start_of[end] : end])
        end = start_of[end]
    return groups[::-1]
