"""Per-example gradients one at a time by plain autograd: the oracle of the self-check and of the
tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def per_example_gradients(
    losses: Tensor, parameters: Mapping[str, nn.Parameter]
) -> Iterator[dict[str, Tensor]]:
    """The gradient of each loss in turn, ``{name: tensor like the parameter}``, by one backward
    pass an example.

    Args: losses: (b,), of a forward that ran without the engine. Unused parameters get zeros. Keeps
        the graph.

    All passes share one graph, so an example that is not finite spoils the others (0 * NaN is NaN):
    no way to train.
    """
    for loss in losses:
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        yield {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
