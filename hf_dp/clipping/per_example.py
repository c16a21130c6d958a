"""Per-example gradients, one at a time, by plain autograd.

They are the oracle of the self-check and of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def per_example_gradients(
    losses: Tensor, parameters: Mapping[str, nn.Parameter]
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of each loss in turn, ``{name: tensor like the parameter}``.

    Each takes one backward pass, which keeps the graph. Unused parameters get zeros. All passes
    share one graph, so an example that is not finite spoils the others (0 * NaN is NaN): this is
    not fit for training.

    Args:
        losses: (b,), of a forward that ran without the engine.
    """
    for loss in losses:
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        yield {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
