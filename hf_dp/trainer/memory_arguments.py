"""The arguments of memory and speed, which change neither result nor epsilon, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Check, Problems, argument
from hf_dp._validate import integer, one_of
from hf_dp.plans.dp_fp import DP_FP, PRIVATE_ENCODER
from hf_dp.plans.dp_sgd import MEMORY_RATIO, STRATEGIES, check_memory_ratio


@dataclass
class MemoryArguments(ArgumentGroup):
    """Parameters of memory and speed."""

    clipping_strategy: str | None = argument(
        None,
        "How clipped sums are computed, never what they are: book_keeping (one backward pass, all "
        "records held), two_pass (two backward passes over one graph, the least memory) or "
        "per_example (explicit per-example gradients, slow; to compare with). Unset means two_pass "
        "under gradient checkpointing, else book_keeping.",
    )
    clipping_memory_ratio: float = argument(
        MEMORY_RATIO,
        "How much memory book_keeping may take for speed, at least 1: an estimate of its peak "
        "relative to training without privacy. More than 1.05 pays for sequences of some hundred "
        "tokens.",
    )
    chunked_loss: bool = argument(
        False,
        "Form a causal language model's loss by blocks of the vocabulary, so that no logits of a "
        "batch are held: for large vocabularies and long rows. It costs one more product of the "
        "head, or two where the head trains on rows with fewer positions than hidden features.",
    )
    max_tokens_per_physical_batch: int | None = argument(
        None,
        "Largest number of tokens of a physical batch, padding included, beside "
        "per_device_train_batch_size: short examples then come in larger batches than long ones.",
    )
    auto_physical_batch_size: bool = argument(
        False,
        "Whether to find, before training, the largest physical batch that fits into the GPU, and "
        "to write it into per_device_train_batch_size and, for text, "
        "max_tokens_per_physical_batch. It is found on made-up examples and does not depend on the "
        "rows. Where one of the two is given (for the former: anything but its default, 8), it is "
        "an upper limit.",
    )
    auto_physical_batch_length: int | None = argument(
        None,
        "With auto_physical_batch_size, the number of tokens at which rows are truncated, which "
        "the made-up examples then have. Unset means the largest number that tokenizer and model "
        "take. A longer row is refused.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "clipping_strategy": (one_of, STRATEGIES),
        "clipping_memory_ratio": (check_memory_ratio,),
        "max_tokens_per_physical_batch": (integer, 1, "Leave it unset for no limit."),
        "auto_physical_batch_length": (integer, 1, "Leave it unset for what the model takes."),
    }

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a physical batch of less than one example, or one that cannot be found."""
        found.attempt(
            "per_device_train_batch_size", integer, 1, "It is the physical batch: memory only."
        )
        auto = "auto_physical_batch_size"
        if args.auto_physical_batch_length is not None and not args.auto_physical_batch_size:
            found.refuse(
                "auto_physical_batch_length",
                f"to be unset without `{auto}`",
                f"Set {auto}=True, or remove it.",
            )
        variant = args.dp_fp_variant if args.privacy_mode == DP_FP else PRIVATE_ENCODER
        if args.auto_physical_batch_size and variant not in (None, PRIVATE_ENCODER):
            found.refuse(
                auto,
                f"to be False with dp_fp_variant={variant!r}",
                "It is found for steps that clip per-example gradients. Set "
                "`per_device_train_batch_size`.",
            )
