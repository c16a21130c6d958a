"""The arguments of ``privacy_mode="dp_fp"``, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import in_unit_interval, integer, invalid, one_of, positive
from hf_dp.clipping.forms import MEMORY_RATIO
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.dp_fp import (
    DP_FP,
    DRAWS,
    FROZEN,
    ONCE,
    PRIVATE_ENCODER,
    PUBLISHED,
    REUSES,
    SEPARATE,
    VARIANTS,
    ForwardPlan,
    FrozenPlan,
    PrivateEncoderPlan,
    PublishedPlan,
)
from hf_dp.plans.sampling import POISSON

# Du and Mi 2021, section 4.1. Learning rate and batch size are small because noise enters the
# forward pass.
PUBLISHED_BATCH_SIZE, PUBLISHED_MICRO_BATCHES, PUBLISHED_LEARNING_RATE = 32, 32, 5e-6

Check = Callable[..., object]


# What each variant trains, and what is proven; for a user who has not chosen one.
_CHOICES = (
    "'frozen' trains the last layer alone, on noised representations: (epsilon, delta) of each "
    "row's text is proven. 'private_encoder' trains everything, what lies below the noise by "
    "DP-SGD: (epsilon, delta) is proven, too. 'published' trains everything by an ordinary "
    "optimizer, as Du and Mi do: nothing is proven, and no epsilon is printed."
)

# Arguments that no variant has, not even the one that also releases a sum.
_FOR_SUMS_ALONE = (
    "max_logical_batch_size",
    "sampling",
    "private_selection_mean_runs",
    "adam_bc_floor",
)


@dataclass
class ForwardArguments:
    r"""
    Arguments of [`DPTrainingArguments`] that only `privacy_mode="dp_fp"` reads. That mode adds
    noise to the representation that enters the last layer (Du and Mi 2021).

    > Parameters of DP-FP

        dp_fp_variant (`str`, *optional*):
            What trains below the noise. Required in that mode. `"frozen"`: nothing, so that what
            trains is a function of released vectors. `"private_encoder"`: everything, by DP-SGD;
            the last layer trains on released vectors. `"published"`: everything, by an
            ordinary optimizer, as in the paper; *no epsilon is established for it*, and card, logs
            and CLI say so.
        representation_clipping_norm (`float`, *optional*, defaults to `1.0`):
            Largest L2 norm C of a representation, above 0 (equation 8).
        num_micro_batches (`int`, *optional*):
            The number M of independent Poisson draws per step, each at the rate
            `expected_batch_size` / (M N). Unset means 32 for `"published"` (as in the paper), and
            1 otherwise.
        representation_module (`str`, *optional*):
            Dotted name of the layer that takes one vector per example and gives the logits. If
            unset, the layer is found automatically.
        representation_release (`str`, *optional*, defaults to `"once"`):
            Only for `"frozen"`: `"once"` (one noisy vector per example for the whole run; the least
            noise) or `"fresh"` (a new vector each time the example is drawn).
        representation_draws (`str`, *optional*, defaults to `"separate"`):
            Only for `"private_encoder"`: whether the encoder's gradients and the vectors come from
            `"separate"` Poisson draws or from one `"shared"` draw. A shared draw costs much more,
            because the vectors show whose gradients are in the sum.
        representation_noise_multiplier (`float`, *optional*):
            Only for `"private_encoder"`, together with `noise_multiplier`: the noise on a vector,
            in units of `representation_clipping_norm`.
        representation_budget_ratio (`float`, *optional*, defaults to `0.5`):
            Only for `"private_encoder"` with `target_epsilon`: the share of it, in (0, 1), that the
            gradients leave to the vectors.
        label_epsilon (`float`, *optional*):
            Only for `"frozen"`: randomizes each label once, by randomized response with this
            epsilon, which adds to the rest. If unset, labels are public, unless `labels_in_vector`
            is set.
        labels_in_vector (`bool`, *optional*, defaults to `False`):
            Only for `"frozen"` and `"private_encoder"`: releases a vector with one block per class,
            all of it noised, in which the representation stands in the block of its class. The
            label is thereby protected at no extra cost. Needs a linear last layer, whose bias does
            not train.
    """

    dp_fp_variant: str | None = field(
        default=None,
        metadata={
            "help": f"Only for dp_fp, and required there: one of {', '.join(VARIANTS)}. Epsilon is "
            "proven for the first two; for published no epsilon is established."
        },
    )
    representation_clipping_norm: float = field(
        default=1.0,
        metadata={"help": "Only for dp_fp: largest L2 norm of a representation, above 0."},
    )
    num_micro_batches: int | None = field(
        default=None,
        metadata={
            "help": "Only for dp_fp: independent Poisson draws per step. Unset means "
            f"{PUBLISHED_MICRO_BATCHES} for published, and 1 otherwise."
        },
    )
    representation_module: str | None = field(
        default=None,
        metadata={
            "help": "Only for dp_fp: the layer that gives the logits, if it is not found "
            "automatically."
        },
    )
    representation_release: str = field(
        default=ONCE, metadata={"help": f"Only for dp_fp, frozen: one of {', '.join(REUSES)}."}
    )
    representation_draws: str = field(
        default=SEPARATE,
        metadata={"help": f"Only for dp_fp, private_encoder: one of {', '.join(DRAWS)}."},
    )
    representation_noise_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "Only for dp_fp, private_encoder, together with noise_multiplier: the noise on "
            "a vector, in units of representation_clipping_norm."
        },
    )
    representation_budget_ratio: float = field(
        default=0.5,
        metadata={
            "help": "Only for dp_fp, private_encoder: the share of target_epsilon that the "
            "gradients leave to the vectors."
        },
    )
    label_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "Only for dp_fp, frozen: epsilon of a randomized response on the labels."
        },
    )
    labels_in_vector: bool = field(
        default=False,
        metadata={
            "help": "Only for dp_fp, frozen and private_encoder: hide the label in the released "
            "vector."
        },
    )


def forward_plan(args: Any, num_classes: int | None) -> ForwardPlan:
    """Return the plan of ``privacy_mode="dp_fp"`` for a model of this many classes.

    Raises: InvalidArgumentError for arguments that the variant does not have.
    """
    variant, sigma = args.dp_fp_variant, args.noise_multiplier
    _check_labels(args)
    classes = num_classes if args.label_epsilon is not None or args.labels_in_vector else None
    norm, draws = args.representation_clipping_norm, args.num_micro_batches
    if variant == PUBLISHED:
        return PublishedPlan(norm, sigma, draws)
    if variant == FROZEN:
        return FrozenPlan(
            norm,
            sigma,
            draws,
            args.representation_release,
            args.label_epsilon,
            args.labels_in_vector,
            classes,
        )
    if draws != 1:
        raise invalid("num_micro_batches", draws, "to be 1 with a private encoder", "Remove it.")
    return PrivateEncoderPlan(
        args.per_example_max_grad_norm,
        sigma,
        args.clipping,
        args.representation_draws,
        norm,
        args.representation_noise_multiplier,
        None if sigma is not None else args.representation_budget_ratio,
        args.labels_in_vector,
        classes,
    )


def _check_labels(args: Any) -> None:
    """Raise InvalidArgumentError for a protection of labels that the variant does not have."""
    if not isinstance(args.labels_in_vector, bool):
        raise invalid("labels_in_vector", args.labels_in_vector, "to be True or False")
    protected = args.label_epsilon is not None or args.labels_in_vector
    if protected and args.dp_fp_variant == PUBLISHED:
        raise invalid(
            "dp_fp_variant",
            args.dp_fp_variant,
            "to be 'frozen' or 'private_encoder' with `label_epsilon` or `labels_in_vector`",
            "The published variant protects no labels, and no guarantee is established for it.",
        )
    if args.label_epsilon is not None and args.dp_fp_variant == PRIVATE_ENCODER:
        raise invalid(
            "label_epsilon",
            args.label_epsilon,
            "to be None with a private encoder",
            "Its vectors are drawn anew in each step. Protect the labels with "
            "labels_in_vector=True, at no further cost.",
        )


def resolve_forward(args: Any) -> None:
    """Fill in the arguments that are unset, by variant."""
    published = args.dp_fp_variant == PUBLISHED
    if args.num_micro_batches is None:
        args.num_micro_batches = PUBLISHED_MICRO_BATCHES if published else 1
    if published and args.expected_batch_size is None:
        args.expected_batch_size = PUBLISHED_BATCH_SIZE
    if published and args.learning_rate is None:
        args.learning_rate = PUBLISHED_LEARNING_RATE


def forward_problems(
    args: Any, check: Callable[..., None], problems: dict[str, InvalidArgumentError]
) -> None:
    """Add the problems with the arguments of DP-FP to ``problems``.

    ``check(problems, name, validator, *details)`` checks one argument and adds its problem.
    """
    if args.privacy_mode != DP_FP:
        for own in dataclasses.fields(ForwardArguments):
            if getattr(args, own.name) != own.default:
                problems[own.name] = invalid(
                    own.name,
                    getattr(args, own.name),
                    f"to be left at {own.default!r} when privacy_mode={args.privacy_mode!r}",
                    "Only DP-FP reads it. Remove it, or set privacy_mode='dp_fp'.",
                )
        return
    if args.dp_fp_variant is None:
        expected = f"to be one of {', '.join(map(repr, VARIANTS))} with privacy_mode={DP_FP!r}"
        problems["dp_fp_variant"] = invalid("dp_fp_variant", None, expected, _CHOICES)
        return
    check(problems, "dp_fp_variant", one_of, VARIANTS)
    check(problems, "representation_clipping_norm", positive, "The paper's is 1.0.")
    check(problems, "num_micro_batches", integer, 1)
    check(problems, "representation_release", one_of, REUSES)
    check(problems, "representation_draws", one_of, DRAWS)
    check(problems, "representation_budget_ratio", in_unit_interval)
    for name in ("representation_noise_multiplier", "label_epsilon"):
        if getattr(args, name) is not None:
            check(problems, name, positive)
    if problems:
        return
    if args.dp_fp_variant != PRIVATE_ENCODER and args.representation_noise_multiplier is not None:
        problems["representation_noise_multiplier"] = invalid(
            "representation_noise_multiplier",
            args.representation_noise_multiplier,
            f"to be unset with dp_fp_variant={args.dp_fp_variant!r}",
            "There `noise_multiplier` is the noise of the representation.",
        )
    for name, value, why in (
        ("clipping_strategy", None, "No gradients are clipped"),
        ("clipping_memory_ratio", MEMORY_RATIO, "No gradients are clipped"),
        ("chunked_loss", False, "It is for causal language models"),
        ("clipping", "flat", "No gradients are clipped"),
        ("max_logical_batch_size", None, "Draws are not truncated"),
        ("adam_bc_floor", None, "Its gradients have noise of several kinds"),
        ("sampling", POISSON, "No bound is implemented for both"),
        ("private_selection_mean_runs", None, "No bound is implemented for both"),
    ):
        if getattr(args, name) != value and (
            args.dp_fp_variant != PRIVATE_ENCODER or name in _FOR_SUMS_ALONE
        ):
            problems[name] = invalid(
                name,
                getattr(args, name),
                f"to be left at {value!r} with dp_fp_variant={args.dp_fp_variant!r}",
                f"{why}. Remove it.",
                UnsupportedArgumentError,
            )
    try:
        forward_plan(args, 2)
    except InvalidArgumentError as problem:
        problems["dp_fp"] = problem
