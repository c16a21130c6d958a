"""How far a computed norm or sum can be from the true one, and the products that both are made of.

Every norm comes with a bound on its rounding error and with one on the rounding of the clipped sum
(:class:`Norms`). Both count in units u = ``unit(dtype)``.

The Gram form sums ``T * T`` signed terms, which can cancel to a result far smaller than the terms
(Li et al., section 4, does not treat this). Its ``error`` is ``u (S + D)``. S is the sum of the
terms' magnitudes: errors of large entries are proportional to them. D is
``sum_t |left_t|^2 |right_t|^2``: errors of small entries are independent, of size
``eps |left_s||left_t||right_s||right_t|``, and add up like a random walk.

Squares of numbers as small as 1e-20 are lost to underflow, even where the other factor is large
enough to compensate. An entry of a Gram matrix of d features loses at most ``d tiny``, and the sum
of terms ``d tiny sum_{s,t} |r_s . r_t| <= d tiny T sum_t |r_t|^2``, with r the other factor.
``error`` includes this loss, for both factors, where it could matter to a clipping norm.

The clipped sum adds the same ``left_t right_t^T``. Where they cancel, its rounding can exceed their
sum. ``slack = u sum_t |left_t||right_t|`` bounds it and is added to the norm before the weight is
computed. That of a dense gradient is ``u`` times its norm, for its addition to those of others. One
that was formed from outer products keeps their slack: which form a gradient gets depends on the
batch, and the weight of an example must not.

Where an example's terms cancel entirely, to 1e-7 of their size, what is left of it is rounding, and
this differs between forms, kernels and neighbors. So the slack bounds the weight by itself, too
(:func:`hf_dp.plans.rounding.slack_cap`).

**Products.** Factors of 16 bits are widened first, which is exact, so none of torch's switches for
products of 16 bits reaches a norm or a sum. :func:`full_precision` turns those off that would
shorten factors of 32 bits. A GPU's tensor cores multiply bfloat16 exactly, too, and 14 times as
fast. But what they add up they cut off: an H100's sums of positive terms were too small by 29 of
their 2^-24ths after 1,024 terms and by 500 after 8,192. A large first term makes it 225 after
1,024, in a model of these sums that gives the other figures. :func:`unit` allows 64.

**Norms from Gram matrices.** For ``G = sum_t left_t right_t^T``,
``|G|^2 = sum_{s,t} (left_s . left_t)(right_s . right_t)`` (Li et al., section 4, eq. 2), so the sum
need not be formed. The Gram matrices of b examples' vectors (b, T, d), ``vectors[s] . vectors[t]``,
take ``2 b T^2 d`` flops, or half of that where their symmetry is used: no block is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# The smallest C that the engine accepts, and an error that is negligible beside its square.
SMALLEST_CLIPPING_NORM = 1e-9
NEGLIGIBLE = 1e-4 * SMALLEST_CLIPPING_NORM**2
# Blocked float sums of some thousand terms are accurate to a few eps: 18 at most in tests/clipping.
_ROUNDING = 32.0
_BLOCK = 1024  # numbers whose norm is taken at once


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms and sums: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product on ``x`` runs under the current autocast. Autocast
    does not reach the operations in the backward of a custom autograd function."""
    on = torch.is_autocast_enabled(x.device.type)
    if on and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def unit(dtype: torch.dtype) -> float:
    """Return u, the relative rounding error allowed for a sum in this dtype."""
    return _ROUNDING * torch.finfo(dtype).eps


def zero_sum(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return zeros of the type of sums over physical batches: float64. A sum must not depend on its
    history. A row that is left out changes which batches follow which; in float32 the rounding of
    2,596 additions differed by 1.39 C."""
    return torch.zeros(tuple(shape), dtype=torch.float64, device=device)


# What torch lets products of float32 matrices round to, by kind of device.
_PRODUCTS: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
}
_CONVOLUTIONS: tuple[Any, ...] = (
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
)


def product_precision(device: str) -> str:
    """Return what products of float32 matrices round their factors to on a kind of device. This is
    ``"float32"``, ``"tf32"`` (10 bits) or ``"bf16"`` (7 bits), whichever of torch's functions set
    it."""
    found = _PRODUCTS[device].fp32_precision if device in _PRODUCTS else "none"
    return "float32" if found in ("none", "ieee") else str(found)


@contextmanager
def full_precision() -> Iterator[None]:
    """Form norms and sums in true float32 inside, and restore what was set outside. TF32 products
    round to 1e-3, far more than the error that the norms allow for. What forward and backward round
    is another matter: it makes the gradients other ones, and these are bounded."""
    kept = [(each, each.fp32_precision) for each in _PRODUCTS.values()]
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch.backends, of which the older function knows nothing
        before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        _restore(kept)


@contextmanager
def full_convolutions() -> Iterator[None]:
    """Run convolutions in true float32 inside, which cuDNN otherwise rounds to TF32. No module may
    run inside: there, ``torch.backends.cudnn.allow_tf32`` cannot be read."""
    kept = [(each, each.fp32_precision) for each in _CONVOLUTIONS]
    for each in _CONVOLUTIONS:
        each.fp32_precision = "ieee"
    try:
        yield
    finally:
        _restore(kept)


def _restore(kept: Iterable[tuple[Any, str]]) -> None:
    for switch, value in kept:
        if switch.fp32_precision != value:
            switch.fp32_precision = "none"  # what is set for all then holds, as before
            if switch.fp32_precision != value:
                switch.fp32_precision = value


@dataclass
class Norms:
    """Squared norms of b examples; each field has shape (b,)."""

    squared: Tensor
    error: Tensor  # a bound on their rounding error
    slack: Tensor  # a bound on the rounding of what is added to the sum


def squared_norms(values: Tensor) -> Tensor:
    """Return the squared norms, (b,), of b vectors (b, n). They are computed in blocks: over 4e7
    numbers, a float32 norm on the CPU loses 1.4 % of the squared norm."""
    if values.shape[1] <= _BLOCK:
        return torch.linalg.vector_norm(values, dim=1).square()
    blocks = values.shape[1] // _BLOCK
    whole = values[:, : blocks * _BLOCK].reshape(len(values), blocks, _BLOCK)
    norms = torch.linalg.vector_norm(whole, dim=2).double().square().sum(1)
    rest = torch.linalg.vector_norm(values[:, blocks * _BLOCK :], dim=1).double().square()
    return (norms + rest).to(values.dtype)


# A product of few vectors (fewer than 12 where this was measured) runs in kernels that add up the
# features one by one. They lost 5e-4 over 256,000 features, 1e-5 over 3,072 and 3e-6 over 1,024.
# So products of fewer than _FEW vectors are computed over _MANY_FEATURES features at a time.
_FEW, _MANY_FEATURES = 16, 1024


def dots(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``one[i, s] . other[i, t]``, (b, S, T), of vectors (b, S, d) and (b, T, d). The result
    has the given dtype, float32 or float64."""
    one, other = one.to(dtype), other.to(dtype)
    features = one.shape[2]
    if features <= _MANY_FEATURES or min(one.shape[1], other.shape[1]) >= _FEW:
        return torch.bmm(one, other.mT)
    total = torch.bmm(one[..., :_MANY_FEATURES], other[..., :_MANY_FEATURES].mT)
    for start in range(_MANY_FEATURES, features, _MANY_FEATURES):
        part = slice(start, start + _MANY_FEATURES)
        total.baddbmm_(one[..., part], other[..., part].mT)
    return total


def outer_sums(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Return ``total[i] + sum_t left[i, t] right[i, t]^T``, (b, m, n), in float32 or better. The
    factors are (b, T, m) and (b, T, n); a total is changed in place."""
    dtype = accumulation_dtype(left.dtype)
    left, right = left.to(dtype).mT, right.to(dtype)
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


Result = TypeVar("Result")


class LastOf(Generic[Result]):
    """A function of vectors and a dtype that remembers its last result, not to be changed in place.
    Query, key and value projections read the same input, and so do gate and up projections."""

    def __init__(self, function: Callable[[Tensor, torch.dtype], Result]):
        self._function = function
        self._key: object = None
        self._vectors: Tensor | None = None  # held, so that no other tensor gets its address
        self._result: Result

    def __call__(self, vectors: Tensor, dtype: torch.dtype) -> Result:
        place = vectors.data_ptr(), vectors.shape, vectors.stride(), vectors.dtype
        key = (*place, vectors._version, dtype)
        if self._vectors is None or key != self._key:
            self._result = self._function(vectors, dtype)
            self._key, self._vectors = key, vectors
        return self._result


Grams = LastOf[list[Tensor]]  # of :func:`gram_blocks`

# Gram matrices are symmetric: those of even length are halved, so that only one of the two mixed
# blocks is computed. Products below this length are too small to run at full speed (a GPU needs
# larger ones).
_SMALLEST_HALVED = {"cpu": 64, "cuda": 512}


def gram_blocks(vectors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the blocks of ``vectors[s] . vectors[t]``, (b, T, T), that symmetry leaves.

    These are the mixed blocks, which count twice, and the blocks on the diagonal, which come last.
    Each halving gives one mixed block, the product of the second half with the first; then the two
    halves of each example continue as two examples of half the length. Vectors of zeros fill up to
    lengths at which products are fast; they add nothing.
    """
    vectors = vectors.to(dtype)  # once for all blocks
    length = vectors.shape[1]
    halvings = 0
    while length >> halvings > _SMALLEST_HALVED.get(vectors.device.type, 64):
        halvings += 1
    missing = -length % (4 << halvings)
    # Measured: 13 vectors are slower than 16, but one vector beyond any other multiple of 4 is no
    # slower than padding to the next one.
    if missing and (halvings or length == 13 or (length > 12 and missing <= 2)):
        vectors = F.pad(vectors, (0, 0, 0, missing))
    blocks = []
    for _ in range(halvings):
        half = vectors.shape[1] // 2
        blocks.append(dots(vectors[:, half:], vectors[:, :half], dtype))
        vectors = vectors.reshape(2 * len(vectors), half, -1)
    return [*blocks, dots(vectors, vectors, dtype)]


def sum_of_blocks(blocks: Sequence[Tensor], examples: int) -> Tensor:
    """Return the sum of all entries, (examples,), of matrices as :func:`gram_blocks` lists them."""
    *mixed, total = (block.view(examples, -1).sum(1) for block in blocks)
    for each in mixed:
        total = total.add(each, alpha=2)
    return total


# Pairs of Gram matrices up to this total size are reduced together: an operation on small matrices
# takes less time than starting it. On a GPU, one on 2^20 numbers does, too.
_TOGETHER = {"cpu": 2**18, "cuda": 2**23}  # numbers


def outer_norms(
    factors: Iterable[tuple[Tensor, Tensor]], grams: Grams | None = None
) -> list[Norms]:
    """Return the norms of each sum of outer products, in order. The factors are left (b, T, m) and
    right (b, T, n); ``grams`` remembers the last right one's Gram matrix. A few pairs of matrices
    (b, T, T) are held at once."""
    grams = LastOf(gram_blocks) if grams is None else grams
    found: list[Norms] = []
    waiting: list[GramPair] = []
    for left, right in factors:
        dtype = accumulation_dtype(left.dtype)
        of_right = grams(right, dtype)
        pair = GramPair(gram_blocks(left, dtype), of_right, max(left.shape[2], right.shape[2]))
        numbers = (len(waiting) + 1) * sum(block.numel() for block in pair.left)
        most = _TOGETHER.get(left.device.type, 2**18)
        if waiting and not (waiting[0].alike(pair) and numbers <= most):
            found += norms_from_grams(waiting)
            waiting = []
        waiting.append(pair)
    return found + norms_from_grams(waiting) if waiting else found


@dataclass
class GramPair:
    """The Gram matrices of both factors, as blocks of (b, T, T), and the wider one's features."""

    left: list[Tensor]
    right: list[Tensor]  # possibly shared with other pairs
    features: int

    def alike(self, other: GramPair) -> bool:
        """Return whether both can be stacked."""
        last, also = self.left[-1], other.left[-1]
        same = last.shape == also.shape and last.dtype == also.dtype and last.device == also.device
        return same and len(self.left) == len(other.left)


def norms_from_grams(pairs: Sequence[GramPair]) -> list[Norms]:
    """Return the norms of pairs of the same length; overwrites their left blocks."""
    lefts = _stacked([pair.left for pair in pairs])
    rights = _stacked([pair.right for pair in pairs])
    count = len(lefts[0])  # one for each pair and example
    of_left, of_right = (
        blocks[-1].diagonal(dim1=1, dim2=2).reshape(count, -1) for blocks in (lefts, rights)
    )
    trace = of_left * of_right
    limits = torch.finfo(trace.dtype)
    lost = (of_left.sum(1) + of_right.sum(1)).mul_(
        limits.tiny * max(pair.features for pair in pairs) * trace.shape[1]
    )
    # terms[s, t] = (left_s . left_t)(right_s . right_t)
    terms = [left.mul_(right) for left, right in zip(lefts, rights, strict=True)]
    squared = sum_of_blocks(terms, count)
    magnitude = sum_of_blocks([block.abs_() for block in terms], count)
    error = unit(trace.dtype) * (magnitude + trace.sum(1)) + F.threshold(lost, NEGLIGIBLE, 0.0)
    slack = unit(trace.dtype) * trace.sqrt_().sum(1)
    by_pair = (result.view(len(pairs), -1).unbind() for result in (squared, error, slack))
    return [Norms(*of_pair) for of_pair in zip(*by_pair, strict=True)]


def _stacked(pairs: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the blocks (b, T, T) of each pair as blocks of (pairs * b, T, T)."""
    if len(pairs) == 1:
        return pairs[0]
    return [torch.stack(level).flatten(0, 1) for level in zip(*pairs, strict=True)]
