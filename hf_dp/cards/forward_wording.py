"""What a statement says in words of DP-FP's variants (Du and Mi 2021)."""

from __future__ import annotations

from hf_dp.forward_plan import FROZEN, ONCE, PRIVATE_ENCODER, PUBLISHED, SHARED, ForwardPlan
from hf_dp.plan import PrivacyPlan

NOT_ESTABLISHED_REASONS = (
    "the noise protects functions of the noised representation, and the encoder's gradient is "
    "none: it is computed from the activations below the noise, as they are. A word that occurs in "
    "one training row alone moves its embedding in the steps that draw this row and in no other, "
    "whatever the noise",
    "noised rows are released one by one, so whoever knows the other rows sees whether a row took "
    "part; the formula for the secret sample of a sum, from which the paper computes its figure, "
    "does not apply",
    "the labels of the training rows enter the loss as they are",
    "the paper's figure is a limit theorem's estimate far outside its range: even if all of the "
    "above held, the true value would be several times as large",
)
ROW_RELATION = (
    "zero-out: the contribution of one row is replaced by nothing (its released vector holds noise "
    "alone), while the number of rows is public. Adding or removing a row is not covered, because "
    "one vector is released for each row; replacing a row by another moves its vector twice as far"
)
RANDOM_LABEL = "The randomised label of a row replaced by nothing is uniform"


def forward_sampling_of(plan: PrivacyPlan) -> str:
    forward = plan.forward
    assert forward is not None
    if not forward.releases_each_step:
        return (
            "none: a vector of every row is released once; which of them a step uses depends on no "
            "row"
        )
    draws = (
        f"{forward.num_micro_batches} independent Poisson draws a step"
        if forward.num_micro_batches > 1
        else "Poisson"
    )
    each = (
        f"{draws}: each row joins each draw independently with the probability sample_rate; an "
        "empty draw counts"
    )
    if forward.variant == PUBLISHED:
        return each
    if forward.variant == PRIVATE_ENCODER and forward.draws != SHARED:
        return (
            f"{each}. Gradients and released rows come from two independent draws; that of the "
            "gradients stays secret, that of the rows is seen and amplifies nothing"
        )
    return (
        f"{each}. The rows that are released show who was drawn, so the sampling amplifies nothing"
    )


def forward_mechanism_of(plan: PrivacyPlan, of_gradients: str) -> str:
    forward = plan.forward
    assert forward is not None
    in_block = (
        " and put into the block of its class in a vector of all classes"
        if forward.labels_in_vector
        else ""
    )
    rows = (
        "the representation that enters the last layer is clipped to an L2 norm of at most "
        f"{plan.record_clipping_norm!r}"
        f"{in_block}, "
        f"and Gaussian noise with standard deviation {plan.record_noise_std:.6g} is added to each "
        "coordinate"
    )
    if forward.variant == PUBLISHED:
        given = plan.target_epsilon
        figure = (
            ""
            if given is None
            else f", calibrated to {given!r} by the paper's own formula, which gives no epsilon"
        )
        return (
            f"DP-FP as published: in the forward pass {rows}{figure}; everything is then trained "
            "by an ordinary optimizer"
        )
    labels = "" if forward.label_epsilon is None else _labels(forward)
    if forward.variant == FROZEN:
        when = "once for each row" if forward.release == ONCE else "anew each time a row is drawn"
        return (
            f"DP-FP with a frozen encoder: {rows}, {when}; only the last layer trains, and only on "
            f"these vectors{labels}"
        )
    return f"{of_gradients} of the encoder. The last layer trains on released vectors: {rows}"


def _labels(plan: ForwardPlan) -> str:
    return (
        ". Each label was replaced once by randomised response with epsilon "
        f"{plan.label_epsilon!r} among {plan.num_classes} classes"
    )
