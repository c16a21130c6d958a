"""The experts of a mixture, whose weights transformers holds in two parameters of three dimensions.

A token is worked on by the experts that its router chose. A *pair* is a token and one of its
experts. With g_p the output gradient of pair p and a_p its input, the gradient of the weights of
expert e is ``G_i[e] = sum_p g_p a_p^T`` over its pairs of example i. So it is zero for experts that
got no token of the example, and an expert's product is computed once for all examples. In norms,
pairs of different examples or experts do not meet:
``|G_i|^2 = sum_e sum_{p,q} (g_p . g_q)(a_p . a_q)``.

Which experts a token gets is the router's affair. It is a module of its own, and the experts'
outputs are multiplied by its scores, through which autograd reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_dp._borrowed import gated, is_experts
from hf_dp.clipping.gradients import PerExampleGradient, Weights, add_product
from hf_dp.clipping.rounding import Grams, Norms, accumulation_dtype, matmul_dtype, outer_norms
from hf_dp.clipping.tape import Tape, seen_in_backward

_AT_ONCE = 2**24  # numbers of both factors that are put in order for norms at once


def serves_experts(module: nn.Module) -> bool:
    """Return whether these are experts without biases, whose weights are parameters."""
    names = {"gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"}
    return is_experts(module) and set(module._parameters) == names


def run_experts(
    tape: Tape, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run all experts on their tokens, as ``grouped_mm`` does, and capture both products.

    Args:
        hidden_states: (N, d), tokens in the order of their examples.
        top_k_index: (N, k), the experts of each token; ``top_k_weights``, (N, k), their scores.
    """
    tape.refuse_parameter(module, hidden_states)
    tokens, chosen = top_k_index.shape
    # The pairs of one expert remain in the order of their examples.
    experts, order = top_k_index.flatten().sort(stable=True)
    (first, up), (_, down) = ((n, module.get_parameter(n)) for n in module._parameters)
    counts = experts.bincount(minlength=len(up)).tolist()

    def product(name: str, parameter: nn.Parameter, x: Tensor) -> Tensor:
        x = x.to(matmul_dtype(x))
        weights = tape.constant(parameter)
        each = weights if module.is_transposed else weights.mT
        output = torch.cat([part @ of_one for part, of_one in zip(x.split(counts), each)])
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return output
        tape.note_forward(module, name)
        see = partial(_capture, tape, module, name, counts, tokens)
        kept = x, experts, order // chosen
        return seen_in_backward(output, parameter, lambda own: own.data, see, *kept)

    inner = gated(module, product(first, up, hidden_states[order // chosen]))
    outer = product("down_proj", down, inner)
    outer = (outer * top_k_weights.flatten()[order, None])[order.argsort()]
    return outer.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _capture(
    tape: Tape,
    module: nn.Module,
    name: str,
    counts: list[int],
    tokens: int,
    saved: Sequence[Tensor],
    grad: Tensor,
) -> None:
    x, experts, token = saved
    examples = tape.expected_examples()
    tape.by_example(module, grad.new_empty(tokens, 1))  # refuses what is not all positions of each
    places = experts * examples + token // (tokens // examples)
    left, right = (x, grad) if module.is_transposed else (grad, x)
    tape.capture(module, name, Routed(left, right, places, counts, examples))


@dataclass
class Routed(PerExampleGradient):
    """``G_i[e] = sum_p left[p] right[p]^T`` over the pairs p of example i and expert e.

    Args:
        left: (P, m), and ``right``, (P, n).
        places: (P,), ascending: the expert of each pair times b, plus its example.
        counts: how many pairs each expert has.
        examples: b.
    """

    values = ("left", "right")
    left: Tensor
    right: Tensor
    places: Tensor
    counts: list[int]
    examples: int

    def fits(self, shape: torch.Size, examples: int) -> bool:
        own = (len(self.counts), self.left.shape[1], self.right.shape[1])
        return shape == own and self.examples == examples

    def norms(self, grams: Grams | None = None) -> Norms:
        dtype, device = accumulation_dtype(self.left.dtype), self.left.device
        total = torch.zeros(3, self.examples, dtype=torch.float64, device=device)
        for examples, left, right in self._segments():
            (found,) = outer_norms([(left, right)])
            each = torch.stack([found.squared, found.error, found.slack])
            total.index_add_(1, examples, each.double())
        return Norms(*total.to(dtype))

    def _segments(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield whose pairs some are, (s,), and their factors, (s, T, m) and (s, T, n). A row holds
        the pairs of one example and one expert, beside others that are about as many, and zeros."""
        found, lengths = self.places.unique_consecutive(return_counts=True)
        starts, width, longest = lengths.cumsum(0) - lengths, 1, int(lengths.max())
        while width < 2 * longest:
            some = ((lengths > width // 2) & (lengths <= width)).nonzero().flatten()
            step = max(1, _AT_ONCE // (width * (self.left.shape[1] + self.right.shape[1])))
            for few in some.split(step) if len(some) else ():
                place = torch.arange(width, device=few.device)
                outside = (place >= lengths[few, None])[..., None]
                pairs = (starts[few, None] + place).clamp(max=len(self.places) - 1)
                # No product: beside it stand other examples, and 0 * NaN is NaN.
                left, right = (x[pairs].masked_fill_(outside, 0) for x in (self.left, self.right))
                yield found[few] % self.examples, left, right
            width *= 2

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        dtype = accumulation_dtype(self.left.dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        of_pairs = weights.values.to(dtype)[self.places % self.examples, None]
        left, right = (
            (left * of_pairs, right) if left.shape[1] < right.shape[1] else (left, right * of_pairs)
        )
        for expert, pairs in enumerate(zip(left.split(self.counts), right.split(self.counts))):
            if len(pairs[0]):
                add_product(total[expert], pairs[0].mT, pairs[1])

    def size(self) -> Tensor:
        dtype = accumulation_dtype(self.left.dtype)
        left, right = (
            torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (self.left, self.right)
        )
        none = torch.zeros(self.examples, dtype=dtype, device=left.device)
        return none.index_add_(0, self.places % self.examples, left * right)

    def fingerprint(self) -> Tensor:
        return self.size()

    def keep_only(self, keep: Tensor) -> None:
        removed = ~keep[self.places % self.examples, None]
        self.left, self.right = (x.masked_fill(removed, 0) for x in (self.left, self.right))

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        def gradient(example: int, expert: int) -> Tensor:
            pairs = self.places == expert * self.examples + example
            return (self.left[pairs].to(dtype).mT @ self.right[pairs].to(dtype)).flatten()

        experts = range(rows.start, rows.stop)
        which = range(*examples.indices(self.examples))
        return torch.stack([torch.stack([gradient(i, e) for e in experts]) for i in which])

    def of_units(self, rows: int) -> Routed:
        expert, example = self.places // self.examples, self.places % self.examples
        units = self.examples // rows
        places = expert * units + example // rows
        return Routed(self.left, self.right, places, self.counts, units)

    def joined(self, other: Routed) -> Routed:
        places, order = torch.cat([self.places, other.places]).sort(stable=True)
        left, right = torch.cat([self.left, other.left]), torch.cat([self.right, other.right])
        counts = [sum(each) for each in zip(self.counts, other.counts, strict=True)]
        return Routed(left[order], right[order], places, counts, self.examples)
