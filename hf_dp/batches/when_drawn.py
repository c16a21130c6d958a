"""Rows that are looked at when they are drawn, where a look at all of them would take too long.

A bad row keeps its place: in the draw, in what a truncated draw keeps, in its user, in its physical
batch. There a synthetic row stands for it, which takes part in the forward and adds exactly 0 to
each part of the step's release. It is not drawn again, and nothing says that it was drawn: neither
an error nor a warning.

**Why this adds at most C, and moves nobody else.** Draw and truncation know places alone. Whether a
row is bad is a function of the row, of secret randomness of its own, and of public things: the
model's ranges, the columns of the first rows by place, and a declared length. The length is
declared, and not that of the longest row that was seen: if it were, leaving that row out would
make others bad, and one row would move what they add. (All of the first rows have the same columns,
so these are the same whichever of them is left out.) So a bad row is a row whose contribution is 0,
and the sensitivity to one row is that of rows that all are good.

**What is not a row's own error ends the run**: memory or files that ran out, a disk that fails,
tokens that were added to a tokenizer. It may come of rows before, or reach rows after. If such a
row added 0 and the run went on, one row could move what others add.

**Of a user** the other rows stay, and the mean counts the bad one with a gradient and a loss of 0.
What a user adds is a function of that user's rows, and is clipped once, so this is as sound as
leaving the user out; a user without any good row adds nothing to any part.

The first rows by place (:data:`hf_dp.statement.facts.FIRST` of them) are looked at beforehand, as
all are otherwise, so that a run with the wrong tokenizer does not train on noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from errno import EDQUOT, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC

from torch import Tensor

from hf_dp.batches.examples import Examples
from hf_dp.batches.limits import Limits
from hf_dp.batches.loader import Read
from hf_dp.batches.look_over import LookedOver, look_over
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Example, Layout, Leaf, leaves
from hf_dp.errors import DataError, SharedStateError, is_out_of_memory
from hf_dp.statement.facts import FIRST, LONGEST


@dataclass(frozen=True)
class FirstRows:
    """Looks at the first rows, or at ``all_rows``, and says what all must be like.

    Args: longest: the most numbers of a row in a column that is padded, as collated; None: all rows
        have as many as the first.
    """

    longest: int | None = None
    all_rows: bool = False

    def look_over(
        self,
        examples: Examples,
        padding: Padding,
        limits: Limits,
        *,
        workers: int = 0,
        quiet: bool = True,
    ) -> LookedOver:
        """Return what a look at these rows finds, with the layout that all rows must have.

        Raises: DataError, which names the row or the column.
        """
        first = None if self.all_rows else FIRST
        found = look_over(examples, padding, limits, workers=workers, quiet=quiet, first=first)
        known = found.layout.leaves.items()
        declared = {name: self._declared(name, leaf, padding) for name, leaf in known}
        return replace(found, layout=Layout(declared))

    def _declared(self, name: str, leaf: Leaf, padding: Padding) -> Leaf:
        dimension = padding.dimension(name, len(leaf.least))
        if not leaf.is_tensor or dimension < 1 or padding.fill(name, leaf) is None:
            return leaf
        low, high = leaf.least[dimension], leaf.most[dimension]
        if self.longest is None and low == high:
            return leaf
        if self.longest is None or high > self.longest:
            rows = "all" if self.all_rows else f"the first {FIRST:,}"
            raise DataError(
                f"Among {rows} rows, `{name}` has {low} to {high} numbers as collated, and "
                f"{LONGEST} is {self.longest}. Set it to the most that a row may have, a number "
                "that you know without looking at the rows."
            )
        sizes = [list(leaf.least), list(leaf.most)]
        sizes[0][dimension], sizes[1][dimension] = 1, self.longest
        return replace(leaf, least=tuple(sizes[0]), most=tuple(sizes[1]))


@dataclass(frozen=True)
class WhenDrawn:
    """Reads rows that were drawn, and looks at each.

    Args: layout: what all rows must have. limits: the values that they may hold. made_up: what
        stands for a row that is bad.
    """

    layout: Layout
    limits: Limits
    made_up: Example

    def read(self, examples: Examples, places: Sequence[int]) -> list[Read]:
        """Return the examples of rows that were drawn, in their order.

        Raises: DataError, which names no row, for what is not a row's own error.
        """
        return examples.each(places, self._one)

    def _one(self, read: Callable[[], Example]) -> Read:
        try:
            example = read()
            self.layout.check(example)
            self._check_sizes(example)
            self.limits.check(example)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as problem:  # also a panic in Rust: to stop would tell it was drawn
            if (cause := not_of_the_row(problem)) is None:
                return Read(self.made_up, False)
            raise DataError(
                f"A drawn row could not be read, and the cause may lie outside it ({cause}). This "
                "message does not say which row it was. Fix the cause, and resume."
            ) from None
        return Read(example, True)

    def _check_sizes(self, example: Example) -> None:
        for name, value in leaves(example):
            leaf = self.layout.leaves[name]
            if isinstance(value, Tensor) and not all(
                low <= size <= high for low, size, high in zip(leaf.least, value.shape, leaf.most)
            ):
                raise DataError(f"`{name}` has the shape {tuple(value.shape)}.")


# Memory, open files, room on a disk, a disk.
_OF_THE_MACHINE = (ENOMEM, EMFILE, ENFILE, ENOSPC, EDQUOT, EIO)


def not_of_the_row(problem: BaseException | None) -> str | None:
    """Return what, among the causes of an error, other rows or the machine may have a part in."""
    while problem is not None:
        if isinstance(problem, SharedStateError):
            return str(problem)
        if is_out_of_memory(problem):
            return "memory ran out"
        if isinstance(problem, OSError) and problem.errno in _OF_THE_MACHINE:
            return os.strerror(problem.errno)
        problem = problem.__cause__ or problem.__context__
    return None
