"""Which form of a weight's per-example gradients is cheapest: factors, or the gradients themselves.

The sum over T positions of outer products is a gradient of shape (m, n). Non-private training forms
the sum of these gradients over all examples in one product, of ``2 T m n`` flops an example. Exact
clipping needs the norm of each as well, and has two ways to it:

* Factors: norms from Gram matrices, ``T^2 (m + n)`` flops by their symmetry, and then the one
  weighted product. ``T (m + n)`` numbers an example are kept until all norms are known.
* Explicit: the product is formed example by example, for the same ``2 T m n`` flops. Norm and
  weighted sum then read what was formed. ``m n`` numbers an example are kept, and nothing remains
  to be multiplied.

Where the explicit form takes fewer bytes it is chosen as soon as a use is seen (:func:`compact`):
in float32 that is ``m n < T (m + n)``, and there it takes less time, too. Beyond that it trades
memory for time: :func:`make_explicit` spends what a budget allows, where it saves the most time for
its memory. Gram matrices need no budget. In float32 they are used where
``T <= m n / (m + n) <= (m + n) / 4``, so ``T^2`` is at most a quarter of what the factors take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_dp.clipping.gradients import Dense, OuterProducts, PerExampleGradient
from hf_dp.clipping.products import outer_sums
from hf_dp.clipping.rounding import accumulation_dtype, full_precision

# What each form costs beside the product that both need, as flops of that product take their time.
# Gram matrices take _GRAM T^2 (m + n) and reading the factors _POSITION T (m + n). A number of an
# explicit gradient takes _NUMBER: it is written once and read twice. Fitted to times of 16 layers,
# T from 32 to 1,024, on two cores: the cheaper form comes out right for 15.
_GRAM, _POSITION, _NUMBER = 0.9, 180.0, 80.0


@dataclass(frozen=True)
class Weight:
    """The cost of a weight's gradients in one physical batch, in either form.

    Attributes:
        positions: T, over all uses of the weight together.
        explicit: numbers of explicit gradients, b m n.
        factors: numbers of factors, b T (m + n); of a factor that k weights share, the k-th part.
        more_bytes: what the explicit form takes beyond the factors; factors may be 16 bits wide.
    """

    positions: int
    explicit: int
    factors: float
    more_bytes: float

    @property
    def smaller(self) -> bool:
        """Return whether the explicit form takes less memory."""
        return self.more_bytes < 0

    @property
    def saved(self) -> float:
        """Return the time that the explicit form saves, in flops; negative where it costs more."""
        return (_GRAM * self.positions + _POSITION) * self.factors - _NUMBER * self.explicit


def compact(uses: Sequence[PerExampleGradient], shape: torch.Size) -> list[PerExampleGradient]:
    """Return the gradients of one parameter's uses, explicit where that takes less memory.

    A parameter used once is decided as soon as it is seen, by the same function.
    """
    weight = _weight(uses)
    if weight is None or not weight.smaller:
        outer = [use for use in uses if isinstance(use, OuterProducts)]
        return [*outer, *(use for use in uses if not isinstance(use, OuterProducts))]
    return made_explicit(uses, shape)


def make_explicit(
    uses: MutableMapping[nn.Parameter, list[PerExampleGradient]], spare: float
) -> None:
    """Form gradients explicitly where that saves time, as far as memory allows.

    Args:
        uses: of each trainable parameter, all of them; changed in place.
        spare: bytes that explicit gradients may take beyond the factors that they replace.
    """
    for parameter in worth_it(uses, spare):
        uses[parameter] = made_explicit(uses[parameter], parameter.shape)


def worth_it(
    uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]], spare: float
) -> list[nn.Parameter]:
    """Return the parameters for whose gradients the explicit form is chosen.

    Those come first that save the most time for a byte.
    """
    owners = Counter(each.data_ptr() for of_one in uses.values() for each in _factors(of_one))
    faster: list[tuple[float, float, nn.Parameter]] = []
    for parameter, of_one in uses.items():
        weight = _weight(of_one, owners)
        if weight is not None and weight.saved > 0:
            more = weight.more_bytes
            faster.append((weight.saved / max(1.0, more), more, parameter))
    chosen = []
    for _, more, parameter in sorted(faster, key=lambda each: -each[0]):
        if more <= spare:
            spare -= more
            chosen.append(parameter)
    return chosen


def form_name(uses: Sequence[PerExampleGradient]) -> str:
    """Return in words which forms the uses of one parameter have, such as "factors, lookups"."""
    return ", ".join(sorted({use.form for use in uses}))


def held_bytes(uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]]) -> int:
    """Return the bytes of the inputs and output gradients that outer products hold."""
    held = {each.data_ptr(): each.nbytes for of_one in uses.values() for each in _factors(of_one)}
    return sum(held.values())


def _factors(uses: Sequence[PerExampleGradient]) -> Iterator[torch.Tensor]:
    for use in uses:
        if isinstance(use, OuterProducts):
            yield from (use.left, use.right)


def _weight(
    uses: Sequence[PerExampleGradient], owners: Mapping[int, int] | None = None
) -> Weight | None:
    """Return what the outer products among the uses take, None if there are none.

    Args:
        owners: how many weights share a factor, by its address; by default none is shared.
    """
    outer = [use for use in uses if isinstance(use, OuterProducts)]
    if not outer:
        return None
    (examples, _, height), width = outer[0].left.shape, outer[0].right.shape[2]
    factors = sum(
        each.numel() / (1 if owners is None else owners[each.data_ptr()])
        for each in _factors(outer)
    )
    positions, explicit = sum(use.left.shape[1] for use in outer), examples * height * width
    dtype = outer[0].left.dtype
    more = accumulation_dtype(dtype).itemsize * explicit - dtype.itemsize * factors
    return Weight(positions, explicit, factors, more)


def made_explicit(
    uses: Sequence[PerExampleGradient], shape: torch.Size
) -> list[PerExampleGradient]:
    """Return the uses with their outer products summed to one explicit gradient, which is first."""
    outer = [use for use in uses if isinstance(use, OuterProducts)]
    total: torch.Tensor | None = None
    with torch.no_grad(), full_precision():
        for use in outer:
            total = outer_sums(use.left, use.right, total)
    assert total is not None
    first, *others = (use.size() for use in outer)
    explicit = Dense(total.view(-1, *shape), owned=True, of_terms=sum(others, first))
    return [explicit, *(use for use in uses if not isinstance(use, OuterProducts))]
