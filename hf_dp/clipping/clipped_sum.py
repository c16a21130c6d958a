"""What every clipping strategy is built from: captured gradients, weights and running sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from hf_dp.clipping.bundles import Bundle, RunningSums, zero_sum
from hf_dp.clipping.fallback import fallback_gradients
from hf_dp.clipping.gradients import (
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Weights,
    add_product,
)
from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.clipping.rounding import accumulation_dtype, full_precision
from hf_dp.clipping.sharded_sums import ShardedSums
from hf_dp.clipping.side_by_side import products_for_one_thread, side_by_side
from hf_dp.clipping.tape import Sink, Tape
from hf_dp.clipping.weights import clipping_weights


@dataclass
class Decision:
    """What becomes of each of b examples.

    Attributes:
        norms: before clipping, over all groups, (b,).
        weights: the examples' weights in each of the K groups.
        keep: which examples are used at all, (b,).
        all_kept: whether all are.
    """

    norms: Tensor
    weights: list[Weights]
    keep: Tensor
    all_kept: bool


@dataclass
class ClippedSum:
    """One physical batch on its way into the running sums.

    Attributes:
        groups: which parameters are clipped together, numbered from 0.
        sums: the running sums, added to in place.
        check: raises if autograd itself wrote a gradient.
        counted: False for made-up examples, none of which is used.
        shards: the running sums of parameters that are spread over processes.
        memory_ratio: as given to the engine.
        model_bytes: what weights and gradients take in any training.
        rows_per_unit: how many examples that follow each other are clipped as one.
        slack_cap: the most of C that rounding may make of one example's part.
        given: gradients that were captured already; None to capture them.
        forms: the form that each parameter's gradients got, in words; only from book-keeping.
        adding: whether adding to the sums has begun, so that a failure leaves them incomplete.
    """

    tape: Tape
    groups: Mapping[nn.Parameter, int]
    clipping: str
    clipping_norm: float
    sums: RunningSums
    check: Callable[[], None]
    counted: bool = True
    shards: ShardedSums = field(default_factory=lambda: ShardedSums(()))
    memory_ratio: float = 1.0
    model_bytes: int = 0
    rows_per_unit: int = 1
    slack_cap: float = 1.0
    given: dict[nn.Parameter, list[PerExampleGradient]] | None = None
    forms: dict[nn.Parameter, str] = field(default_factory=dict)
    adding: bool = False

    def forward_uses(self) -> Counter[nn.Parameter]:
        """Count the forward's uses of each parameter."""
        return self.tape.forward_uses()

    def units(self, losses: Tensor) -> int:
        """Return how many units these losses are of, each clipped once."""
        return len(losses) // self.rows_per_unit

    def spare(self, activations: int) -> float:
        """Return the bytes that explicit gradients may take beyond the factors they replace.

        Non-private training holds its weights, its gradients and at least these bytes of
        activations.
        """
        return (self.memory_ratio - 1) * (self.model_bytes + activations)

    def backward(self, losses: Tensor, sink: Sink, retain_graph: bool = False) -> None:
        """Run one backward pass from all losses; hand each use of a parameter to ``sink``.

        The losses are those of different examples, so their unweighted sum keeps the examples'
        gradients apart.
        """
        with self.tape.capturing(len(losses), sink, self.rows_per_unit):
            torch.autograd.backward(losses, torch.ones_like(losses), retain_graph=retain_graph)
            with self.tape.originals(), torch.no_grad(), full_precision():
                for call in self.tape.calls:
                    fallback_gradients(call, self.tape)
        self.check()

    def capture(self, losses: Tensor) -> dict[nn.Parameter, list[PerExampleGradient]]:
        """Run one backward pass; return all uses of each trainable parameter, held together."""
        if self.given is not None:
            return self.given
        uses: dict[nn.Parameter, list[PerExampleGradient]] = {}

        def keep(parameter: nn.Parameter, use: PerExampleGradient) -> None:
            uses[parameter] = gathered([*uses.get(parameter, ()), use], parameter.shape)

        self.backward(losses, keep)
        return uses

    @torch.no_grad()
    def decide(
        self, table: ExampleNorms, uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]]
    ) -> Decision:
        """Turn norms into weights.

        An example whose norm is not finite is not used, and none of a batch that does not count.

        Args:
            uses: the gradients from which doubtful norms can be computed again.
        """
        weights, norms, keep = self._weights(table)
        # One number is read, since a device must finish for each: 1 if all are kept, 2 for doubts.
        doubts = ~table.certain(uses).to(keep.device)
        read = int(keep.all() + 2 * doubts)
        if read >= 2:
            table.settle(uses)
            weights, norms, keep = self._weights(table)
            read = int(keep.all())
        by_group = [Weights(values) for values in weights]
        return Decision(norms.square().sum(0).sqrt(), by_group, keep, bool(read))

    def _weights(self, table: ExampleNorms) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and norms, each (K, b), and which examples are used, (b,)."""
        norms, slack = table.result()
        upper = norms + slack
        weights = clipping_weights(self.clipping, upper, self.clipping_norm, slack / self.slack_cap)
        keep = torch.isfinite(upper).all(0)
        if not self.counted:
            weights, keep = torch.zeros_like(weights), torch.zeros_like(keep)
        return weights, norms, keep

    @torch.no_grad()
    @full_precision()
    def add(self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision) -> None:
        """Add the weighted gradients of all parameters of a batch to their sums.

        Consumes ``uses``.
        """
        scattered = {p: uses.pop(p) for p in list(uses) if p in self.shards}
        beside = {parameter: uses.pop(parameter) for parameter in products_for_one_thread(uses)}
        lookups = [p for p in uses if beside and all(isinstance(use, Lookups) for use in uses[p])]
        with side_by_side(self._products(beside, decision)):
            self._add_each({parameter: uses.pop(parameter) for parameter in lookups}, decision)
        self._add_each(uses, decision)
        for parameter in self.shards.expect(scattered, decision.keep.device):
            # No name for the sum: the last one is freed before the next is formed.
            self.shards.add(
                parameter, self._total(parameter, scattered.pop(parameter, ()), decision)
            )
        self.shards.finish()

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
            self._add_each({parameter: uses}, decision)

    @torch.no_grad()
    def finish(self) -> None:
        """End what :meth:`expect` began, after the backward pass."""
        self.shards.finish()

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

    def _products(
        self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision
    ) -> Iterator[Callable[[], None]]:
        """Yield one job per parameter that adds its outer product to the running sum.

        Each parameter has one use, of outer products. Consumes ``uses``.
        """
        for parameter in list(uses):
            (use,) = uses.pop(parameter)
            assert isinstance(use, OuterProducts)
            left, right = use.weighted_factors(self._kept(parameter, use, decision))
            del use  # freed as soon as its product is done
            yield partial(add_product, self.sums.of(parameter, left.device), left, right)

    def _add_each(
        self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision
    ) -> None:
        for parameter in list(uses):
            for use in uses.pop(parameter):
                total = self.sums.of(parameter, decision.keep.device)
                use.add_weighted_sum(total, self._kept(parameter, use, decision))

    @torch.no_grad()
    @full_precision()
    def add_bundle(self, bundle: Bundle, decision: Decision) -> None:
        """Add the weighted gradients of a bundle to the sums of its parameters."""
        kept = self._kept(bundle.parameters[0], bundle.gradient, decision)
        self.sums.add_bundle(bundle, kept)

    def _kept(
        self, parameter: nn.Parameter, use: PerExampleGradient, decision: Decision
    ) -> Weights:
        """Zero removed examples in a use that is added next; return the weights for it."""
        self.adding = True
        if not decision.all_kept:
            use.keep_only(decision.keep)
        return decision.weights[self.groups[parameter]]
