"""What a statement says in words, whatever the numbers: unit, relation, sampling, mechanism, what is not covered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_dp import _validate
from hf_dp.cards.forward_wording import (
    forward_mechanism_of,
    forward_sampling_of,
    relation_of,
    uncovered_labels,
    unit_of,
)
from hf_dp.plan import PrivacyPlan
from hf_dp.selection_plan import SelectionPlan

if TYPE_CHECKING:
    from hf_dp.cards.statement import RunFacts

UNIT = (
    "one row of the training set; a person or text that appears in k rows is protected k-fold weaker "
    "(k times epsilon, and delta times k exp((k - 1) epsilon))"
)
RELATION = (
    "zero-out: the contribution of one row is replaced by nothing, while the number of rows is public. The value of "
    "epsilon is the same as for adding or removing one row, but that relation is not claimed, because sample rate, "
    "steps, delta and divisor are derived from the number of rows"
)
SAMPLING = "Poisson: each row joins each step independently with the probability sample_rate; an empty draw is a step"
COVERED = (
    "the released weights, every checkpoint of this run, optimizer state, and whatever is computed from them without "
    "the training set"
)
_DERIVED = "sample rate, steps, delta, divisor"


def unit_in_words(plan: PrivacyPlan) -> str:
    return UNIT if plan.forward is None else unit_of(plan.forward, UNIT)


def relation_in_words(plan: PrivacyPlan) -> str:
    return RELATION if plan.forward is None else relation_of(plan.forward)


def sampling_of(plan: PrivacyPlan) -> str:
    if plan.forward is not None:
        return forward_sampling_of(plan)
    if plan.max_batch_size is None:
        return SAMPLING
    return (
        f"{SAMPLING}; of a draw of more than {plan.max_batch_size} rows a uniformly random part of that size is used"
    )


def mechanism_of(plan: PrivacyPlan) -> str:
    how = {
        "flat": "clipped to an L2 norm of at most",
        "automatic": "rescaled (automatic clipping) to an L2 norm of at most",
        "per_layer": "clipped layer by layer to a total L2 norm of at most",
    }
    clipping = how[_validate.one_of("clipping", plan.clipping, how)]
    training = (
        f"DP-SGD: per-example gradients {clipping} {plan.clipping_norm!r}; Gaussian noise with standard deviation "
        f"noise_multiplier x clipping_norm (and {plan.margin:.1e} of it more, for the rounding of sums) is added once to "
        "their sum, which is divided by the expected batch size and handed to the optimizer"
    )
    if plan.forward is not None:
        training = forward_mechanism_of(plan, training)
    return training if plan.selection is None else f"{training}. {_selection(plan.selection)}"


def not_covered(facts: RunFacts, plan: PrivacyPlan) -> tuple[str, ...]:
    selected = "used in this run" if facts.model_selection else "not used by this run's trainer"
    return (
        "evaluation data: metrics and choices made with it are not noised",
        f"model selection on evaluation data (best checkpoint, early stopping): {selected}, and not accounted for",
        "hyperparameter tuning and other runs on the same data: each run adds its own epsilon",
        "tokenizer, vocabulary or label set, if built from the training set",
        "pretraining data of the base model",
        *(() if plan.forward is None else uncovered_labels(plan.forward)),
        f"the number of rows, which is stated as public (with what is derived from it: {_DERIVED})",
        "running time and memory use",
        "floating-point attacks on the noise: the proof assumes real-number Gaussian noise",
        "how kernels round: that an example's gradient is rounded alike beside other examples was measured (float32; bfloat16 "
        "on a CPU), not proved",
        f"attacks on the random generators: the proof assumes ideal randomness; noise from {facts.noise_generator}, "
        f"sampling from {facts.sampling_generator}",
        *(f"{name}: released without noise at the user's request" for name in facts.released),
    )


def _selection(plan: SelectionPlan) -> str:
    """How what trains was chosen, and what bounds one example's part in it (DP-FROST, lemma 3)."""
    if plan.release == "gradient":
        what = "the sum of per-example gradients clipped to an L2 norm of at most"
    else:
        how = {"mg": "as they are", "mgn": "normalized by partition", "mgna": "absolute and normalized by partition"}
        what = (
            f"one magnitude for each partition of the model, of per-example gradients ({how[plan.release]}) clipped in the "
            f"{plan.norm_order}-norm to"
        )
    return (
        f'What trains was chosen from noisy releases (of purpose "selection" in the ledger), each on its own Poisson draw of '
        f"rows with probability {plan.sample_rate!r}: {what} {plan.clipping_norm!r}; Gaussian noise with standard deviation "
        f"{plan.noise_multiplier!r} x sensitivity"
    )
