"""DP-FP's mechanism: the representation that enters the last layer, clipped and noised in training
(Du and Mi 2021, equations 8 and 9).

Outside :meth:`PrivateRepresentation.noising`, and so in evaluation, the layer gets what the model
computes.
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
    """``h min(1, C / |h|_2)`` for each row h of (b, d) (equation 8); differentiable; a row that is
    not finite becomes 0."""
    finite = torch.isfinite(rows.detach()).all(1, keepdim=True)
    rows = torch.where(finite, rows, torch.zeros_like(rows))
    # Float64: squares of what float32 can hold neither overflow nor vanish, and rounding stays far
    # below the plan's margin.
    norms = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    weights = (clipping_norm / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1)
    return (rows.double() * weights).to(rows.dtype)


class PrivateRepresentation:
    """Clips each vector that enters ``layer`` and noises it, inside :meth:`noising`.

    Args:
        layer: takes one vector per example, (b, d).
        clipping_norm: C, of each vector.
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
        """For forward and backward of one batch. Gradient checkpointing may run the layer again in
        backward: it then gets the very values that were released, since fresh noise would be a
        second release, and the gradient of no forward."""
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
                    "representations of one batch. Only a model that uses it once in a forward can "
                    "be trained with privacy_mode='dp_fp'."
                )
            clipped = self.clipped(rows)
            noised = clipped + (values - clipped).detach()
        return (noised.to(rows.dtype), *inputs[1:])


def one_vector_per_example(inputs: tuple[Any, ...], layer: nn.Module) -> Tensor:
    """The layer's input of shape (b, d). Raises: UnsupportedModelError for another one."""
    rows = inputs[0] if inputs else None
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise UnsupportedModelError(
            f"Expected {type(layer).__name__} to take one vector per example, of shape (batch, "
            f"features), got {shape}."
        )
    return rows


@torch.no_grad()
def find_last_layer(
    model: nn.Module, batch: Mapping[str, Tensor], name: str | None = None
) -> tuple[str, nn.Module]:
    """(name, module) of the layer whose input is the representation and whose output are the
    logits.

    Args:
        batch: a few examples, for one forward without labels; made-up ones do.
        name: the layer to take, a dotted name; None: the linear layer that gives the logits
            (BERT's, DistilBERT's, ALBERT's, DeBERTa's, ModernBERT's and ViT's ``classifier``, the
            ``out_proj`` of RoBERTa's and ELECTRA's heads).

    Raises: UnsupportedModelError for a task without a single representation, or when there is no
        such layer; the message lists those that could be named.
    """
    if task_of(model) not in _ONE_VECTOR:
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} predicts for each token (or generates), so there "
            "is no single representation of an example to clip and noise (Du and Mi leave it open, "
            "section 6). Use privacy_mode='dp_sgd'."
        )
    modules = dict(model.named_modules())
    if name is not None and name not in modules:
        last = [known for known, module in modules.items() if isinstance(module, nn.Linear)][-4:]
        raise UnsupportedModelError(
            f"Expected `representation_module` to name a module, got {name!r}. Linear ones: {last}."
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
        f"Expected {wanted} of {type(base_model(model)).__name__}: one that is used once, takes "
        "one vector per example and gives the logits. Layers that take one vector per example: "
        f"{could or 'none'}. Name the module that gives the logits with `representation_module`, "
        "or use privacy_mode='dp_sgd'."
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
    """(b, K d): each row in the block of its label, zeros elsewhere. Its norm is the row's."""
    blocks = rows.new_zeros(len(rows), num_classes, rows.shape[1])
    blocks[torch.arange(len(rows), device=rows.device), labels] = rows
    return blocks.flatten(1)


def block_loss(layer: nn.Linear, vectors: Tensor) -> Tensor:
    """Cross-entropy of a linear layer from vectors whose blocks hide the label, (b,); the labels
    themselves are not needed.

    With v = h in the block of its class y and noise everywhere, ``u = sum over blocks of v`` is h
    with noise, and ``logsumexp(W u + b) - sum_k <w_k, v_k>``: the second term has the mean <w_y,
    h>, so it replaces the label's logit. It is linear in v, so the gradient's label part is
    unbiased. A bias would need the label, too: it stays as it is.
    """
    blocks = vectors.view(len(vectors), layer.out_features, layer.in_features)
    bias = None if layer.bias is None else layer.bias.detach()
    logits = nn.functional.linear(blocks.sum(1), layer.weight, bias)
    return torch.logsumexp(logits, 1) - (blocks * layer.weight).sum((1, 2))
