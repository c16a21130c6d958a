"""How per-example gradients are held: as factors or explicitly, alone or side by side.

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

Small explicit gradients (biases, norms, adapters) are formed together (:class:`Together`) and lie
side by side in one matrix (:func:`bundled`). A transformer has more vectors than matrices, and each
vector needs its own few operations on a few thousand numbers: on short batches, starting those
operations took longer than the arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Dense, OuterProducts, PerExampleGradient, Unformed, Weights
from hf_dp.clipping.rounding import accumulation_dtype, full_precision, outer_sums, zero_sum

Uses = Mapping[nn.Parameter, Sequence[PerExampleGradient]]

# What each form costs beside the product that both need, as flops of that product take their time.
# Gram matrices take _GRAM T^2 (m + n) and reading the factors _POSITION T (m + n). A number of an
# explicit gradient takes _NUMBER: it is written once and read twice. Fitted to times of 16 layers,
# T from 32 to 1,024, on two cores: the cheaper form comes out right for 15.
_GRAM, _POSITION, _NUMBER = 0.9, 180.0, 80.0


@dataclass(frozen=True)
class Weight:
    """The cost of a weight's gradients in one physical batch, in either form."""

    positions: int  # T, over all uses of the weight together
    explicit: int  # numbers of explicit gradients, b m n
    factors: float  # numbers of factors, b T (m + n); where k weights share one, its k-th part
    more_bytes: float  # of the explicit form beyond the factors, which may be 16 bits wide

    @property
    def smaller(self) -> bool:
        """Return whether the explicit form takes less memory."""
        return self.more_bytes < 0

    @property
    def saved(self) -> float:
        """Return the time that the explicit form saves, in flops; negative where it costs more."""
        return (_GRAM * self.positions + _POSITION) * self.factors - _NUMBER * self.explicit


def compact(uses: Sequence[PerExampleGradient], shape: torch.Size) -> list[PerExampleGradient]:
    """Return the gradients of one parameter's uses, explicit where that takes less memory. A
    parameter used once is decided as soon as it is seen, by the same function."""
    outer = _outer(uses)
    if is_smaller_explicit(uses):
        return made_explicit(uses, shape)
    return [*outer, *(use for use in uses if not isinstance(use, OuterProducts))]


def is_smaller_explicit(uses: Sequence[PerExampleGradient]) -> bool:
    """Return whether there are outer products that take less memory explicitly."""
    outer = _outer(uses)
    return bool(outer) and _weight(outer).smaller


def make_explicit(
    uses: MutableMapping[nn.Parameter, list[PerExampleGradient]], spare: float
) -> None:
    """Form gradients explicitly where that saves time, in place, as far as memory allows. Explicit
    gradients may take ``spare`` bytes beyond the factors that they replace."""
    together = Together(lambda parameter: None)
    for parameter in worth_it(uses, spare):
        use, *others = uses[parameter]
        if others or not isinstance(use, OuterProducts):
            uses[parameter] = made_explicit(uses[parameter], parameter.shape)
        else:
            give = partial(uses[parameter].__setitem__, 0)
            together.add(parameter, unformed(use, parameter.shape), give)
    together.form()


def unformed(use: OuterProducts, shape: torch.Size) -> Unformed:
    """Return the explicit gradient of outer products, not formed yet."""
    return Unformed(_explicit, (use.left, use.right), (shape,), len(use.left) * shape.numel())


def _explicit(left: Tensor, right: Tensor, shape: torch.Size) -> Dense:
    (explicit,) = made_explicit([OuterProducts(left, right)], shape)
    assert isinstance(explicit, Dense)
    return explicit


# Numbers in a tensor, and in all that wait for one operation. Larger ones would take more time to
# copy than the operations do.
_SMALL, _WAITING = {"cpu": 2**14, "cuda": 2**18}, {"cpu": 2**18, "cuda": 2**23}

Give = Callable[[Dense], object]


class Together:
    """Forms gradients of uses that met tensors of equal shapes by the operations of one use: those
    tensors stand one after the other in the first dimension. Each example's gradient is formed of
    its own rows alone, so what stands beside them does not matter. What waits is bounded, so that
    hardly more memory is held.

    Args: reserve: is told at once whose gradients wait.
    """

    def __init__(self, reserve: Callable[[nn.Parameter], object]) -> None:
        self._reserve = reserve
        self._waiting: dict[Hashable, list[tuple[Unformed, Give]]] = {}

    def add(self, parameter: nn.Parameter, use: Unformed, give: Give) -> None:
        """Give the gradients of a use to ``give``: now, or before :meth:`form` returns."""
        numbers = [each.numel() for each in use.tensors]
        kind, alike = use.tensors[0].device.type, all(e.is_contiguous() for e in use.tensors)
        most = _WAITING.get(kind, 2**18) // max(1, sum(numbers) + use.numbers)
        if not alike or max(numbers) > _SMALL.get(kind, 2**14) or most < 2:
            give(use.formed())
            return
        self._reserve(parameter)
        shapes = [(each.shape, each.dtype, each.device) for each in use.tensors]
        waiting = self._waiting.setdefault((use.form, use.given, *shapes), [])
        waiting.append((use, give))
        if len(waiting) == most:
            _form(waiting)
            waiting.clear()

    @torch.no_grad()
    def form(self) -> None:
        """Form what waits."""
        for waiting in self._waiting.values():
            _form(waiting)
        self._waiting.clear()


def _form(waiting: Sequence[tuple[Unformed, Give]]) -> None:
    if len(waiting) < 2:
        for use, give in waiting:
            give(use.formed())
        return
    first, count = waiting[0][0], len(waiting)
    columns = zip(*(use.tensors for use, _ in waiting), strict=True)
    formed = first.form(*map(torch.cat, columns), *first.given)
    of_terms = formed.of_terms
    sizes = [None] * count if of_terms is None else of_terms.chunk(count)
    for (_, give), each, size in zip(waiting, formed.gradients.chunk(count), sizes, strict=True):
        give(Dense(each, owned=True, of_terms=size))


def worth_it(uses: Uses, spare: float) -> list[nn.Parameter]:
    """Return the parameters whose explicit gradients save the most time for a byte, in order."""
    owners = Counter(each.data_ptr() for of_one in uses.values() for each in _factors(of_one))
    faster: list[tuple[float, float, nn.Parameter]] = []
    for parameter, of_one in uses.items():
        outer = _outer(of_one)
        if outer and (weight := _weight(outer, owners)).saved > 0:
            rate = weight.saved / max(1.0, weight.more_bytes)
            faster.append((rate, weight.more_bytes, parameter))
    chosen = []
    for _, more, parameter in sorted(faster, key=lambda each: -each[0]):
        if more <= spare:
            spare -= more
            chosen.append(parameter)
    return chosen


def held_bytes(uses: Uses) -> int:
    """Return the bytes of the inputs and output gradients that outer products hold."""
    held = {each.data_ptr(): each.nbytes for of_one in uses.values() for each in _factors(of_one)}
    return sum(held.values())


def _outer(uses: Sequence[PerExampleGradient]) -> list[OuterProducts]:
    return [use for use in uses if isinstance(use, OuterProducts)]


def _factors(uses: Sequence[PerExampleGradient]) -> Iterator[Tensor]:
    for use in _outer(uses):
        yield from (use.left, use.right)


def _weight(outer: Sequence[OuterProducts], owners: Mapping[int, int] | None = None) -> Weight:
    """Return what the outer products of one weight take. ``owners`` says how many weights share a
    factor, by its address; by default none is shared."""
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
    outer = _outer(uses)
    total: Tensor | None = None
    with torch.no_grad(), full_precision():
        for use in outer:
            total = outer_sums(use.left, use.right, total)
    assert total is not None
    first, *others = (use.size() for use in outer)
    explicit = Dense(total.view(-1, *shape), owned=True, of_terms=sum(others, first))
    return [explicit, *(use for use in uses if not isinstance(use, OuterProducts))]


# Numbers in one example's gradient; copying a larger one costs more than the operations saved. And
# the numbers of a bundle, which are there twice while it is made.
_LARGEST, _IN_BUNDLE = {"cpu": 2**14, "cuda": 2**18}, 2**25


@dataclass
class Bundle:
    """The per-example gradients of parameters that are clipped together, (b, sum of sizes)."""

    parameters: list[nn.Parameter]
    gradient: Dense


def bundled(
    uses: dict[nn.Parameter, list[PerExampleGradient]],
    groups: Mapping[nn.Parameter, int],
    apart: Container[nn.Parameter],
) -> list[Bundle]:
    """Take every parameter with one small dense gradient out of ``uses``, except those ``apart``.
    Return a bundle for each group, dtype and device."""
    members: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, (first, *others) in uses.items():
        if others or parameter in apart or not isinstance(first, Dense):
            continue
        key = (groups[parameter], first.gradients.dtype, first.gradients.device)
        if parameter.numel() <= _LARGEST.get(key[2].type, 2**14):
            members.setdefault(key, []).append(parameter)
    bundles = []
    for parameters in [some for of_key in members.values() for some in _parted(of_key, uses)]:
        dense = [use for p in parameters for use in uses.pop(p) if isinstance(use, Dense)]
        gradients = torch.cat([use.gradients.flatten(1) for use in dense], 1)
        known = any(use.of_terms is not None for use in dense)
        sizes = [use.size() for use in dense] if known else []
        size = torch.linalg.vector_norm(torch.stack(sizes), dim=0) if known else None
        bundles.append(Bundle(parameters, Dense(gradients, owned=True, of_terms=size)))
    return bundles


def _parted(parameters: Sequence[nn.Parameter], uses: Uses) -> Iterator[list[nn.Parameter]]:
    """Yield parameters that have at most _IN_BUNDLE numbers of gradients together."""
    some: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        more = sum(use.gradients.numel() for use in uses[parameter] if isinstance(use, Dense))
        if some and numbers + more > _IN_BUNDLE:
            yield some
            some, numbers = [], 0
        some.append(parameter)
        numbers += more
    yield some


class RunningSums(dict[nn.Parameter, Tensor]):
    """The sums of parameters over physical batches, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self._flat: dict[tuple[nn.Parameter, ...], list[Tensor]] = {}  # views of sums, by bundles

    def of(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Return the running sum of a parameter, to be added to in place; at first zeros."""
        if parameter not in self:
            self[parameter] = zero_sum(parameter.shape, device)
        return self[parameter]

    def add_bundle(self, bundle: Bundle, weights: Weights) -> None:
        """Add the weighted gradients of a bundle, to all of its sums by one operation."""
        key, device = tuple(bundle.parameters), bundle.gradient.gradients.device
        if key not in self._flat:
            new = [parameter for parameter in key if parameter not in self]
            sizes = [parameter.numel() for parameter in new]
            for parameter, sums in zip(new, zero_sum([sum(sizes)], device).split(sizes)):
                self[parameter] = sums.view(parameter.shape)
            self._flat[key] = [self.of(parameter, device).view(-1) for parameter in key]
        totals = self._flat[key]
        for part in bundle.gradient.weighted(weights):
            torch._foreach_add_(totals, part.double().split([each.numel() for each in totals]))
