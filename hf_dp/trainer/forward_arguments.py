"""The arguments of ``privacy_mode="dp_fp"``, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Need, Problems, argument
from hf_dp._validate import in_unit_interval, invalid
from hf_dp.accounting.knows import NO_BOUND
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans import dp_fp

# Du and Mi 2021, section 4.1. Learning rate and batch size are small because noise enters the
# forward pass.
PUBLISHED_BATCH_SIZE, PUBLISHED_MICRO_BATCHES, PUBLISHED_LEARNING_RATE = 32, 32, 5e-6

# What each variant trains, and what is proven; for a user who has not chosen one.
_CHOICES = (
    "'frozen' trains only the last layer, on noised representations: (epsilon, delta) is proven "
    "for each row's text. 'private_encoder' trains everything, with DP-SGD below the noise: "
    "(epsilon, delta) is proven, too. 'published' trains everything with an ordinary optimizer, "
    "as Du and Mi do: nothing is proven, and no epsilon is printed."
)


def _only_of(variants: tuple[str, ...], why: str, names: str) -> Need:
    return Need(names, "dp_fp_variant", variants, f"{why} Remove it.", UnsupportedArgumentError)


# Arguments that not every variant has: those that have it, and why the others do not.
_ONLY_OF = (
    _only_of((), "Draws are not truncated.", "max_logical_batch_size"),
    _only_of((), "Its gradients have noise of several kinds.", "adam_bc_floor"),
    _only_of((), NO_BOUND, "sampling private_selection_mean_runs"),
    _only_of(
        (dp_fp.PRIVATE_ENCODER,),
        "No gradients are clipped.",
        "clipping clipping_strategy clipping_memory_ratio",
    ),
    _only_of((dp_fp.PRIVATE_ENCODER,), "It is for causal language models.", "chunked_loss"),
    _only_of(
        (dp_fp.PRIVATE_ENCODER,),
        "There `noise_multiplier` is the noise of the representation.",
        "representation_noise_multiplier",
    ),
    _only_of(
        (dp_fp.FROZEN, dp_fp.PRIVATE_ENCODER),
        "The published variant does not protect labels.",
        "labels_in_vector",
    ),
)


@dataclass
class ForwardArguments(ArgumentGroup):
    """Parameters of DP-FP.

    It adds noise to the representation that enters the last layer (Du and Mi 2021). Only
    privacy_mode="dp_fp" reads them.
    """

    dp_fp_variant: str | None = argument(
        None,
        f"What trains below the noise, one of {', '.join(dp_fp.VARIANTS)}; required for dp_fp. "
        "frozen: nothing, so that what trains is a function of released vectors. private_encoder: "
        "everything, with DP-SGD; the last layer trains on released vectors. published: "
        "everything, with an ordinary optimizer, as in the paper; no epsilon is established for "
        "it.",
        dp_fp.VARIANTS,
    )
    representation_clipping_norm: float = argument(
        1.0, "Only for dp_fp: largest L2 norm C of a representation, above 0 (equation 8)."
    )
    num_micro_batches: int | None = argument(
        None,
        "Only for dp_fp: the number M of independent Poisson draws per step, each at the rate "
        f"expected_batch_size / (M N). Unset means {PUBLISHED_MICRO_BATCHES} for published (as in "
        "the paper), and 1 otherwise.",
    )
    representation_module: str | None = argument(
        None,
        "Only for dp_fp: dotted name of the layer that takes one vector per example and gives the "
        "logits. Unset means that it is found automatically.",
    )
    representation_release: str = argument(
        dp_fp.ONCE,
        "Only for dp_fp, frozen: once (one noisy vector per example for the whole run; the least "
        "noise) or fresh (a new vector each time the example is drawn).",
        dp_fp.REUSES,
    )
    representation_noise_multiplier: float | None = argument(
        None,
        "Only for dp_fp, private_encoder, together with noise_multiplier: the noise on a vector, "
        "in units of representation_clipping_norm.",
    )
    representation_budget_ratio: float = argument(
        0.5,
        "Only for dp_fp, private_encoder, with target_epsilon: the share of it, in (0, 1), that "
        "is reserved for the vectors.",
        in_unit_interval,
    )
    labels_in_vector: bool = argument(
        False,
        "Only for dp_fp, frozen and private_encoder: releases a vector with one block per class, "
        "all of it noised, in which the representation is in the block of its class. The label is "
        "thereby protected at no extra cost. Needs a linear last layer, whose bias does not "
        "train.",
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(
            " ".join(__annotations__),  # all of the above
            "privacy_mode",
            (dp_fp.DP_FP,),
            "Only DP-FP reads it. Remove it, or set privacy_mode='dp_fp'.",
        ),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note what the variant of DP-FP does not have."""
        if args.privacy_mode != dp_fp.DP_FP:
            return
        if args.dp_fp_variant is None:
            expected = f"to be one of {', '.join(map(repr, dp_fp.VARIANTS))}"
            found.refuse("dp_fp_variant", f"{expected} with privacy_mode={dp_fp.DP_FP!r}", _CHOICES)
        elif "dp_fp_variant" not in found:
            for need in _ONLY_OF:
                need.note(args, found)
            try:
                forward_plan(args, 2)
            except InvalidArgumentError as problem:
                if not found:
                    found["dp_fp"] = problem


def forward_plan(args: Any, num_classes: int | None) -> dp_fp.ForwardPlan:
    """Return the plan of ``privacy_mode="dp_fp"`` for a model of this many classes."""
    sigma, norm = args.noise_multiplier, args.representation_clipping_norm
    draws = args.num_micro_batches
    classes = num_classes if args.labels_in_vector else None
    if args.dp_fp_variant == dp_fp.PUBLISHED:
        return dp_fp.PublishedPlan(norm, sigma, draws)
    if args.dp_fp_variant == dp_fp.FROZEN:
        return dp_fp.FrozenPlan(
            norm, sigma, draws, args.representation_release, args.labels_in_vector, classes
        )
    if draws != 1:
        raise invalid("num_micro_batches", draws, "to be 1 with a private encoder", "Remove it.")
    return dp_fp.PrivateEncoderPlan(
        args.per_example_max_grad_norm,
        sigma,
        args.clipping,
        norm,
        args.representation_noise_multiplier,
        None if sigma is not None else args.representation_budget_ratio,
        args.labels_in_vector,
        classes,
    )


def resolve_forward(args: Any) -> None:
    """Fill in the arguments that are unset, by variant."""
    published = args.dp_fp_variant == dp_fp.PUBLISHED
    if args.num_micro_batches is None:
        args.num_micro_batches = PUBLISHED_MICRO_BATCHES if published else 1
    if published and args.expected_batch_size is None:
        args.expected_batch_size = PUBLISHED_BATCH_SIZE
    if published and args.learning_rate is None:
        args.learning_rate = PUBLISHED_LEARNING_RATE
