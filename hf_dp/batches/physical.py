"""How a logical batch is cut into physical ones: memory and padding only, never the result."""

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
    """Positions 0..len(lengths)-1 cut into groups of at most ``size``: as few as can be, of such
    cuts one with least padding.

    Args: max_tokens: largest number of tokens of a group, padding to its longest example included;
        an example that is longer makes a group of its own. shapes: of each example; only those of
        equal shape share a group.

    Which group an example falls in changes padding and memory, never the clipped sum beyond
    rounding. An empty draw gives no group. The longest example comes first, so that one too large
    for the memory is met at once.
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

    # The best cut of the first `end` examples is a last group and the best cut of those before it.
    # Sorted as they are, a group that may be may also be without its first example: so the starts
    # to choose from are all those from `earliest` on.
    one_more = (
        int(longest.sum() + len(order) * longest.max(initial=0)) + 1
    )  # a group outweighs any padding
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
