"""What a private run may be told beside its plan: none of it changes what epsilon means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import invalid
from hf_dp.batches.loader import BatchOptions
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_sgd import MEMORY_RATIO
from hf_dp.statement.facts import ALL, ANY

# A hf_dp.run.private_run.PrivateRun, for the parts of it that it imports.
Run = Any


@dataclass(frozen=True)
class RunOptions:
    """Options of a private run.

    Args:
        batches: of the physical batches and the data loader.
        clipping_strategy: how clipped sums are computed; None: two passes for a model with gradient
            checkpointing, else book-keeping.
        clipping_memory_ratio: how much memory book-keeping may take for speed, at least 1.
        representation_module: DP-FP's last layer, where it is not found by itself.
        look_over: which rows are looked at before the first draw: "all" or "when_drawn".
        longest_row: the most tokens of a row that is looked at when it is drawn, or of any where
            batches have known shapes; None: all have as many as the first.
        padding_values: fill values, by column, of columns that transformers does not know.
        rows_are_chunks: whether each row is a piece of a longer text.
        adapter_init_data_is_public: whether data that an adapter was initialized from, or that
            decided what it trains, is public.
        other_training: what rows other training of these weights was on; None where there was none
            beside the runs that count.
        torch_compile: whether forward and backward run compiled; its backend and mode are as
            :func:`torch.compile` takes them.

    Raises: UnsupportedArgumentError for batches of many shapes, each of which would be compiled.
    """

    batches: BatchOptions = BatchOptions()
    clipping_strategy: str | None = None
    clipping_memory_ratio: float = MEMORY_RATIO
    representation_module: str | None = None
    look_over: str = ALL
    longest_row: int | None = None
    padding_values: Mapping[str, float] = field(default_factory=dict)
    rows_are_chunks: bool = False
    adapter_init_data_is_public: bool = False
    other_training: str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    def __post_init__(self) -> None:
        if self.torch_compile and self.batches.shapes == ANY:
            why = (
                "Each shape is compiled before the first draw. Set shapes='few' or 'one', and "
                "longest_row."
            )
            expected, error = f"to be False with shapes={ANY!r}", UnsupportedArgumentError
            raise invalid("torch_compile", True, expected, why, error)
