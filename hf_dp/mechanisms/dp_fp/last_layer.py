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

    Raises: UnsupportedModelError.
    """
    padded, _ = run.check_batches()
    return find_last_layer(run.model, padded, run.options.representation_module)


class LastLayer:
    """The layer above the noise, with the loss of its rows.

    Raises: UnsupportedModelError when it shares a parameter with what lies below, or (labels in the
        vector) is not linear; UnsupportedArgumentError when protected labels are no classes.
    """

    def __init__(self, run: PrivateRun, plan: ForwardPlan):
        self.run, self.plan = run, plan
        self.name, self.layer = last_layer(run)
        self.model = run.model
        own = set(self.layer.parameters())
        below = [name for name, p in _below(run.model, self.layer) if p in own]
        if below or not own:
            raise UnsupportedModelError(
                f"The last layer {self.name!r} has no parameters of its own: "
                f"{below or 'it has none'} (shared with the layers below the noise, which it would "
                "train). Use a model with a head of its own, or privacy_mode='dp_sgd'."
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
                "`label_epsilon` and `labels_in_vector` protect one class per example, and this is "
                f"{kind}."
            )

        self.parameters = [p for p in self.layer.parameters() if p.requires_grad]
        if not self.parameters:
            raise UnsupportedModelError(
                f"The last layer {self.name!r} is frozen, so nothing would be learned from its "
                "rows."
            )
        self._width = check_representations(run, self.layer)

    def below(self) -> list[nn.Parameter]:
        """The parameters below the noise."""
        return [p for _, p in _below(self.model, self.layer)]

    def clipped(self, rows: Tensor, labels: Tensor) -> Tensor:
        """What noise is added to: clipped rows, (b, d), or vectors with the label inside, (b, K
        d)."""
        rows = clip_vectors(rows, self.plan.vector_clipping_norm)
        if self._blocks is None:
            return rows
        check_classes(labels, self._blocks)
        return into_blocks(rows, labels, self._blocks)

    def loss(self, released: Tensor, labels: Tensor | None) -> Tensor:
        """Sum of the losses of released rows; ``labels`` are not looked at where the vector holds
        them."""
        dtype = next(self.layer.parameters()).dtype
        if self._blocks is not None:
            assert isinstance(self.layer, nn.Linear)
            return block_loss(self.layer, released.to(dtype)).sum()
        assert labels is not None
        return classification_loss(
            base_model(self.model), self.layer(released.to(dtype)), labels
        ).sum()

    def vectors_of(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return representations and labels of collated batches."""
        return vectors_of(self.run, self.layer, batches, self._width)

    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """Return those of every example of the training set, in its order."""
        return all_vectors(self.run, self.layer)


def _below(model: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    inside = {f"{id(module)}.{name}" for module in layer.modules() for name in module._parameters}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{id(module)}.{name}" not in inside:
                yield f"{prefix}.{name}".lstrip("."), parameter
