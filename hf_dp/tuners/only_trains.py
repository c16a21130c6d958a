"""Restrict, for a while, what trains to some of it: a selection clips over what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def only_trains(model: nn.Module, names: set[str]) -> Iterator[Callable[[set[str]], None]]:
    """Leave trainable, inside, only the named ones of the parameters that trained; call what it
    gives to name others."""
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
