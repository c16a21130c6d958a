"""Clipping by explicit per-example gradients, as before ghost clipping (Li et al., figure 5).

``loop``: one example at a time; forward, backward, clip, add. ``vmap``: the per-example gradients
of a whole physical batch by ``torch.func``, all held at once; what JAX's vmap does in the figure.
``lee_kifer``: those of one layer at a time, for the norms alone, and a second backward pass with
weights (Lee and Kifer 2020, arXiv 2009.03106; section 4.1 of Li et al.).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_dp.benchmarks.mode import CLIPPING_NORM, BenchmarkMode, Refused
from hf_dp.benchmarks.workload import Batch, Workload, forward_precision
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.forms import made_explicit
from hf_dp.clipping.gradients import Dense, OuterProducts, PerExampleGradient
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.two_pass import FirstPass, two_pass
from hf_dp.clipping.weights import clipping_weights
from hf_dp.losses import per_example_loss


class _Summed(BenchmarkMode):
    """A mode that adds clipped gradients to sums of its own."""

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        self._sums: dict[str, Tensor] = {}

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _start(self) -> None:
        self._sums = {name: torch.zeros_like(p) for name, p in self._trained.items()}

    def reset(self) -> None:
        self._sums = {}

    def gradients(self) -> dict[str, Tensor]:
        return self._sums


class Loop(_Summed):
    """One example at a time."""

    def step(self, batches: Sequence[Batch]) -> None:
        self._start()
        for batch in batches:
            for index in range(len(batch["labels"])):
                self._add({name: value[index : index + 1] for name, value in batch.items()})

    def _add(self, example: Batch) -> None:
        loss = self.losses(example, self.workload.chunked_loss).sum()
        trained = self._trained
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        weight = clipping_weights("flat", norm.view(1, 1), CLIPPING_NORM)[0, 0]
        for total, gradient in zip(self._sums.values(), found, strict=True):
            total.addcmul_(gradient, weight)


class _Losses(nn.Module):
    """The per-example losses as a module, for ``functional_call``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return per_example_loss(self.model, batch)


class Vmap(_Summed):
    """All per-example gradients of a physical batch at once, by ``torch.func.vmap``.

    Raises: Refused for gradient checkpointing and chunked losses, which ``torch.func`` lacks.
    """

    note = "attention by plain products: its fused kernels cannot be vmapped"

    def __init__(self, model: nn.Module, workload: Workload):
        super().__init__(model, workload)
        if workload.gradient_checkpointing or workload.chunked_loss:
            raise Refused("torch.func takes no gradient checkpointing and no chunked loss")
        self._losses = _Losses(model)

    def step(self, batches: Sequence[Batch]) -> None:
        self._start()
        for batch in batches:
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        mask = batch["attention_mask"]
        if not bool(mask.all()):
            raise Refused("a mask that differs between examples decides what the model does")
        rest = {name: value for name, value in batch.items() if name != "attention_mask"}
        shared = {name: value.detach() for name, value in self._trained.items()}

        def loss(parameters: Mapping[str, Tensor], example: Batch) -> Tensor:
            one: dict[str, Any] = {name: value[None] for name, value in example.items()}
            one["attention_mask"] = mask[:1]
            with forward_precision(self.workload):
                found = functional_call(
                    self._losses, {f"model.{n}": p for n, p in parameters.items()}, (one,)
                )
            return found.sum()

        of_each = vmap(grad(loss), in_dims=(None, 0), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):
            gradients = of_each(shared, rest)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(
            dim=0
        )
        weights = clipping_weights("flat", norms[None], CLIPPING_NORM)[0]
        for name in list(gradients):
            each = gradients.pop(name)
            self._sums[name] += torch.mv(each.flatten(1).mT, weights).view(each.shape[1:])


class _LayerByLayer(ClippingEngine):
    """Ghost clipping with the norms of explicit gradients, which one layer at a time holds."""

    def _take(self, clipped: ClippedSum, losses: Tensor) -> Tensor:
        return two_pass(clipped, losses, _ExplicitNorms)


class _ExplicitNorms(FirstPass):
    def _finish(self, parameter: nn.Parameter) -> None:
        self.waiting[parameter] = _whole(self.waiting[parameter], parameter)
        super()._finish(parameter)


def _whole(uses: Sequence[PerExampleGradient], parameter: nn.Parameter) -> list[PerExampleGradient]:
    """Return the uses as gradients of the parameter's shape, (b, ...)."""
    if any(isinstance(use, OuterProducts) for use in uses):
        uses = made_explicit(uses, parameter.shape)
    dtype = accumulation_dtype(parameter.dtype)
    whole: list[PerExampleGradient] = []
    for use in uses:
        if not isinstance(use, Dense):
            size = use.size()
            each = [use.example_gradient(i, parameter.shape, dtype) for i in range(len(size))]
            use = Dense(torch.stack(each), owned=True, of_terms=size)
        whole.append(use)
    return whole


class LeeKifer(_Summed):
    """Two backward passes; the first holds the per-example gradients of one layer at a time."""

    def step(self, batches: Sequence[Batch]) -> None:
        self.reset()
        with _LayerByLayer(self.model, CLIPPING_NORM) as engine:
            for batch in batches:
                engine.backward(self.losses(batch, self.workload.chunked_loss))
            self._sums = engine.collect()
