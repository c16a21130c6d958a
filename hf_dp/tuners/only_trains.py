"""Restrict what trains for a while, because a selection clips only over what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def only_trains(model: nn.Module, names: set[str]) -> Iterator[Callable[[set[str]], None]]:
    """Leave only the named parameters trainable inside, of those that were trainable.

    Yields: a function that takes other names and restricts to them instead.
    """
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }

    def restrict(to: set[str]) -> None:
        for name, parameter in trained.items():
            parameter.requires_grad_(name in to)

    restrict(names)
    try:
        yield restrict
    finally:
        restrict(set(trained))
