"""What a statement says in words, whatever the numbers: unit, relation, sampling, mechanism, what
is not covered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_dp import _validate
from hf_dp.cards.forward_wording import (
    RANDOM_LABEL,
    ROW_RELATION,
    forward_mechanism_of,
    forward_sampling_of,
)
from hf_dp.cards.units import (
    EXAMPLE,
    FEATURES,
    NONE,
    RECORD_AND_LABEL_ZERO_OUT,
    RECORD_ZERO_OUT,
    ZERO_OUT,
    unit_of,
)
from hf_dp.plan import PrivacyPlan
from hf_dp.selection_plan import SelectionPlan

if TYPE_CHECKING:
    from hf_dp.cards.statement import RunFacts

_UNITS = {
    EXAMPLE: "one row of the training set",
    FEATURES: "the text (or image) of one row of the training set, whose label is stated as public",
}
_IN_ROWS = "a person or text that appears in k rows"
_K_FOLD = "is protected k-fold weaker (k times epsilon, and delta times k exp((k - 1) epsilon))"
_SUM_RELATION = (
    "zero-out: the contribution of one row is replaced by nothing, while the number of rows is "
    "public. The value of epsilon is the same as for adding or removing one row, but that relation "
    "is not claimed, because sample rate, steps, delta and divisor are derived from the number of "
    "rows"
)
_RELATIONS = {
    ZERO_OUT: _SUM_RELATION,
    RECORD_ZERO_OUT: ROW_RELATION,
    RECORD_AND_LABEL_ZERO_OUT: f"{ROW_RELATION}. {RANDOM_LABEL}",
    NONE: "none: nothing is established for any relation",
}
SAMPLING = (
    "Poisson: each row joins each step independently with the probability sample_rate; an empty "
    "draw is a step"
)
COVERED = (
    "the released weights, every checkpoint of this run, optimizer state, and whatever is computed "
    "from them without the training set"
)
EVALUATION_ON_TRAINING_ROWS = "evaluation_on_training_rows"  # a name in RunFacts.released
_DERIVED = "sample rate, steps, delta, divisor"


def unit_in_words(unit: str, facts: RunFacts) -> str:
    """What is protected, by its code (:mod:`hf_dp.cards.units`), and how much weaker what is more
    than that."""
    if unit == NONE:
        return "none: nothing is established for any unit"
    who = _IN_ROWS
    if any(run.rows_are_chunks for run in facts.everywhere):
        who = f"each row is a chunk of a longer text, so a document of k chunks, like {_IN_ROWS},"
    return f"{_UNITS[unit]}; {who} {_K_FOLD}"


def relation_in_words(relation: str) -> str:
    """Against which change a row is protected, by its code."""
    return _RELATIONS[relation]


def released_in_words(facts: RunFacts) -> list[str]:
    """What was released without noise, in this run and in those on the same rows that it names."""
    names = {
        EVALUATION_ON_TRAINING_ROWS: f"{EVALUATION_ON_TRAINING_ROWS} (metrics computed on training "
        "rows)"
    }
    earlier = [
        f"{names.get(name, name)} (by {run.name})" for run in facts.earlier for name in run.released
    ]
    return [*(names.get(name, name) for name in facts.released), *earlier]


def sampling_of(plan: PrivacyPlan) -> str:
    if plan.forward is not None:
        return forward_sampling_of(plan)
    if plan.max_batch_size is None:
        return SAMPLING
    return (
        f"{SAMPLING}; of a draw of more than {plan.max_batch_size} rows a uniformly random part of "
        "that size is used"
    )


def mechanism_of(plan: PrivacyPlan) -> str:
    how = {
        "flat": "clipped to an L2 norm of at most",
        "automatic": "rescaled (automatic clipping) to an L2 norm of at most",
        "per_layer": "clipped layer by layer to a total L2 norm of at most",
    }
    clipping = how[_validate.one_of("clipping", plan.clipping, how)]
    training = (
        f"DP-SGD: per-example gradients {clipping} {plan.clipping_norm!r}; Gaussian noise with "
        f"standard deviation noise_multiplier x clipping_norm (and {plan.margin:.1e} of it more, "
        "for the rounding of sums) is added once to their sum, which is divided by the expected "
        "batch size and handed to the optimizer"
    )
    if plan.forward is not None:
        training = forward_mechanism_of(plan, training)
    return training if plan.selection is None else f"{training}. {_selection(plan.selection)}"


def not_covered(facts: RunFacts, plan: PrivacyPlan) -> tuple[str, ...]:
    """What epsilon says nothing about, a line each."""
    return (
        _evaluation(facts),
        "model selection on evaluation data (best checkpoint, early stopping): "
        f"{_selected(facts)}, and not accounted for",
        "hyperparameter tuning and other runs on the same data: each run adds its own epsilon",
        "tokenizer, vocabulary or label set, if built from the training set",
        "pretraining data of the base model",
        *_public_labels(facts, plan),
        f"the number of rows, which is stated as public (with what is derived from it: {_DERIVED})",
        "a data set whose rows depend on other rows, or that keeps state from one reading to the "
        "next: each row is taken to be a function of its own example alone; where one example acts "
        "through several rows, it is protected less",
        "a collator that keeps state where each call cannot get a fresh copy of it (files, "
        "compiled code, packages): what it makes of a row is taken to be a function of that row "
        "alone, too",
        "where a run broke off, if a drawn row broke it (a transform or collator that fails at "
        "random, a model or loss that fails on it, one long row that exhausts the memory): that it "
        "ended there tells that the row was drawn",
        "an output folder that was put back as a whole to an earlier state (a backup, a snapshot) "
        "and trained on, or copied and trained on in both places: neither ledger knows the steps "
        "of the other, so epsilon does not count them",
        "running time and memory use",
        "floating-point attacks on the noise: the proof assumes real-number Gaussian noise",
        "how kernels round: that an example's gradient is rounded alike beside other examples was "
        "measured (float32; bfloat16 on a CPU), not proved",
        "attacks on the random generators: the proof assumes ideal randomness; noise from "
        f"{facts.noise_generator}, sampling from {facts.sampling_generator}",
        *(
            f"{name}: released without noise at the user's request"
            for name in released_in_words(facts)
        ),
    )


def _evaluation(facts: RunFacts) -> str:
    text = (
        "evaluation data: metrics and choices made with it are not noised, and its rows are not "
        "protected; rows of it may occur in the training data, and are not protected there either"
    )
    where = [
        "this run" if run is facts else "an earlier run"
        for run in facts.everywhere
        if not run.evaluation_compared
    ]
    if not where:
        return text
    return (
        f"{text}. Whether one is was not checked for every evaluation set of {where[0]}: a set "
        "that has no column in common with the training rows, or was used before hf_dp compared "
        "them, was not compared with them"
    )


def _selected(facts: RunFacts) -> str:
    if facts.model_selection:
        return "used in this run"
    if any(run.model_selection for run in facts.earlier):
        return "used in an earlier run on the same rows"
    return "not used by this run's trainer"


def _public_labels(facts: RunFacts, plan: PrivacyPlan) -> tuple[str, ...]:
    if unit_of(plan) != EXAMPLE:
        return (
            "the labels of the training rows, which are stated as public: they enter the loss as "
            "they are",
        )
    names = [run.name for run in facts.earlier if run.unit != EXAMPLE]
    if not names:
        return ()
    return (
        "the labels of the training rows, which are stated as public: they entered the loss of "
        f"{', '.join(names)} as they are",
    )


def _selection(plan: SelectionPlan) -> str:
    """How what trains was chosen, and what bounds one example's part in it (DP-FROST, lemma 3)."""
    if plan.release == "gradient":
        what = "the sum of per-example gradients clipped to an L2 norm of at most"
    else:
        how = {
            "mg": "as they are",
            "mgn": "normalized by partition",
            "mgna": "absolute and normalized by partition",
        }
        what = (
            "one magnitude for each partition of the model, of per-example gradients "
            f"({how[plan.release]}) clipped in the {plan.norm_order}-norm to"
        )
    return (
        'What trains was chosen from noisy releases (of purpose "selection" in the ledger), each '
        "on its own Poisson draw of "
        f"rows with probability {plan.sample_rate!r}: {what} {plan.clipping_norm!r}; Gaussian "
        f"noise with standard deviation {plan.noise_multiplier!r} x sensitivity"
    )
