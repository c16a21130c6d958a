"""One physical batch on its way into the clipped sums, by one backward pass or by two.

**Book-keeping** (Bu et al. 2023, after the ghost norm of Li et al., section 4): one pass captures
what each trainable parameter met. The norms follow from that, and then each weight gradient is
formed once, as a weighted matrix product.

**Two passes** over one graph (the ghost clipping of Li et al., section 4): the first takes norms
and drops each gradient as soon as its norm is known. The second meets the same gradients again and
adds them, weighted, to the sums. The weights multiply the gradients and not the losses, unlike in
the paper: both passes then do the same arithmetic, so what is added is what was measured, even in
bfloat16 and where an example's gradient is not finite. Random numbers drawn in backward (by
checkpoints) are the same in both, and every gradient is compared with the first pass's by its norm.
Uses of one parameter are joined in both passes alike: if they were added one by one, uses that
cancel would leave the rounding error of each in the sum (56 C was measured).

A **large unit** has rows that do not fit into one physical batch. Its gradient is summed over
physical batches before it is clipped, once, as the gradient of one example is. That takes what
ordinary training takes for its gradients, in float32: one number a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_dp.clipping.draws import random_state, set_random_state
from hf_dp.clipping.forms import Bundle, RunningSums, Uses, bundled, held_bytes, make_explicit
from hf_dp.clipping.gradients import Dense, PerExampleGradient, Weights
from hf_dp.clipping.norms import ExampleNorms, clipping_weights, gathered
from hf_dp.clipping.rounding import accumulation_dtype, full_precision, zero_sum
from hf_dp.clipping.sharding import ShardedSums
from hf_dp.clipping.tape import Sink, Tape
from hf_dp.errors import UnsupportedModelError

Captured = dict[nn.Parameter, list[PerExampleGradient]]

# Sees the norms that weights are computed from, (K, b), and which examples are used, (b,).
Watch = Callable[[Tensor, Tensor], None]


@dataclass
class Decision:
    """What becomes of each of b examples."""

    norms: Tensor  # before clipping, over all groups, (b,)
    weights: list[Weights]  # in each of the K groups
    keep: Tensor  # which examples are used at all, (b,)
    all_kept: bool


@dataclass
class ClippedSum:
    """One physical batch on its way into the running sums."""

    tape: Tape
    groups: Mapping[nn.Parameter, int]  # which are clipped together, numbered from 0
    clipping: str
    clipping_norm: float
    sums: RunningSums  # added to in place
    check: Callable[[], None]  # raises if autograd itself wrote a gradient
    counted: bool | Tensor = True  # whether units are used, all or each, (units,)
    # The running sums of parameters that are spread over processes:
    shards: ShardedSums = field(default_factory=lambda: ShardedSums(()))
    memory_ratio: float = 1.0  # as given to the engine
    model_bytes: int = 0  # of weights and gradients in any training
    rows_per_unit: int = 1  # how many examples that follow each other are clipped as one
    slack_cap: float = 1.0  # the most of C that rounding may make of one example's part
    gauge: float = 1.0  # by which gradients are measured
    watch: Watch | None = None
    given: Captured | None = None  # gradients that were captured already
    adding: bool = False  # whether a failure now would leave the sums incomplete

    def units(self, losses: Tensor) -> int:
        """Return how many units these losses are of, each clipped once."""
        return len(losses) // self.rows_per_unit

    def spare(self, activations: int) -> float:
        """Return the bytes that explicit gradients may take beyond the factors they replace.
        Non-private training holds its weights, its gradients and at least these bytes of
        activations."""
        return (self.memory_ratio - 1) * (self.model_bytes + activations)

    def backward(
        self,
        losses: Tensor,
        sink: Sink,
        retain_graph: bool = False,
        reserve: Callable[[nn.Parameter], object] | None = None,
    ) -> None:
        """Run one backward pass from all losses; hand each use of a parameter to ``sink``, with
        ``reserve`` as :meth:`Tape.capturing` does. The losses are those of different examples, so
        their unweighted sum keeps the examples' gradients apart."""
        with self.tape.capturing(len(losses), sink, self.rows_per_unit, reserve):
            torch.autograd.backward(losses, torch.ones_like(losses), retain_graph=retain_graph)
            with self.tape.originals(), torch.no_grad(), full_precision():
                for differentiate in self.tape.after.values():
                    differentiate()
        self.check()

    def capture(self, losses: Tensor) -> Captured:
        """Run one backward pass; return all uses of each trainable parameter, held together."""
        if self.given is not None:
            return self.given
        uses: Captured = {}

        def reserve(parameter: nn.Parameter) -> None:
            uses.setdefault(parameter, [])  # the order of uses is that of the backward pass

        self.backward(losses, lambda *use: _hold(uses, *use), reserve=reserve)
        return uses

    @torch.no_grad()
    def decide(self, table: ExampleNorms, uses: Uses) -> Decision:
        """Turn norms into weights. An example whose norm is not finite is not used, and none of a
        batch that does not count. Doubtful norms are computed again from ``uses``."""
        weights, norms, sizes, keep = self._weights(table)
        # One number is read, since a device must finish for each: 1 if all are kept, 2 for doubts.
        doubts = table.in_doubt(uses).to(keep.device)
        read = int(keep.all() + 2 * doubts)
        if read >= 2:
            table.settle(uses)
            weights, norms, sizes, keep = self._weights(table)
            read = int(keep.all())
        if self.watch is not None and self.counted is not False:
            self.watch(sizes, keep)
        by_group = [Weights(values) for values in weights]
        return Decision(norms.square().sum(0).sqrt(), by_group, keep, bool(read))

    def _weights(self, table: ExampleNorms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights, norms and the norms that weights are computed from, each (K, b), and
        which examples are used, (b,). ``G / r`` is clipped to C: its weight is that of G, clipped
        to r C, divided by the gauge r."""
        norms, slack = table.result()
        upper, least = norms + slack, slack / self.slack_cap
        weights = clipping_weights(self.clipping, upper, self.clipping_norm * self.gauge, least)
        weights = weights / self.gauge
        keep = torch.isfinite(upper).all(0)
        if self.counted is not True:
            keep = keep & torch.as_tensor(self.counted, device=keep.device)
            weights = weights.where(keep, torch.zeros_like(weights))
        return weights, norms, torch.maximum(upper, least), keep

    @torch.no_grad()
    @full_precision()
    def add(self, uses: Captured, decision: Decision, bundles: Sequence[Bundle] = ()) -> None:
        """Add the weighted gradients of all parameters of a batch to their sums. Consumes
        ``uses``."""
        scattered = {p: uses.pop(p) for p in list(uses) if p in self.shards}
        for parameter in list(uses):
            self._add_one(parameter, uses.pop(parameter), decision)
        for parameter in self.shards.expect(scattered, decision.keep.device):
            # No name for the sum: the last one is freed before the next is formed.
            self.shards.add(
                parameter, self._total(parameter, scattered.pop(parameter, ()), decision)
            )
        self.shards.finish()
        for bundle in bundles:
            kept = self._kept(bundle.parameters[0], bundle.gradient, decision)
            self.sums.add_bundle(bundle, kept)

    def expect(self, used: Collection[nn.Parameter], decision: Decision) -> None:
        """Prepare for :meth:`add_part` of the uses of these parameters."""
        here = {parameter for parameter in used if parameter in self.shards}
        self.shards.expect(here, decision.keep.device)

    @torch.no_grad()
    @full_precision()
    def add_part(
        self, parameter: nn.Parameter, uses: list[PerExampleGradient], decision: Decision
    ) -> None:
        """Add the weighted gradients of one parameter while a backward pass runs."""
        if parameter in self.shards:
            total = self._total(parameter, uses, decision)
            assert total is not None
            self.shards.add_during_backward(parameter, total)
        else:
            self._add_one(parameter, uses, decision)

    def _total(
        self, parameter: nn.Parameter, uses: Sequence[PerExampleGradient], decision: Decision
    ) -> Tensor | None:
        """Return the weighted sum of this batch for one parameter, None if it was not used."""
        if not uses:
            return None
        total = zero_sum(parameter.shape, decision.keep.device)
        for use in uses:
            use.add_weighted_sum(total, self._kept(parameter, use, decision))
        return total.to(accumulation_dtype(parameter.dtype))

    def _add_one(
        self, parameter: nn.Parameter, uses: list[PerExampleGradient], decision: Decision
    ) -> None:
        for use in uses:
            total = self.sums.of(parameter, decision.keep.device)
            use.add_weighted_sum(total, self._kept(parameter, use, decision))

    def _kept(
        self, parameter: nn.Parameter, use: PerExampleGradient, decision: Decision
    ) -> Weights:
        """Zero removed examples in a use that is added next; return the weights for it."""
        self.adding = True
        if not decision.all_kept:
            use.keep_only(decision.keep)
        return decision.weights[self.groups[parameter]]


def _hold(uses: Captured, parameter: nn.Parameter, use: PerExampleGradient) -> None:
    """Hold one use of a parameter, joined with the known ones where that is cheaper."""
    uses[parameter] = gathered([*uses.get(parameter, ()), use], parameter.shape)


def book_keeping(clipped: ClippedSum, losses: Tensor) -> Tensor:
    """Add the clipped gradients to the sums; return the examples' norms (b,). Holds everything that
    the backward pass captured at once."""
    uses = clipped.capture(losses)
    make_explicit(uses, clipped.spare(held_bytes(uses)))
    return clip_and_add(clipped, uses, clipped.units(losses))


def clip_and_add(clipped: ClippedSum, uses: Captured, examples: int) -> Tensor:
    """Take norms, turn them into weights and add the weighted sums; return the norms (b,). Consumes
    ``uses``."""
    bundles = bundled(uses, clipped.groups, clipped.shards)
    table = ExampleNorms(clipped.groups, examples)
    for bundle in bundles:  # under one name for all its parameters: a dense norm needs no settling
        table.add({bundle.parameters[0]: [bundle.gradient]})
    table.add(uses)
    decision = clipped.decide(table, uses)
    clipped.add(uses, decision, bundles)
    return decision.norms


# Largest relative difference between two runs of the same kernels (atomic additions on a GPU).
_REPEATABLE = 1e-4


def two_pass(clipped: ClippedSum, losses: Tensor) -> Tensor:
    """Add the clipped gradients to the sums; return the examples' norms (b,). Only parameters that
    the forward used more than once (tied, reused) are held until all their uses are known."""
    device = losses.device
    before = random_state(device)
    table, fingerprints = _first_pass(clipped, losses)
    decision = clipped.decide(table, {})
    clipped.expect(fingerprints, decision)
    after = random_state(device)
    set_random_state(device, before)  # a checkpointed forward that does not restore it runs again
    try:
        _second_pass(clipped, losses, fingerprints, decision)
    finally:
        set_random_state(device, after)
    clipped.shards.finish()
    return decision.norms


def _first_pass(
    clipped: ClippedSum, losses: Tensor
) -> tuple[ExampleNorms, dict[nn.Parameter, list[Tensor]]]:
    """Return norms and fingerprints of what the first backward pass meets."""
    table = ExampleNorms(clipped.groups, clipped.units(losses))
    fingerprints: dict[nn.Parameter, list[Tensor]] = {}
    expected = clipped.tape.forward_uses()
    waiting: Captured = {}

    def finish(parameter: nn.Parameter) -> None:
        uses = {parameter: waiting.pop(parameter)}
        table.add(uses)
        certain = ~table.in_doubt(uses)
        if not bool(certain):
            table.settle(uses)

    def measure(parameter: nn.Parameter, use: PerExampleGradient) -> None:
        if parameter in table:
            raise UnsupportedModelError(
                f"A parameter of shape {tuple(parameter.shape)} met more gradients in backward "
                "than uses in the forward, so its norm is not known when it is needed. Use "
                "clipping_strategy='book_keeping'."
            )
        fingerprints.setdefault(parameter, []).append(use.fingerprint())
        _hold(waiting, parameter, use)
        if len(fingerprints[parameter]) == expected[parameter]:
            finish(parameter)

    clipped.backward(losses, measure, retain_graph=True)
    for parameter in list(waiting):  # those that met fewer gradients than the forward had uses
        finish(parameter)
    return table, fingerprints


def _second_pass(
    clipped: ClippedSum,
    losses: Tensor,
    fingerprints: dict[nn.Parameter, list[Tensor]],
    decision: Decision,
) -> None:
    """Add the weighted sums; what is added must be what was measured, or C would not bound it."""
    compared: list[tuple[nn.Parameter, Tensor]] = []
    waiting: Captured = {}

    def add(parameter: nn.Parameter, use: PerExampleGradient) -> None:
        measured = fingerprints.get(parameter)
        if not measured:
            raise _other_values(parameter)
        first = measured.pop(0)
        unused = ~torch.isfinite(first)  # examples without a norm
        same = (first - use.fingerprint()).abs() <= _REPEATABLE * first.abs()
        compared.append((parameter, (same | unused).all()))
        _hold(waiting, parameter, use)
        if not measured:
            clipped.add_part(parameter, waiting.pop(parameter), decision)

    clipped.backward(losses, add)
    # All comparisons are read at once: a device need not wait for each.
    if compared and not bool(torch.stack([same for _, same in compared]).all()):
        raise _other_values(next(parameter for parameter, same in compared if not bool(same)))
    if any(fingerprints.values()):
        raise UnsupportedModelError(
            "The second backward pass met fewer gradients than the first, so parts of examples "
            "would be missing from the sum. Use clipping_strategy='book_keeping'."
        )


def _other_values(parameter: nn.Parameter) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The second backward pass met other values at a parameter of shape "
        f"{tuple(parameter.shape)} than the first: a checkpointed forward draws random numbers "
        "that are not restored, or keeps state. Use clipping_strategy='book_keeping', and "
        "preserve_rng_state=True for checkpoints."
    )


class LargeUnit:
    """Adds up what physical batches give one unit."""

    def __init__(self) -> None:
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._sizes: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    @full_precision()
    def add(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Add one use of a parameter, whose gradients are of this unit alone."""
        size = use.size()
        known = self._sizes.get(parameter)
        if known is None:
            self._totals[parameter] = size.new_zeros(parameter.shape)
        use.add_weighted_sum(self._totals[parameter], Weights(torch.ones_like(size)))
        self._sizes[parameter] = size if known is None else known + size

    def uses(self) -> Captured:
        """Return the sums as the gradients of one example. The norm is then taken of the very
        numbers that are added, so their rounding adds nothing."""
        return {
            parameter: [Dense(total[None], owned=True, of_terms=self._sizes[parameter])]
            for parameter, total in self._totals.items()
        }
