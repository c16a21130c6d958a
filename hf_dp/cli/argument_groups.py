"""The groups of arguments that command lines are made of."""

from __future__ import annotations

import dataclasses

from hf_dp._arguments import argument
from hf_dp.trainer.forward_arguments import ForwardArguments
from hf_dp.trainer.privacy_arguments import (
    BudgetArguments,
    MemoryArguments,
    ReleaseArguments,
    StepArguments,
)
from hf_dp.trainer.row_arguments import AuditArguments, RowArguments, UnitArguments


@dataclasses.dataclass
class LengthArguments:
    """Parameters of transformers' own that every run needs."""

    num_train_epochs: float = argument(
        3.0, "Passes over the rows: steps = epochs x rows / expected_batch_size, rounded up."
    )
    max_steps: int = argument(-1, "Number of optimizer steps, instead of epochs; -1 for none.")


# What determines epsilon, and all that is about privacy.
PLANNED = (
    BudgetArguments,
    UnitArguments,
    StepArguments,
    LengthArguments,
    ReleaseArguments,
    ForwardArguments,
)
PRIVACY = (*PLANNED, RowArguments, AuditArguments, MemoryArguments)
