"""The experts of a mixture, whose weights transformers holds in two parameters of three dimensions.

A token is worked on by the experts that its router chose. A *pair* is a token and one of its
experts. With g_p the output gradient of pair p and a_p its input, the gradient of the weights of
expert e is ``G_i[e] = sum_p g_p a_p^T`` over its pairs of example i. So it is zero for experts that
got no token of the example, and an expert's product is computed once for all examples. In norms,
pairs of different examples or experts do not meet:
``|G_i|^2 = sum_e sum_{p,q} (g_p . g_q)(a_p . a_q)``.

Which experts a token gets is the router's affair. It is a module of its own, and the experts'
outputs are multiplied by its scores, through which autograd reaches it.

**LoRA of experts** (PEFT's ``target_parameters``) adds ``s B_e A_e`` to the weights of expert e.
PEFT adds it before each forward, and keeps A and B of all experts in one matrix each. Here a pair
passes through A_e and B_e beside the weights, as in LoRA of a linear layer, so these are products
like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from hf_dp._borrowed import gated, is_experts
from hf_dp.clipping.gradients import PerExampleGradient, Weights, add_product
from hf_dp.clipping.rounding import Grams, Norms, accumulation_dtype, matmul_dtype, outer_norms
from hf_dp.clipping.tape import Tape, seen_in_backward

_AT_ONCE = 2**24  # numbers of both factors that are put in order for norms at once


class Layout(NamedTuple):
    """Turns a parameter into the weights of all experts, (E, out, in), as a view of it, and
    gradients of such weights, (E, out, in), into the parameter's shape."""

    weights: Callable[[Tensor], Tensor]
    gradients: Callable[[Tensor], Tensor]
    by_expert: bool = True  # whether its first dimension is the experts


AS_IS = Layout(lambda p: p, lambda g: g)
TRANSPOSED = Layout(lambda p: p.mT, lambda g: g.mT)  # (E, in, out)


def lora_layouts(experts: int) -> tuple[Layout, Layout]:
    """Return how PEFT holds A, as (E r, in), and B, as (out, r E)."""
    return (
        Layout(lambda p: p.unflatten(0, (experts, -1)), lambda g: g.flatten(0, 1), False),
        Layout(
            lambda p: p.unflatten(1, (-1, experts)).permute(2, 0, 1),
            lambda g: g.permute(1, 2, 0).flatten(1),
            False,
        ),
    )


class ExpertsLora(NamedTuple):
    """LoRA of one parameter of experts, as PEFT's outermost module around them has it."""

    of: str  # the experts' parameter
    parameters: tuple[str, str]  # A and B
    scaling: float


def experts_within(module: nn.Module) -> tuple[Any, list[ExpertsLora]]:
    """Return the module inside PEFT's wrappers of its parameters, and the adapters in use."""
    inside: Any = module
    found, prefix = [], ""
    while isinstance(inside, ParamWrapper):
        off = inside.disable_adapters or inside.merged
        for adapter in [] if off else inside.active_adapters:
            if adapter in inside.lora_A:
                names = f"{prefix}lora_A.{adapter}.weight", f"{prefix}lora_B.{adapter}.weight"
                found.append(ExpertsLora(inside.parameter_name, names, inside.scaling[adapter]))
        inside, prefix = inside.base_layer, f"{prefix}base_layer."
    return inside, found


def serves_experts(module: nn.Module) -> bool:
    """Return whether these are experts without biases, whose weights are parameters; or PEFT's LoRA
    of the parameters of such experts, which are frozen."""
    experts, _ = experts_within(module)
    frozen = not any(each.requires_grad for each in experts.parameters())
    whole = is_experts(experts) and set(experts._parameters) == {_first(experts), "down_proj"}
    return whole and (experts is module or frozen)


def _first(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def run_experts(
    tape: Tape, owner: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run all experts on their tokens, as ``grouped_mm`` does, and capture the products.

    Args:
        owner: the experts, or PEFT's module around them.
        hidden_states: (N, d), tokens in the order of their examples.
        top_k_index: (N, k), the experts of each token; ``top_k_weights``, (N, k), their scores.
    """
    tape.refuse_parameter(owner, hidden_states)
    module, adapters = experts_within(owner)
    tokens, chosen = top_k_index.shape
    # The pairs of one expert remain in the order of their examples.
    experts, order = top_k_index.flatten().sort(stable=True)
    number = len(module.down_proj)
    counts = experts.bincount(minlength=number).tolist()
    layout, of_adapters = TRANSPOSED if module.is_transposed else AS_IS, lora_layouts(number)

    def product(of: nn.Module, name: str, layout: Layout, x: Tensor) -> Tensor:
        parameter, x = of.get_parameter(name), x.to(matmul_dtype(x))
        weights = layout.weights(tape.constant(parameter)).mT
        pairs = zip(x.split(counts), weights)
        # PEFT keeps adapters of a bfloat16 base in float32.
        output = torch.cat([part @ of_one.to(part.dtype) for part, of_one in pairs])
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return output
        tape.note_forward(of, name)
        see = partial(_capture, tape, of, name, layout, counts, tokens)
        kept = x, experts, order // chosen
        return seen_in_backward(output, parameter, lambda own: own.data, see, *kept)

    def adapted(name: str, x: Tensor) -> Tensor:
        output = product(module, name, layout, x)
        for adapter in adapters:
            if adapter.of == name:
                for each, own in zip(adapter.parameters, of_adapters):
                    x = product(owner, each, own, x)
                output = output + x * adapter.scaling
        return output

    inner = gated(module, adapted(_first(module), hidden_states[order // chosen]))
    outer = adapted("down_proj", inner)
    outer = (outer * top_k_weights.flatten()[order, None])[order.argsort()]
    return outer.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _capture(
    tape: Tape,
    module: nn.Module,
    name: str,
    layout: Layout,
    counts: list[int],
    tokens: int,
    saved: Sequence[Tensor],
    grad: Tensor,
) -> None:
    x, experts, token = saved
    examples = tape.expected_examples()
    tape.by_example(module, grad.new_empty(tokens, 1))  # refuses what is not all positions of each
    places = experts * examples + token // (tokens // examples)
    tape.capture(module, name, Routed(grad, x, places, counts, examples, layout))


@dataclass
class Routed(PerExampleGradient):
    """``G_i[e] = sum_p left[p] right[p]^T`` over the pairs p of example i and expert e.

    Args:
        left: (P, m), and ``right``, (P, n).
        places: (P,), ascending: the expert of each pair times b, plus its example.
        counts: how many pairs each expert has.
        examples: b.
        layout: of the parameter.
    """

    values = ("left", "right")
    left: Tensor
    right: Tensor
    places: Tensor
    counts: list[int]
    examples: int
    layout: Layout = AS_IS

    def fits(self, shape: torch.Size, examples: int) -> bool:
        own = torch.empty(len(self.counts), self.left.shape[1], self.right.shape[1], device="meta")
        return self.layout.gradients(own).shape == shape and self.examples == examples

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
        totals = self.layout.weights(total)
        for expert, pairs in enumerate(zip(left.split(self.counts), right.split(self.counts))):
            if len(pairs[0]):
                add_product(totals[expert], pairs[0].mT, pairs[1])

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
            return self.left[pairs].to(dtype).mT @ self.right[pairs].to(dtype)

        experts = range(len(self.counts))
        if self.layout.by_expert:  # the others are small
            experts, rows = experts[rows], slice(None)
        which = range(*examples.indices(self.examples))
        each = (torch.stack([gradient(i, e) for e in experts]) for i in which)
        return torch.stack([self.layout.gradients(g)[rows].flatten(1) for g in each])

    def of_units(self, rows: int) -> Routed:
        expert, example = self.places // self.examples, self.places % self.examples
        units = self.examples // rows
        places = expert * units + example // rows
        return Routed(self.left, self.right, places, self.counts, units, self.layout)

    def joined(self, other: Routed) -> Routed:
        places, order = torch.cat([self.places, other.places]).sort(stable=True)
        left, right = torch.cat([self.left, other.left]), torch.cat([self.right, other.right])
        counts = [sum(each) for each in zip(self.counts, other.counts, strict=True)]
        return Routed(left[order], right[order], places, counts, self.examples, self.layout)
