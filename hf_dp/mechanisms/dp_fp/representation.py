"""Clip and noise the representation that enters the last layer (Du and Mi 2021, equations 8, 9).

Outside :meth:`PrivateRepresentation.noising`, and therefore in evaluation, the layer gets what the
model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp import _validate
from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import base_model, task_of

_ONE_VECTOR = ("sequence_classification", "image_classification")


def clip_vectors(rows: Tensor, clipping_norm: float) -> Tensor:
    """Return ``h min(1, C / |h|_2)`` for each vector h in (b, d) (equation 8), differentiably.

    A vector that is not finite becomes 0.
    """
    finite = torch.isfinite(rows.detach()).all(1, keepdim=True)
    rows = torch.where(finite, rows, torch.zeros_like(rows))
    # float64: squares of float32 values neither overflow nor vanish, and rounding stays far below
    # the plan's margin.
    norms = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    weights = (clipping_norm / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1)
    return (rows.double() * weights).to(rows.dtype)


class PrivateRepresentation:
    """Clips each vector that enters ``layer`` and noises it, inside :meth:`noising`.

    Args:
        layer: takes one vector per example, (b, d).
        clipping_norm: C, the largest L2 norm of a vector.
    """

    def __init__(self, layer: nn.Module, clipping_norm: float):
        self.layer = layer
        self.clipping_norm = _validate.positive("representation_clipping_norm", clipping_norm)

    def clipped(self, vectors: Tensor) -> Tensor:
        """Return the clipped vectors, (b, d), in float32 or better."""
        vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
        return clip_vectors(vectors, self.clipping_norm)

    @contextmanager
    def noising(self, noise: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Clip and noise what enters the layer, inside, for forward and backward of one batch.

        Gradient checkpointing may run the layer again in the backward pass. The layer then gets the
        very values that were released: fresh noise would be a second release, and the gradient
        would belong to no forward pass.
        """
        handle = self.layer.register_forward_pre_hook(partial(self._enter, noise, []))
        try:
            yield
        finally:
            handle.remove()

    def _enter(
        self,
        noise: Callable[[Tensor], Tensor],
        released: list[tuple[Tensor, Tensor]],
        module: nn.Module,
        inputs: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        rows = one_vector_per_example(inputs, module)
        if not released:
            noised = noise(self.clipped(rows))
            released.append((rows.detach(), noised.detach()))
        else:
            before, values = released[0]
            if before.shape != rows.shape or not torch.allclose(
                before, rows.detach(), rtol=1e-3, atol=1e-5
            ):
                raise UnsupportedModelError(
                    f"The last layer ({type(module).__name__}) was given two different "
                    "representations of one batch. privacy_mode='dp_fp' needs a model that uses "
                    "its last layer once per forward pass. Use privacy_mode='dp_sgd'."
                )
            clipped = self.clipped(rows)
            noised = clipped + (values - clipped).detach()
        return (noised.to(rows.dtype), *inputs[1:])


def one_vector_per_example(inputs: tuple[Any, ...], layer: nn.Module) -> Tensor:
    """Return the layer's input, (b, d). Raises: UnsupportedModelError for another shape."""
    rows = inputs[0] if inputs else None
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise UnsupportedModelError(
            f"Expected {type(layer).__name__} to take one vector per example, of shape (batch, "
            f"features), got {shape}. Name another layer with `representation_module`."
        )
    return rows


@torch.no_grad()
def find_last_layer(
    model: nn.Module, batch: Mapping[str, Tensor], name: str | None = None
) -> tuple[str, nn.Module]:
    """Find the layer from the representation to the logits; return its name and module.

    Args:
        batch: a few examples, for one forward without labels; made-up ones suffice.
        name: the layer's dotted name. None means the linear layer that gives the logits: the
            ``classifier`` of BERT, DistilBERT, ALBERT, DeBERTa, ModernBERT and ViT, the
            ``out_proj`` in the heads of RoBERTa and ELECTRA.

    Raises: UnsupportedModelError for a task without a single representation, or when there is no
        such layer. The message lists layers that could be named.
    """
    if task_of(model) not in _ONE_VECTOR:
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} predicts for each token (or generates text), so "
            "no single representation of an example can be clipped and noised (Du and Mi leave "
            "this case open, section 6). Use privacy_mode='dp_sgd'."
        )
    modules = dict(model.named_modules())
    if name is not None and name not in modules:
        last = [known for known, module in modules.items() if isinstance(module, nn.Linear)][-4:]
        raise UnsupportedModelError(
            f"Expected `representation_module` to name a module of the model, got {name!r}. Name "
            f"the layer that gives the logits; the last linear layers are {last}."
        )
    calls: dict[str, list[tuple[Any, Any]]] = {}
    watched = modules if name is None else {name: modules[name]}
    handles = [
        module.register_forward_hook(partial(_note, calls, known))
        for known, module in watched.items()
        if name is not None or isinstance(module, nn.Linear)
    ]
    training = model.training
    try:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model.eval()(**inputs).logits
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    rows = len(next(iter(inputs.values())))
    found = [
        known
        for known, seen in calls.items()
        if _gives(seen, logits) and _takes_vectors(seen, rows)
    ]
    if len(found) == 1:
        return found[0], modules[found[0]]
    could = [known for known, seen in calls.items() if _takes_vectors(seen, rows)]
    wanted = (
        "the last layer"
        if name is None
        else f"`representation_module`={name!r} to be the last layer"
    )
    raise UnsupportedModelError(
        f"Expected {wanted} of {type(base_model(model)).__name__}: a layer that is used once, "
        "takes one vector per example and gives the logits. Layers that take one vector per "
        f"example: {could or 'none'}. Name the layer that gives the logits with "
        "`representation_module`, or use privacy_mode='dp_sgd'."
    )


def _note(
    calls: dict[str, list[tuple[Any, Any]]], name: str, module: nn.Module, inputs: Any, output: Any
) -> None:
    calls.setdefault(name, []).append((inputs[0] if inputs else None, output))


def _gives(seen: list[tuple[Any, Any]], logits: Tensor) -> bool:
    output = seen[0][1]
    same = (
        isinstance(output, Tensor) and output.shape == logits.shape and torch.equal(output, logits)
    )
    return len(seen) == 1 and same


def _takes_vectors(seen: list[tuple[Any, Any]], rows: int) -> bool:
    return all(
        isinstance(entered, Tensor) and entered.dim() == 2 and len(entered) == rows
        for entered, _ in seen
    )


def into_blocks(rows: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Put each vector into the block of its label, with zeros elsewhere: (b, K d).

    The norm of a vector stays the same.
    """
    blocks = rows.new_zeros(len(rows), num_classes, rows.shape[1])
    blocks[torch.arange(len(rows), device=rows.device), labels] = rows
    return blocks.flatten(1)


def block_loss(layer: nn.Linear, vectors: Tensor) -> Tensor:
    """Compute the cross-entropy of a linear layer, (b,), from vectors whose blocks hide the label.

    The labels themselves are not needed. Let v hold h in the block of its class y, and noise
    everywhere. Then ``u = sum over blocks of v`` is h with noise, and the loss is
    ``logsumexp(W u + b) - sum_k <w_k, v_k>``. The second term has the mean <w_y, h>, so it takes
    the place of the label's logit. It is linear in v, so the label part of the gradient is
    unbiased. The gradient of a bias would need the label as well, so the bias stays as it is.
    """
    blocks = vectors.view(len(vectors), layer.out_features, layer.in_features)
    bias = None if layer.bias is None else layer.bias.detach()
    logits = nn.functional.linear(blocks.sum(1), layer.weight, bias)
    return torch.logsumexp(logits, 1) - (blocks * layer.weight).sum((1, 2))
