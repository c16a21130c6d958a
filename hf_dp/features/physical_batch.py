"""``auto_physical_batch_size``: the largest physical batch that fits, found before the steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.optim import Optimizer

from hf_dp._dataclasses import default_of
from hf_dp.features.base import Inside, register
from hf_dp.mechanisms import Mechanism


@register
class PhysicalBatch(Inside):
    """Writes what it finds into the arguments, once.

    Sizes that the arguments give are upper limits, except for the default of
    ``per_device_train_batch_size``.
    """

    _found = False

    @classmethod
    def is_asked_for(cls, args: Any) -> bool:
        return bool(args.auto_physical_batch_size)

    def fit(self, mechanism: Mechanism, optimizer: Optimizer | None) -> None:
        if self._found:
            return
        self._found, args = True, self.args
        given = args.per_device_train_batch_size
        default = {each.name: default_of(each) for each in dataclasses.fields(args)}
        found = mechanism.find_physical_batch(
            optimizer,
            length=args.auto_physical_batch_length,
            most_examples=None if given == default["per_device_train_batch_size"] else given,
            most_tokens=args.max_tokens_per_physical_batch,
        )
        args.per_device_train_batch_size = found.examples
        args.max_tokens_per_physical_batch = found.tokens
