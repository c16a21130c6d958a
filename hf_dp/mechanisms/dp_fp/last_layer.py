"""The layer above the noise, and the vectors that enter it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedArgumentError, UnsupportedModelError
from hf_dp.losses import base_model, classification_loss, problem_type
from hf_dp.mechanisms.dp_fp.representation import (
    block_loss,
    clip_vectors,
    find_last_layer,
    into_blocks,
)
from hf_dp.mechanisms.dp_fp.vectors import (
    all_vectors,
    check_classes,
    check_representations,
    vectors_of,
)
from hf_dp.plans.dp_fp import ForwardPlan
from hf_dp.run.private_run import PrivateRun


def last_layer(run: PrivateRun) -> tuple[str, nn.Module]:
    """Return name and module of the layer whose input is the representation.

    Raises: UnsupportedModelError as :func:`find_last_layer`.
    """
    padded, _ = run.check_batches()
    return find_last_layer(run.model, padded, run.options.representation_module)


class LastLayer:
    """The layer above the noise, with the loss of the vectors that enter it.

    Raises:
        UnsupportedModelError: the layer shares a parameter with the layers below, is frozen, or is
            not linear although labels are in the vector.
        UnsupportedArgumentError: labels are to be protected and are not classes.
    """

    def __init__(self, run: PrivateRun, plan: ForwardPlan):
        self.run, self.plan = run, plan
        self.name, self.layer = last_layer(run)
        self.model = run.model
        own = set(self.layer.parameters())
        below = [name for name, p in _below(run.model, self.layer) if p in own]
        if below or not own:
            shared = (
                f"it shares {below} with the layers below the noise" if below else "it has none"
            )
            raise UnsupportedModelError(
                f"The last layer {self.name!r} has no parameters of its own: {shared}. Use a model "
                "whose last layer has its own parameters, or privacy_mode='dp_sgd'."
            )
        self._blocks = plan.num_classes if plan.labels_in_vector else None
        if self._blocks is not None and type(self.layer) is not nn.Linear:
            raise UnsupportedModelError(
                f"labels_in_vector needs a linear last layer, and {self.name!r} is a "
                f"{type(self.layer).__name__}. Protect the labels with `label_epsilon` instead."
            )
        kind = problem_type(base_model(run.model), torch.zeros(1, dtype=torch.long))
        if plan.protects_labels and kind != "single_label_classification":
            raise UnsupportedArgumentError(
                "`label_epsilon` and `labels_in_vector` protect one class per example, and this "
                f"model's task is {kind}. Remove them, or use privacy_mode='dp_sgd'."
            )

        self.parameters = [p for p in self.layer.parameters() if p.requires_grad]
        if not self.parameters:
            raise UnsupportedModelError(
                f"The last layer {self.name!r} is frozen, so nothing would be learned from the "
                "released vectors. Unfreeze it."
            )
        self._width = check_representations(run, self.layer)

    def below(self) -> list[nn.Parameter]:
        """Return the parameters below the noise."""
        return [p for _, p in _below(self.model, self.layer)]

    def clipped(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return what noise is added to, from the representations ``rows``.

        These are clipped vectors, (b, d), or vectors with the label inside, (b, K d).
        """
        rows = clip_vectors(rows, self.plan.vector_clipping_norm)
        if self._blocks is None:
            return rows
        check_classes(labels, self._blocks)
        return into_blocks(rows, labels, self._blocks)

    def loss(self, released: Tensor, labels: Tensor | None) -> Tensor:
        """Sum the losses of released vectors; ignore ``labels`` where the vectors hold them."""
        dtype = next(self.layer.parameters()).dtype
        if self._blocks is not None:
            assert isinstance(self.layer, nn.Linear)
            return block_loss(self.layer, released.to(dtype)).sum()
        assert labels is not None
        return classification_loss(
            base_model(self.model), self.layer(released.to(dtype)), labels
        ).sum()

    def vectors_of(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the representations and labels of collated batches."""
        return vectors_of(self.run, self.layer, batches, self._width)

    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """Return the representations and labels of all training examples, in their order."""
        return all_vectors(self.run, self.layer)


def _below(model: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    inside = {f"{id(module)}.{name}" for module in layer.modules() for name in module._parameters}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{id(module)}.{name}" not in inside:
                yield f"{prefix}.{name}".lstrip("."), parameter
