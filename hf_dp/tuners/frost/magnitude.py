"""Partition gradient magnitudes: how large the summed gradient of each partition is.

DP-FROST, section 4.4. For a set S of partitions, an order a in {1, 2} and an example x, let g_P(x)
be the gradient of x on P. The three magnitudes are

* ``mg``: weights ``w_x = min(1, c / |g_S(x)|_a)`` and ``mu_P = |sum_x w_x g_P(x)|_a / |P|^(1/a)``,
* ``mgn``: as mg, but each g_P is divided by ``|P|^(1/a)`` first, and the threshold is
  ``cbar = c / (mean of |P| over S)^(1/a)``,
* ``mgna``: as mgn, with absolute values.

In all three cases definition 8 is ``mu_P = |sum_x w_x h(g_P(x))|_a / |P|^(1/a)``, where h is the
identity or the absolute value, since dividing by ``|P|^(1/a)`` commutes with the sum and the norm.
For mgn and mgna, ``w_x = min(1, cbar / (sum over Q in S of |g_Q(x)|_a^a / |Q|)^(1/a))``. For mgna
with a = 1 nothing cancels, so ``mu_P = sum_x w_x |g_P(x)|_1 / |P|``: the norms are enough, and one
look at each gradient suffices. The others look twice, for the weight and for the sum.

Sensitivity (lemma 3): how far the vector of all mu moves in the L2 norm when one example is left
out. It is ``c / (min |P|)^(1/a)`` for mg, and cbar for the others. Leaving x out moves mu_P by at
most ``|w_x g_P(x)|_a / |P|^(1/a)``. Over the partitions, the L2 norm of these bounds is at most
their a-norm. For mgn and mgna that is what was clipped to cbar; for mg it is at most
``(min |P|)^(-1/a)`` times what was clipped to c.

A 1-norm has no Gram form, so each layer's gradient is formed example by example, used and dropped.
The very numbers that were measured are added. Norm and sum therefore cannot differ by the rounding
of different summation orders.

Norms and sums round, and differently beside other examples (:mod:`hf_dp.plans.rounding`). An
example's slack bounds this in the 2-norm of each parameter, and the a-norm of k numbers is at most
``k^(1/a - 1/2)`` times as large. As for sums of gradients, the weight is computed from norm plus
slack, and the weighted slack is at most :func:`hf_dp.plans.rounding.slack_cap` of the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid, one_of
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.gradients import Lookups, PerExampleGradient
from hf_dp.clipping.rounding import accumulation_dtype, full_precision, zero_sum
from hf_dp.distributed.processes import Processes
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.selection import MAGNITUDES
from hf_dp.tuners.frost.select import Partition

NORM_ORDERS = (1, 2)


def sensitivity(
    partitions: Sequence[Partition], magnitude: str, norm_order: int, clipping_norm: float
) -> float:
    """Return how far one example can move the vector of magnitudes, in the L2 norm.

    Args: clipping_norm: c, of which an engine for very many rows is given its share
    (:func:`hf_dp.plans.rounding.clipping_share`).
    """
    sizes = [partition.size for partition in partitions]
    smallest = min(sizes) if magnitude == "mg" else sum(sizes) / len(sizes)
    return clipping_norm / smallest ** (1 / norm_order) * (1 + ROUNDING_MARGIN)


class MagnitudeEngine(ClippingEngine):
    """A :class:`ClippingEngine` that adds up magnitudes of partitions instead of gradients.

        with MagnitudeEngine(model, partitions, clipping_norm=0.1) as engine:
            engine.backward(losses)    # (b,) per-example losses of each physical batch
            mu = engine.magnitudes()   # (M,) in the order of the partitions

    The magnitudes are not private until noise is added.

    Args:
        partitions: S; parameters outside them must not be trainable.
        clipping_norm: c, for the gradient's norm of order ``norm_order``.
        magnitude: ``mg``, ``mgn`` or ``mgna``.
        norm_order: a, 1 or 2.
    """

    def __init__(
        self,
        model: nn.Module,
        partitions: Sequence[Partition],
        clipping_norm: float,
        magnitude: str = "mgna",
        norm_order: int = 1,
    ):
        super().__init__(model, clipping_norm)
        self.magnitude = one_of("magnitude", magnitude, MAGNITUDES)
        if norm_order not in NORM_ORDERS:
            raise invalid("norm_order", norm_order, "to be 1 or 2", "1 is the paper's choice.")
        self.norm_order = norm_order
        self.partitions = tuple(partitions)
        self._index = {
            name: number for number, part in enumerate(self.partitions) for name in part.parameters
        }
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._direct: Tensor | None = None  # mgna with order 1

    def _begin(self) -> None:
        self._totals, self._direct = {}, None
        outside = [name for name in self._parameters if name not in self._index]
        if outside:
            raise invalid(
                "partitions",
                outside[0],
                "to cover every trainable parameter",
                "Freeze the parameters that no partition holds.",
            )

    @torch.no_grad()
    def magnitudes(self, processes: Processes | None = None) -> Tensor:
        """Return ``mu``, (M,), for all examples since the engine was entered.

        Args: processes: of the run; this one's part of mu is returned, and the parts of all add up
        to it. None: this one alone.
        """
        self._refuse_open_unit()
        here = processes or Processes()
        device = next(iter(self._parameters.values())).device
        if self.magnitude == "mgna" and self.norm_order == 1:
            # This is float64 even for an empty draw. The noise gets the same type, and a coarser
            # type would reveal that the draw was empty.
            empty = torch.zeros(len(self.partitions), dtype=torch.float64, device=device)
            return empty if self._direct is None else self._direct.clone()
        powers = torch.zeros(len(self.partitions), dtype=torch.float64, device=device)
        here.agree("magnitudes")  # or stop, where another process failed on its way
        for name, parameter in self._parameters.items():
            total = self._totals.get(parameter)
            if not here.alone:  # a norm of the sum over all examples
                if total is None:
                    total = torch.zeros(parameter.shape, dtype=torch.float64, device=device)
                total = here.summed(total.clone())
            if total is not None and here.is_main:
                powers[self._index[name]] += self._power(total)
        return (powers / self._sizes(device)) ** (1 / self.norm_order)

    def _sizes(self, device: torch.device) -> Tensor:
        return torch.tensor(
            [float(partition.size) for partition in self.partitions],
            device=device,
            dtype=torch.float64,
        )

    def _slack(self, parameter: nn.Parameter, uses: Sequence[PerExampleGradient]) -> Tensor:
        """Return a bound on the rounding of each example's gradient in the a-norm, (b,)."""
        slack = torch.stack([use.slack() for use in uses]).sum(0).double()
        if self.norm_order == 2:
            return slack
        numbers = torch.full_like(slack, parameter.numel())
        if all(isinstance(use, Lookups) for use in uses):  # few rows, and not those of padding
            looked_up = sum(
                use.grads.any(2).sum(1) * use.grads.shape[2]
                for use in uses
                if isinstance(use, Lookups)
            )
            numbers = numbers.minimum(torch.as_tensor(looked_up, device=slack.device))
        return slack * numbers.sqrt()

    def _power(self, values: Tensor) -> Tensor:
        """Return ``|values|_a^a`` in float64."""
        return (values.abs() if self.norm_order == 1 else values.square()).sum(dtype=torch.float64)

    def _take(self, step: ClippedSum, losses: Tensor) -> Tensor:
        uses = step.capture(losses)
        with torch.no_grad(), full_precision():
            return self._add(step, uses, step.units(losses))

    def _add(
        self, step: ClippedSum, uses: dict[nn.Parameter, list[PerExampleGradient]], examples: int
    ) -> Tensor:
        device = next(iter(self._parameters.values())).device
        names = {parameter: name for name, parameter in self._parameters.items()}
        powers = torch.zeros(examples, len(self.partitions), dtype=torch.float64, device=device)
        slacks = torch.zeros_like(powers)
        for parameter, of_parameter in uses.items():
            place = self._index[names[parameter]]
            slacks[:, place] += self._slack(parameter, of_parameter) ** self.norm_order
            for index in range(examples):
                _, values = _explicit(of_parameter, parameter, index)
                powers[index, place] += self._power(values)
        sizes, threshold = self._sizes(device), step.clipping_norm
        if self.magnitude == "mg":
            each = torch.ones_like(sizes)
        else:
            each, threshold = 1 / sizes, threshold / float(sizes.mean()) ** (1 / self.norm_order)
        norms, slack = ((found @ each) ** (1 / self.norm_order) for found in (powers, slacks))
        bounds = torch.maximum(norms + slack, slack / step.slack_cap)
        weights = torch.where(
            torch.isfinite(bounds), threshold / bounds.clamp_min(threshold), torch.zeros_like(norms)
        )
        if self.magnitude == "mgna" and self.norm_order == 1:
            finite = torch.isfinite(bounds)[:, None]
            shares = torch.where(
                finite, weights[:, None] * powers / sizes, torch.zeros_like(powers)
            ).sum(0)
            self._direct = shares if self._direct is None else self._direct + shares
            return norms
        weights = representable(weights)
        for parameter in list(uses):
            of_parameter = uses.pop(parameter)
            for index in range(examples):
                if weights[index] > 0:
                    rows, values = _explicit(of_parameter, parameter, index)
                    values = (values.abs() if self.magnitude == "mgna" else values) * float(
                        weights[index]
                    )
                    # float64: a draw may hold all examples (q_ps = 1), and in their float32 sum the
                    # part of a single example would be rounded away.
                    _accumulate(self._totals, parameter, rows, values)
        return norms


def _explicit(
    uses: Sequence[PerExampleGradient], parameter: nn.Parameter, index: int
) -> tuple[Tensor | None, Tensor]:
    """Return one example's gradient as (rows, values). For lookups alone these are the rows of the
    parameter that were looked up and their values; otherwise None and the whole gradient."""
    dtype = accumulation_dtype(parameter.dtype)
    first, *others = uses
    if isinstance(first, Lookups) and not others:
        here = slice(index, index + 1)
        _, rows, values = Lookups(first.tokens[here], first.grads[here]).rows(dtype)
        return rows, values
    gradient = first.example_gradient(index, parameter.shape, dtype)
    for use in others:
        gradient = gradient + use.example_gradient(index, parameter.shape, dtype)
    return None, gradient


def representable(weights: Tensor) -> Tensor:
    """Return the weights with those below float32's normal range set to zero. Float32 holds those
    with few digits or none, and a rounded weight could exceed its bound. They belong to gradients
    with norms above about 1e38 C; such an example is left out."""
    return torch.where(
        weights < torch.finfo(torch.float32).tiny, torch.zeros_like(weights), weights
    )


def _accumulate(
    totals: dict[nn.Parameter, Tensor], parameter: nn.Parameter, rows: Tensor | None, values: Tensor
) -> None:
    """Add what :func:`_explicit` returned, or a function of it, to a total in float64."""
    if parameter not in totals:
        totals[parameter] = zero_sum(parameter.shape, parameter.device)
    total, values = totals[parameter], values.double()
    if rows is None:
        total.add_(values)
    else:
        total.view(len(parameter), -1).index_add_(0, rows, values)
