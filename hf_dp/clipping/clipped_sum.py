"""What every clipping strategy is built from: a recorded backward pass, weights from norms, and the
running sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_dp.clipping.bundles import Bundle
from hf_dp.clipping.fallback import fallback_gradients
from hf_dp.clipping.gradients import (
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Weights,
    full_precision,
)
from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.clipping.side_by_side import products_for_one_thread, side_by_side
from hf_dp.clipping.tape import Sink, Tape
from hf_dp.clipping.weights import clipping_weights


@dataclass
class Decision:
    """Norms before clipping (b,), the examples' weights in each of the K groups, and which are used
    at all (b,)."""

    norms: Tensor
    weights: list[Weights]
    keep: Tensor
    all_kept: bool


class ClippedSum:
    """One physical batch on its way into the sums.

    Args:
        groups: which parameters are clipped together, numbered from 0.
        sums: the running sums, added to in place.
        check: raises when autograd itself wrote a gradient.
    """

    def __init__(
        self,
        tape: Tape,
        groups: Mapping[nn.Parameter, int],
        clipping: str,
        clipping_norm: float,
        sums: dict[nn.Parameter, Tensor],
        check: Callable[[], None],
    ):
        self.tape, self.groups = tape, groups
        self.adding = False
        self._clipping, self._clipping_norm, self._sums, self._check = (
            clipping,
            clipping_norm,
            sums,
            check,
        )

    def forward_uses(self) -> Counter[nn.Parameter]:
        """How often the forward used each parameter."""
        return self.tape.forward_uses()

    def backward(self, losses: Tensor, sink: Sink, retain_graph: bool = False) -> None:
        """One backward pass from all losses at once; each use of a trainable parameter goes to
        ``sink``.

        The losses are those of different examples, so their unweighted sum keeps the examples'
        gradients apart.
        """
        with self.tape.capturing(len(losses), sink):
            torch.autograd.backward(losses, torch.ones_like(losses), retain_graph=retain_graph)
            with self.tape.originals(), torch.no_grad(), full_precision():
                for call in self.tape.calls:
                    fallback_gradients(call, self.tape)
        self._check()

    def capture(self, losses: Tensor) -> dict[nn.Parameter, list[PerExampleGradient]]:
        """One backward pass; all uses of each trainable parameter, held together."""
        uses: dict[nn.Parameter, list[PerExampleGradient]] = {}

        def keep(parameter: nn.Parameter, use: PerExampleGradient) -> None:
            uses[parameter] = gathered([*uses.get(parameter, ()), use], parameter.shape)

        self.backward(losses, keep)
        return uses

    @torch.no_grad()
    def decide(self, table: ExampleNorms) -> Decision:
        """Weights from the norms; an example whose norm is not finite is not used."""
        norms, slack = table.result()
        weights = clipping_weights(self._clipping, norms + slack, self._clipping_norm)
        keep = torch.isfinite(norms + slack).all(0)
        of_groups = [Weights(values) for values in weights]
        return Decision(norms.square().sum(0).sqrt(), of_groups, keep, bool(keep.all()))

    @torch.no_grad()
    @full_precision()
    def add(self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision) -> None:
        """Add the uses of parameters, weighted, to their sums, and let go of each as it is done."""
        beside = {parameter: uses.pop(parameter) for parameter in products_for_one_thread(uses)}
        lookups = [p for p in uses if beside and all(isinstance(use, Lookups) for use in uses[p])]
        with side_by_side(self._products(beside, decision)):
            self._add_each({parameter: uses.pop(parameter) for parameter in lookups}, decision)
        self._add_each(uses, decision)

    def _products(
        self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision
    ) -> Iterator[Callable[[], Tensor]]:
        """Of parameters with one use, outer products: what adds each to its sum. Takes the uses
        out."""
        for parameter in list(uses):
            (use,) = uses.pop(parameter)
            assert isinstance(use, OuterProducts)
            left, right = use.weighted_factors(self._kept(parameter, use, decision))
            del use  # goes as soon as its product is done
            known = self._sums.get(parameter)
            total = self._sums[parameter] = (
                left.new_empty(parameter.shape) if known is None else known
            )
            # With beta = 0 what was in the memory does not count, NaN included.
            yield partial(
                total.view(len(left), -1).addmm_, left, right, beta=0 if known is None else 1
            )

    def _add_each(
        self, uses: dict[nn.Parameter, list[PerExampleGradient]], decision: Decision
    ) -> None:
        for parameter in list(uses):
            for use in uses.pop(parameter):
                total = self._sums.get(parameter)
                self._sums[parameter] = self._weighted(
                    total, parameter, parameter.shape, use, decision
                )

    @torch.no_grad()
    @full_precision()
    def add_bundle(self, bundle: Bundle, decision: Decision) -> None:
        """Add the gradients of a bundle, weighted, to the sums of its parameters."""
        size = torch.Size((bundle.use.gradients.shape[1],))
        total = self._weighted(None, bundle.parameters[0], size, bundle.use, decision)
        for parameter, part in zip(bundle.parameters, bundle.split(total), strict=True):
            known = self._sums.get(parameter)
            self._sums[parameter] = part if known is None else known.add_(part)

    def _weighted(
        self,
        total: Tensor | None,
        parameter: nn.Parameter,
        shape: torch.Size,
        use: PerExampleGradient,
        decision: Decision,
    ) -> Tensor:
        """``total`` plus the examples of ``use``, each times its weight in the parameter's
        group."""
        return use.add_weighted_sum(total, shape, self._kept(parameter, use, decision))

    def _kept(
        self, parameter: nn.Parameter, use: PerExampleGradient, decision: Decision
    ) -> Weights:
        """The weights for a use that is added next, from which removed examples are taken out."""
        self.adding = True
        if not decision.all_kept:
            use.keep_only(decision.keep)
        return decision.weights[self.groups[parameter]]
