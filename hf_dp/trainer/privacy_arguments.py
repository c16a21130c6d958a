"""The arguments of what is promised, how a step is made, and what leaves a run, with their
checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Check, Problems, argument
from hf_dp._validate import (
    in_unit_interval,
    integer,
    invalid,
    non_negative,
    one_of,
    positive,
)
from hf_dp.accounting import ACCOUNTANTS
from hf_dp.plans.dp_fp import DP_FP, PUBLISHED
from hf_dp.plans.dp_sgd import (
    BOUND,
    CLIPPINGS,
    MEAN_RUNS,
    RATIO,
    budget_ratio,
    check_mean_runs,
    half_given,
    loss_bound,
)
from hf_dp.plans.draws import POISSON, check_sampling
from hf_dp.plans.units import NEIGHBORING_RELATIONS
from hf_dp.statement.unnoised import CLIPPED_GRADIENT_NORM, RELEASABLE
from hf_dp.statement.weaknesses import OTHER_TRAINING

NON_PRIVATE = "non_private"


@dataclass
class BudgetArguments(ArgumentGroup):
    """Parameters of the privacy budget."""

    privacy_mode: str = argument(
        "dp_sgd",
        "How privacy is obtained: dp_sgd (per-example clipping and Gaussian noise, with any "
        "optimizer), dp_fp (noise on the representation), non_private (the plain Trainer; privacy "
        "arguments are then refused), or a mode that register_mode added.",
    )
    target_epsilon: float | None = argument(
        None,
        "Epsilon to spend over the whole run, above 0; the noise is calibrated to it. In private "
        "modes give exactly one of target_epsilon and noise_multiplier.",
    )
    target_delta: float | None = argument(
        None, "Delta, a probability in (0, 1). Unset means 1/(2N) for N training examples."
    )
    noise_multiplier: float | None = argument(
        None,
        "Standard deviation of the noise in units of per_example_max_grad_norm, above 0.",
    )
    accountant: str | None = argument(
        None,
        f"Who computes epsilon: one of {', '.join(ACCOUNTANTS)}. Unset means pld. gdp_clt is an "
        "estimate, labelled so, and not with target_epsilon, since calibration needs a bound; the "
        "others are bounds. For DP-FP as published, which has no bound, it is gdp_clt, the paper's "
        "own figure.",
    )
    neighboring_relation: str = argument(
        "zero_out",
        "Which data sets count as neighbors: zero_out (one example's contribution is replaced by "
        "nothing, the number of examples is public).",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "target_epsilon": (positive, "Typical values are 1 to 10."),
        "target_delta": (in_unit_interval, "Leave it unset for 1/(2N)."),
        "noise_multiplier": (positive, "For a run without noise use privacy_mode='non_private'."),
        "accountant": (one_of, ACCOUNTANTS),
        "neighboring_relation": (one_of, NEIGHBORING_RELATIONS, "Use 'zero_out'."),
    }

    @property
    def is_private(self) -> bool:
        """Whether this run claims an epsilon."""
        return self.privacy_mode != NON_PRIVATE

    @property
    def is_published_dp_fp(self) -> bool:
        """Whether no epsilon is established for what this run does."""
        return self.privacy_mode == DP_FP and getattr(self, "dp_fp_variant", None) == PUBLISHED

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a budget that is said twice or not at all, and an accountant that cannot count."""
        epsilon, noise = args.target_epsilon, args.noise_multiplier
        if epsilon is None and noise is None:
            found.refuse(
                "target_epsilon",
                "to be given when `noise_multiplier` is not",
                "One of the two determines the privacy of the run. Set exactly one.",
            )
        if epsilon is not None and noise is not None:
            found.refuse(
                "target_epsilon",
                f"to be unset when `noise_multiplier` ({noise!r}) is given",
                "Each determines the other. Remove one of the two.",
            )
        if args.is_published_dp_fp:
            if args.accountant != "gdp_clt":
                found.refuse(
                    "accountant",
                    "to be unset for DP-FP as published",
                    "No accountant has a bound for it; 'gdp_clt' computes the paper's own figure.",
                )
        elif args.accountant == "gdp_clt" and epsilon is not None:
            found.refuse(
                "accountant",
                "to be a bound when `target_epsilon` is given",
                "The noise is calibrated to a bound, and gdp_clt is an estimate. Use 'pld', or "
                "give `noise_multiplier` instead.",
            )


@dataclass
class StepArguments(ArgumentGroup):
    """Parameters of a step."""

    expected_batch_size: int | None = argument(
        None,
        "Expected number of examples in a logical batch: a random draw, the unit of one optimizer "
        "step and one noise; the sample rate is this divided by the number of examples. Required "
        "in private modes. per_device_train_batch_size is the physical batch: memory only.",
    )
    sampling: str = argument(
        POISSON,
        "Which examples join a logical batch. poisson: each with the same probability, "
        "independently in each step. random_allocation: each once an epoch, in a uniformly random "
        "step; the same noise then costs less epsilon. An epoch is paid for before its first step, "
        "and one that is broken off is paid for in full: save checkpoints with "
        "save_strategy=epoch. Only accountant pld knows it.",
    )
    private_selection_mean_runs: float | None = argument(
        None,
        "Makes this run one of a search: of a secret, random number of runs with this mean, only "
        "the best is released, and epsilon is that of the whole search. It holds only under the "
        "conditions of BestOfRandomRuns, which `hf-dp sweep --private-selection` meets. A single "
        "evaluation row that equals a training row is refused. Only accountant rdp knows it.",
    )
    max_logical_batch_size: int | None = argument(
        None,
        "Most examples of a draw that a step uses; of a larger draw a random part is left out "
        "(truncated Poisson sampling). Bounds the time and memory of a step; costs little epsilon "
        "from about 1.2 times expected_batch_size on, and much below. Unset means no limit. Only "
        "accountant pld knows it.",
    )
    per_example_max_grad_norm: float = argument(
        0.1, "Largest L2 norm with which one example's gradient enters the sum, above 0."
    )
    clipping: str = argument(
        "flat",
        "How a norm becomes a weight. flat: one norm over all trainable parameters, larger ones "
        "are scaled down to it. automatic: every example is scaled to about it (AUTO-S; wants a "
        "smaller learning rate where gradients are small). per_layer: each of the K layers to it "
        "divided by sqrt(K). The sensitivity is the same.",
    )
    max_grad_norm: float | None = argument(
        None,
        "The Trainer's own clip, of the averaged gradient after noise. Unset means 0 (off) in "
        "private modes and 1.0 in non_private.",
    )
    clip_noised_gradient: bool = argument(
        False,
        "Whether max_grad_norm above 0 is meant: it clips the noised gradient, which costs no "
        "privacy, but is easily taken for the per-example clip.",
    )
    adam_bc_floor: float | None = argument(
        None,
        "Take the known noise off Adam's second moment (DP-AdamBC, Tang et al. 2024, arXiv "
        "2312.14334), which costs no privacy. The number is the least that is left of it, as a "
        "share of the noise's variance, above 0, in place of adam_epsilon; a smaller one allows "
        "larger steps, so lower the learning rate with it. Unset means plain Adam.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "expected_batch_size": (
            integer,
            1,
            "It is the logical batch of a private step; set it (per_device_train_batch_size is "
            "memory only).",
        ),
        "sampling": (check_sampling,),
        MEAN_RUNS: (check_mean_runs,),
        "max_logical_batch_size": (integer, 1, "Leave it unset for no limit."),
        "per_example_max_grad_norm": (positive, "The default is 0.1."),
        "clipping": (one_of, CLIPPINGS),
        "adam_bc_floor": (positive, "0.1 is a first value to try."),
        "max_grad_norm": (non_negative, "Use 0 to switch it off."),
    }

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a missing batch, and clips and searches that contradict other arguments."""
        if args.expected_batch_size is None:
            found.attempt("expected_batch_size", *StepArguments.CHECKS["expected_batch_size"])
        if args.max_steps != -1:
            found.attempt("max_steps", integer, 1, "Leave it at -1 for `num_train_epochs`.")
        if args.private_selection_mean_runs is not None:
            _search_problems(args, found)
        if found.keys() & {"max_grad_norm", "clip_noised_gradient"}:
            return
        if args.max_grad_norm and not args.clip_noised_gradient:
            found.unsupported(
                "max_grad_norm",
                "to be unset or 0 in private modes",
                "It clips the averaged gradient after noise, not the gradient of each example. To "
                "clip the latter, set `per_example_max_grad_norm`. To clip after noise, set "
                "clip_noised_gradient=True.",
            )
        if args.clip_noised_gradient and not args.max_grad_norm:
            found.refuse(
                "clip_noised_gradient",
                "to be False when `max_grad_norm` is 0",
                "Set `max_grad_norm` above 0.",
            )


def _search_problems(args: Any, found: Problems) -> None:
    if args.earlier_runs:
        found.unsupported(
            "earlier_runs", f"to be empty with {MEAN_RUNS}", "No bound is implemented for both."
        )
    if args.evaluate_on_training_rows:
        found.unsupported(
            "evaluate_on_training_rows",
            f"to be False with {MEAN_RUNS}",
            "The score that selects a run must not read the training rows.",
        )
    if args.release:
        found.unsupported(
            "release",
            f"to be empty with {MEAN_RUNS}",
            "The score that selects a run must not be released without noise.",
        )


def _numbers_by_column(name: str, value: object) -> dict[str, float]:
    numbers = isinstance(value, dict) and all(
        isinstance(column, str)
        and isinstance(fill, (int, float))
        and not isinstance(fill, bool)
        and fill == fill
        for column, fill in value.items()
    )
    if not numbers:
        raise invalid(
            name,
            value,
            "to be a mapping from columns to numbers",
            "For example {'token_weights': 0}.",
        )
    return dict(value)  # type: ignore[call-overload]


def _list_of_names(name: str, value: object, known: tuple[str, ...]) -> list[str]:
    empty = "Leave it empty to release nothing."
    if not isinstance(value, (list, tuple)):
        raise invalid(name, value, f"to be a list of names among {list(known)}", empty)
    return [one_of(name, item, known, empty) for item in value]


def _list_of_paths(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise invalid(
            name, value, "to be a list of folders", "Leave it empty if the rows were never used."
        )
    return list(value)


@dataclass
class RowArguments(ArgumentGroup):
    """Parameters of the rows, and of earlier runs on them."""

    earlier_runs: list[str] = argument(
        [],
        "Folders (or privacy.json files) of earlier private runs on the same rows, for example the "
        "one that made the base: what they released is put into this run's ledger and paid from "
        "the same target.",
    )
    other_training: str | None = argument(
        None,
        f"What rows any other training of the model was on: {' or '.join(OTHER_TRAINING)} (which "
        "the statement is not about). The card repeats it. A model that anything but counted steps "
        "has trained is refused otherwise.",
    )
    padding_values: dict[str, float] = argument(
        {},
        "By column, the value with which a column of your own is padded where rows differ in "
        "length. The columns of transformers are known; others are refused until declared here.",
    )
    rows_are_chunks: bool = argument(
        False,
        "Whether a row is a piece of a longer text. Then a piece is what is protected, and the "
        "card says so.",
    )
    adapter_init_data_is_public: bool = argument(
        False,
        "Whether the data from which an adapter's initial weights were computed (EVA, CorDA, "
        "LoRA-GA), or by which another run selected what it trains (FROST), is public. Such an "
        "adapter is refused otherwise.",
    )
    evaluate_on_training_rows: bool = argument(
        False,
        "Whether evaluation sets may hold rows of the training set. Their metrics are then "
        "released without noise, and the card says so.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "earlier_runs": (_list_of_paths,),
        "other_training": (one_of, OTHER_TRAINING),
        "padding_values": (_numbers_by_column,),
    }


@dataclass
class ReleaseArguments(ArgumentGroup):
    """Parameters of what leaves the run."""

    noised_loss_budget_ratio: float | None = argument(
        None,
        "Only for dp_sgd, together with noised_loss_bound: releases the training loss of each step "
        "with noise, as noised_loss in the logs, and epsilon covers it. The share of the privacy "
        "budget, in (0, 1), that it gets; the gradient's noise grows by the factor "
        "1/sqrt(1 - share). A hundredth is enough for a curve. Unset means none is released.",
    )
    noised_loss_bound: float | None = argument(
        None,
        "With noised_loss_budget_ratio: each example's loss is clipped to [0, bound] before the "
        "losses are added up and noised. Above 0, and public: choose it without looking at the "
        "rows, for example twice the loss of a guess (log of the number of classes).",
    )
    release: list[str] = argument(
        [],
        f"Names of un-noised quantities to log and publish anyway, of {', '.join(RELEASABLE)} "
        "(dp_sgd alone: the norm of each logged step's clipped mean before noise). Epsilon does "
        "not cover them and the card says so. For experiments on public rows.",
    )
    insecure_seed: int | None = argument(
        None,
        "For tests only: makes noise and draws reproducible. Whoever knows the seed can remove the "
        "noise, and the card says that the run is not private.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        RATIO: (budget_ratio,),
        BOUND: (loss_bound,),
        "release": (_list_of_names, RELEASABLE),
        "insecure_seed": (integer, 0, "Leave it unset outside tests."),
    }

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note what only the steps of DP-SGD can release, and half a noised loss."""
        given = [name for name in (BOUND, RATIO) if getattr(args, name) is not None]
        if args.privacy_mode != "dp_sgd":
            for name in given:
                found.unsupported(
                    name,
                    f"to be unset when privacy_mode={args.privacy_mode!r}",
                    "Only the steps of DP-SGD add up losses over a secret draw; DP-FP's last layer "
                    "trains on released rows. Remove it.",
                )
            if CLIPPED_GRADIENT_NORM in (args.release or ()):
                found.unsupported(
                    "release",
                    f"to be without {CLIPPED_GRADIENT_NORM!r} when "
                    f"privacy_mode={args.privacy_mode!r}",
                    "Only a step of DP-SGD adds up clipped gradients and nothing else. Remove it.",
                )
        elif len(given) == 1:
            (other,) = given
            missing = RATIO if other == BOUND else BOUND
            found.setdefault(missing, half_given(missing, other))
