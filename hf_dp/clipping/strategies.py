"""How the same clipped sums are computed: by one backward pass, or by two.

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

import torch
from torch import Tensor, nn

from hf_dp.clipping.bundles import bundled
from hf_dp.clipping.clipped_sum import ClippedSum, Decision
from hf_dp.clipping.dropout import random_state, set_random_state
from hf_dp.clipping.forms import form_name, held_bytes, make_explicit
from hf_dp.clipping.gradients import Dense, PerExampleGradient, Weights
from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.clipping.rounding import full_precision
from hf_dp.errors import UnsupportedModelError


def book_keeping(clipped: ClippedSum, losses: Tensor) -> Tensor:
    """Add the clipped gradients to the sums; return the examples' norms (b,).

    Holds everything that the backward pass captured at once.
    """
    uses = clipped.capture(losses)
    make_explicit(uses, clipped.spare(held_bytes(uses)))
    clipped.forms = {parameter: form_name(of_one) for parameter, of_one in uses.items()}
    return clip_and_add(clipped, uses, clipped.units(losses))


def clip_and_add(
    clipped: ClippedSum, uses: dict[nn.Parameter, list[PerExampleGradient]], examples: int
) -> Tensor:
    """Take norms, turn them into weights and add the weighted sums; return the norms (b,).

    Consumes ``uses``.
    """
    bundles = bundled(uses, clipped.groups, clipped.shards)
    table = ExampleNorms(clipped.groups, examples)
    for bundle in bundles:  # under one name for all its parameters: a dense norm needs no settling
        table.add({bundle.parameters[0]: [bundle.gradient]})
    table.add(uses)
    decision = clipped.decide(table, uses)
    clipped.add(uses, decision)
    for bundle in bundles:
        clipped.add_bundle(bundle, decision)
    return decision.norms


# Largest relative difference between two runs of the same kernels (atomic additions on a GPU).
_REPEATABLE = 1e-4


def two_pass(clipped: ClippedSum, losses: Tensor) -> Tensor:
    """Add the clipped gradients to the sums; return the examples' norms (b,).

    Only parameters that the forward used more than once (tied, reused) are held until all their
    uses are known.
    """
    first = _FirstPass(clipped, clipped.units(losses))
    device = losses.device
    before = random_state(device)
    clipped.backward(losses, first.measure, retain_graph=True)
    first.finish_waiting()
    decision = clipped.decide(first.table, {})
    second = _SecondPass(clipped, first.fingerprints, decision)
    clipped.expect(first.fingerprints, decision)
    after = random_state(device)
    set_random_state(device, before)  # a checkpointed forward that does not restore it runs again
    try:
        clipped.backward(losses, second.add)
    finally:
        set_random_state(device, after)
    second.refuse_differences()
    clipped.finish()
    return decision.norms


class _Waiting:
    """The uses of parameters whose other uses are yet to come."""

    def __init__(self) -> None:
        self.waiting: dict[nn.Parameter, list[PerExampleGradient]] = {}

    def wait(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Hold one use, joined with the known ones where that is cheaper."""
        known = self.waiting.get(parameter, ())
        self.waiting[parameter] = gathered([*known, use], parameter.shape)


class _FirstPass(_Waiting):
    """Norms and fingerprints of what the first backward pass meets."""

    def __init__(self, clipped: ClippedSum, examples: int):
        super().__init__()
        self.table = ExampleNorms(clipped.groups, examples)
        self.fingerprints: dict[nn.Parameter, list[Tensor]] = {}
        self._expected = clipped.forward_uses()
        self._counts: dict[nn.Parameter, int] = {}

    def measure(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Take one use; when it is the last one of its parameter, take the norms."""
        if parameter in self.table:
            raise UnsupportedModelError(
                f"A parameter of shape {tuple(parameter.shape)} met more gradients in backward "
                "than uses in the forward, so its norm is not known when it is needed. Use "
                "clipping_strategy='book_keeping'."
            )
        self.fingerprints.setdefault(parameter, []).append(use.fingerprint())
        self.wait(parameter, use)
        self._counts[parameter] = self._counts.get(parameter, 0) + 1
        if self._counts[parameter] == self._expected[parameter]:
            self._finish(parameter)

    def finish_waiting(self) -> None:
        """Take the norms of parameters that met fewer gradients than the forward had uses."""
        for parameter in list(self.waiting):
            self._finish(parameter)

    def _finish(self, parameter: nn.Parameter) -> None:
        uses = self.waiting.pop(parameter)
        self.table.add({parameter: uses})
        if not bool(self.table.certain({parameter: uses})):
            self.table.settle({parameter: uses})


class _SecondPass(_Waiting):
    """The weighted sums; what is added must be what was measured, or C would not bound it."""

    def __init__(
        self,
        clipped: ClippedSum,
        fingerprints: dict[nn.Parameter, list[Tensor]],
        decision: Decision,
    ):
        super().__init__()
        self._clipped, self._fingerprints, self._decision = clipped, fingerprints, decision
        self._compared: list[tuple[nn.Parameter, Tensor]] = []

    def add(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Compare one use with the first pass's; after the last of its parameter, add them."""
        measured = self._fingerprints.get(parameter)
        if not measured:
            raise _other_values(parameter)
        self._compared.append((parameter, _same(measured.pop(0), use.fingerprint())))
        self.wait(parameter, use)
        if not measured:
            self._clipped.add_part(parameter, self.waiting.pop(parameter), self._decision)

    def refuse_differences(self) -> None:
        """Raise if this pass met other values than the first, or not all of its uses.

        All comparisons are read at once: a device need not wait for each.
        """
        if self._compared and not bool(torch.stack([same for _, same in self._compared]).all()):
            raise _other_values(next(p for p, same in self._compared if not bool(same)))
        if any(self._fingerprints.values()):
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


def _same(first: Tensor, second: Tensor) -> Tensor:
    """Return whether both are equal up to rounding, a boolean of shape ()."""
    unused = ~torch.isfinite(first)  # examples without a norm
    return (((first - second).abs() <= _REPEATABLE * first.abs()) | unused).all()


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
        once = Weights(torch.ones_like(size))
        known = self._sizes.get(parameter)
        if known is None:
            self._totals[parameter] = size.new_zeros(parameter.shape)
        use.add_weighted_sum(self._totals[parameter], once)
        self._sizes[parameter] = size if known is None else known + size

    def uses(self) -> dict[nn.Parameter, list[PerExampleGradient]]:
        """Return the sums as the gradients of one example. The norm is then taken of the very
        numbers that are added, so their rounding adds nothing."""
        return {
            parameter: [Dense(total[None], owned=True, of_terms=self._sizes[parameter])]
            for parameter, total in self._totals.items()
        }
