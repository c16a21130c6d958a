"""Cut a logical batch into physical ones, which affects memory and padding.

Which examples share a batch may hardly depend on any one of them: each product over a batch is
rounded, and if all others regrouped when one example leaves, the rounding of all of them would
change. So a batch is a leaf of a trie. An example's path is its own *key*: its length, then bits
that were drawn for it alone. A node with more examples than fit is split by the next bit.

**If one example leaves, at most** ``size`` **others get into another batch.** Only nodes on its
path lose an example, and whoever fits into a batch still does so without it. Take the highest node
that must be split with the example and need not be without it. If there is one, its other examples
are one batch now, hence at most ``size``; all others keep theirs. If there is none, only the leaf
changes, to which the example belonged. (Users with several rows are units of one key. Of a draw
that is truncated, one example leaves and another joins: twice as many.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from hf_dp import _validate

KEY_BITS = 64  # of a drawn key


def physical_batches(
    lengths: Sequence[int],
    keys: Sequence[int],
    size: int,
    max_tokens: int | None = None,
    shapes: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Cut the positions 0..len(lengths)-1 into groups of at most ``size``.

    On average they are ln 2 = 0.69 full. An empty draw gives no group. The longest examples come
    first, so that a group too large for the memory fails at once.

    Args:
        keys: below 2^64, drawn for each example alone. Examples of equal length and key share a
            group; of keys with 63 random bits, one pair in 2^63 is equal.
        max_tokens: the largest number of tokens in a group, including padding to its longest
            example. An example that is longer gets a group of its own.
        shapes: the shape of each example; only examples of equal shape share a group.
    """
    _validate.integer("size", size, 1)
    if max_tokens is not None:
        _validate.integer("max_tokens", max_tokens, 1)
    paths = [(length << KEY_BITS) | key for length, key in zip(lengths, keys, strict=True)]
    of_shape: dict[Hashable, list[int]] = {}
    for place in sorted(range(len(paths)), key=lambda place: -paths[place]):
        of_shape.setdefault(None if shapes is None else shapes[place], []).append(place)

    def fits(node: list[int]) -> bool:
        tokens = len(node) * lengths[node[0]]
        return len(node) <= size and (max_tokens is None or tokens <= max_tokens)

    groups = []
    nodes = list(of_shape.values())[::-1]
    while nodes:
        node = nodes.pop()
        first, last = paths[node[0]], paths[node[-1]]
        if len(node) == 1 or first == last or fits(node):
            groups.append(node)
            continue
        # The next bit that is not the same in all: skipping one that is splits nothing off.
        ones = first >> ((first ^ last).bit_length() - 1) << ((first ^ last).bit_length() - 1)
        cut = bisect_left(node, 1 - ones, key=lambda place: -paths[place])
        nodes += [node[cut:], node[:cut]]
    return groups
