"""The arguments of what is promised, how a step is made, what leaves a run, and of memory; and the
mode that they select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Need, Problems, argument, is_given
from hf_dp._validate import in_unit_interval, integer, invalid, non_negative, one_of
from hf_dp.accounting import ACCOUNTANTS, epsilon
from hf_dp.accounting.event import Event
from hf_dp.accounting.knows import NO_BOUND
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans import balance, dp_sgd, quantile, scaling
from hf_dp.plans.bands import AUTO, BANDS, banded, check_bands
from hf_dp.plans.dp_fp import DP_FP, PRIVATE_ENCODER, PUBLISHED
from hf_dp.plans.draws import GROUP, POISSON, check_sampling, grouped
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import BY_ROW, EXAMPLE, NEIGHBORING_RELATIONS, USER
from hf_dp.statement.facts import CLIPPED_GRADIENT_NORM, RELEASABLE
from hf_dp.trainer.forward_arguments import forward_plan
from hf_dp.trainer.row_arguments import users_of
from hf_dp.trainer.weighing import CHOICES, Weighed, weigh, workload_of

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable
    from hf_dp.tuners.base import Tuner

NON_PRIVATE = "non_private"


@dataclass
class BudgetArguments(ArgumentGroup):
    """Parameters of the privacy budget."""

    privacy_mode: str = argument(
        dp_sgd.DP_SGD,
        "How privacy is obtained: dp_sgd (per-example clipping and Gaussian noise), dp_fp (noise "
        "on the representation), non_private (the plain Trainer), or a mode of register_mode.",
    )
    target_epsilon: float | None = argument(
        None,
        "Epsilon to spend over the whole run, above 0; the noise is calibrated to it. In private "
        "modes give exactly one of target_epsilon and noise_multiplier.",
    )
    target_delta: float | None = argument(
        None, "Delta, in (0, 1). Unset means 1/(2N) for N training examples.", in_unit_interval
    )
    noise_multiplier: float | None = argument(
        None, "Standard deviation of the noise in units of per_example_max_grad_norm, above 0."
    )
    accountant: str | None = argument(
        None,
        f"What computes epsilon: one of {', '.join(ACCOUNTANTS)}. Unset means pld. gdp_clt is an "
        "estimate, is labeled so, and cannot be used with target_epsilon; the others are bounds. "
        "DP-FP as published has no bound, and gdp_clt is the paper's own figure.",
        ACCOUNTANTS,
    )
    neighboring_relation: str = argument(
        "zero_out",
        "Which data sets count as neighbors: zero_out (one example's contribution is replaced by "
        "nothing, the number of examples is public).",
        NEIGHBORING_RELATIONS,
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("target_epsilon", "noise_multiplier", (None,), "Each determines the other. Set one."),
    )

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
        """Note a budget that is not given, and an accountant that cannot count it."""
        if args.target_epsilon is None and args.noise_multiplier is None:
            why = "Set target_epsilon (1 is strong, 3 moderate, 8 weak) or noise_multiplier."
            found.refuse("target_epsilon", "to be given without `noise_multiplier`", why)
        estimates, published = args.accountant == "gdp_clt", args.is_published_dp_fp
        if published and not estimates:
            found.refuse("accountant", "to be unset for DP-FP as published", "It has no bound.")
        if estimates and args.target_epsilon is not None and not published:
            found.refuse(
                "accountant",
                "to be a bound when `target_epsilon` is given",
                "Noise is calibrated to a bound. Use 'pld', or give `noise_multiplier` instead.",
            )


_EITHER = "Both together are not implemented. Remove one of the two."
_NOT_DIRECTIONS = (None, "gradients", "losses")


@dataclass
class StepArguments(ArgumentGroup):
    """Parameters of a step."""

    views_are_completions: ClassVar[bool] = False  # of a prompt; only a trainer that writes them

    expected_batch_size: int | None = argument(
        None,
        "Expected number of examples in a logical batch: the random draw of one optimizer step, "
        "which is noised once. Required in private modes, except for DP-FP as published (32). "
        "per_device_train_batch_size is the physical batch: memory only.",
    )
    sampling: str = argument(
        POISSON,
        "Which examples join a logical batch. poisson: each with the same probability, "
        "independently in each step. random_allocation: each once per epoch, in a uniformly "
        "random step; the same noise then costs less epsilon. An epoch is paid for at its first "
        "step, even if it is interrupted: use save_strategy=epoch. Only accountant pld knows it.",
        check_sampling,
    )
    private_selection_mean_runs: float | None = argument(
        None,
        "Makes this run one of a search: of a secret, random number of runs with this mean, only "
        "the best is released, and epsilon is that of the whole search, under the conditions that "
        "`hf-dp sweep --private-selection` meets. Only accountant rdp knows it.",
        dp_sgd.check_mean_runs,
    )
    max_logical_batch_size: int | None = argument(
        None,
        "The most examples of a draw that a step uses; of a larger draw a random part is left out "
        "(truncated Poisson sampling). Bounds time and memory; costs little epsilon from about B + "
        "5 sqrt(B) on, for B = expected_batch_size. Unset means no limit. Only accountant pld "
        "knows it.",
    )
    bands: int | str | None = argument(
        None,
        "Over how many steps the noise is correlated (2 or more), or auto: later steps take back "
        "a part of what a step adds. Steps draw in turn from as many fixed parts of the rows. In "
        "runs of few epochs the final weights then have less noise for the same epsilon, at a "
        "learning rate that suits the larger noise of a step. auto: the number, up to 16, that "
        "leaves the least noise with the run's learning-rate schedule; each but the first takes 8 "
        "bytes per trained number. `hf-dp plan` compares them. Unset means independent noise.",
        check_bands,
    )
    views_per_example: int = argument(
        1,
        "The number of random views of a drawn row, new ones in each step; the mean of their "
        "gradients is clipped once, so that neither epsilon nor what is protected changes. Only "
        "for dp_sgd. Needs a random transform, collator or dropout; time and memory grow with the "
        "views.",
    )
    rows_per_group: int | None = argument(
        None,
        "Clip this many rows (2 or more) as one: fixed groups, by place, whose rows a loss of "
        "your own may compare. One row is protected, at the price of a whole group that changes. "
        "The collator gets groups, each a list of rows. expected_batch_size counts groups. Only "
        "for dp_sgd; only accountant pld knows it.",
        lambda name, value: integer(name, value, 2),
    )
    per_example_max_grad_norm: float = argument(
        0.1, "Largest L2 norm with which one example's gradient enters the sum, above 0."
    )
    clipping: str = argument(
        "flat",
        "How a norm becomes a weight. flat: one norm over all trainable parameters, larger ones "
        "are scaled down to it. automatic: every example is scaled to about it (AUTO-S). "
        "per_layer: each of the K layers to it divided by sqrt(K). The sensitivity is the same.",
        dp_sgd.CLIPPINGS,
    )
    clipping_quantile: float | None = argument(
        None,
        "Only for dp_sgd, flat: starting at per_example_max_grad_norm, the clipping norm moves "
        "towards this quantile, in (0, 1), of the gradients' norms (arXiv 1905.03871), by noised "
        "counts, which epsilon covers.",
        quantile.check_share,
    )
    clipping_quantile_learning_rate: float = argument(
        quantile.LEARNING_RATE,
        "With clipping_quantile: how fast the norm moves. A step in which all gradients are "
        "far shorter lowers its logarithm by this times the share that should be clipped.",
    )
    clipping_quantile_budget_ratio: float = argument(
        quantile.BUDGET_RATIO,
        "With clipping_quantile: the share of the privacy budget, in (0, 1), that the counts get; "
        "at a target_epsilon the gradient's noise grows by the factor 1/sqrt(1 - share).",
        quantile.check_share,
    )
    gradient_scaling_beta: float | None = argument(
        None,
        "Only for dp_sgd: before they are clipped, gradients are scaled as Adam would scale them, "
        "by moving averages, with this decay in (0, 1), of the squares of noised gradients; the "
        "noised sum is divided by the scales (arXiv 2507.01129). It costs no privacy.",
        scaling.check_beta,
    )
    router_balance: float | None = argument(
        None,
        "Only for dp_sgd on a mixture of experts: the weight of a load-balancing loss (as "
        "transformers' router_aux_loss_coef, 0.001 to 0.02) by noised loads, which epsilon covers.",
        balance.check_coefficient,
    )
    router_balance_budget_ratio: float = argument(
        balance.BUDGET_RATIO,
        "With router_balance: the share of the privacy budget, in (0, 1), that the loads get; at a "
        "target_epsilon the gradient's noise grows by the factor 1/sqrt(1 - share).",
        balance.check_ratio,
    )
    max_grad_norm: float | None = argument(
        None,
        "The Trainer's own clip, of the averaged gradient after noise. Unset means 0 (off) in "
        "private modes and 1.0 in non_private.",
        non_negative,
    )
    clip_noised_gradient: bool = argument(
        False,
        "Whether max_grad_norm above 0 is meant: it clips the noised gradient, which costs no "
        "privacy, but is easily taken for the per-example clip.",
    )
    adam_bc_floor: float | None = argument(
        None,
        "Subtract the known noise from Adam's second moment (DP-AdamBC, arXiv 2312.14334), down "
        "to this share, above 0, of the noise's variance: a smaller share allows larger steps. It "
        "costs no privacy.",
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(
            "earlier_runs evaluate_on_training_rows release",
            dp_sgd.MEAN_RUNS,
            (None,),
            f"{NO_BOUND} Remove one of the two.",
            UnsupportedArgumentError,
        ),
        Need("adam_bc_floor", quantile.NORM_QUANTILE, (None,), _EITHER, UnsupportedArgumentError),
        Need(
            "adam_bc_floor chunked_loss", scaling.BETA, (None,), _EITHER, UnsupportedArgumentError
        ),
        Need(scaling.BETA, "audit_scores", _NOT_DIRECTIONS, _EITHER, UnsupportedArgumentError),
        Need(f"{quantile.RATE} {quantile.RATIO}", quantile.NORM_QUANTILE, is_given, "Set both."),
        Need(balance.RATIO, balance.COEFFICIENT, is_given, "Set both."),
        Need(
            "adam_bc_floor audit_canaries",
            BANDS,
            (None,),
            "It is implemented for noise that is independent from step to step. Remove one.",
            UnsupportedArgumentError,
        ),
        Need(
            f"views_per_example {BANDS} {GROUP} {quantile.NORM_QUANTILE} {scaling.BETA} "
            f"{balance.COEFFICIENT}",
            "privacy_mode",
            (dp_sgd.DP_SGD,),
            "Only DP-SGD can do this: it concerns gradients before they are clipped, or noise "
            "that is correlated between steps. Remove it.",
            UnsupportedArgumentError,
        ),
        Need(GROUP, "privacy_unit", (EXAMPLE,), _EITHER, UnsupportedArgumentError),
        Need("audit_canaries views_per_example", GROUP, (None,), _EITHER, UnsupportedArgumentError),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a missing batch, and a clip that is not what it seems."""
        if args.bands == AUTO and args.target_epsilon is None:
            why = "At the same noise, epsilon differs. Set a target, or a number of bands."
            found.refuse(BANDS, "to be a number without `target_epsilon`", why)
        if args.expected_batch_size is None:
            found.refuse(
                "expected_batch_size", "to be given", "It is the logical batch of a step; set it."
            )
        if args.max_steps != -1:
            found.attempt("max_steps", integer, 1, "Leave it at -1 for `num_train_epochs`.")
        if found.keys() & {"max_grad_norm", "clip_noised_gradient"}:
            return
        if args.max_grad_norm and not args.clip_noised_gradient:
            found.unsupported(
                "max_grad_norm",
                "to be unset or 0 in private modes",
                "It clips the averaged gradient after noise. Set `per_example_max_grad_norm`, or "
                "clip_noised_gradient=True if you mean it.",
            )
        if args.clip_noised_gradient and not args.max_grad_norm:
            found.refuse(
                "clip_noised_gradient", "to be False without `max_grad_norm`", "Set it above 0."
            )


def _list_of_names(name: str, value: object) -> list[str]:
    empty = "Leave it empty to release nothing."
    if not isinstance(value, (list, tuple)):
        raise invalid(name, value, f"to be a list of names among {list(RELEASABLE)}", empty)
    return [one_of(name, item, RELEASABLE, empty) for item in value]


@dataclass
class ReleaseArguments(ArgumentGroup):
    """Parameters of what leaves the run."""

    noised_loss_budget_ratio: float | None = argument(
        None,
        "Only for dp_sgd, with noised_loss_bound: logs each step's training loss with noise, as "
        "noised_loss, and epsilon covers it. It gets this share of the privacy budget, in (0, 1); "
        "at a target_epsilon the gradient's noise grows by the factor 1/sqrt(1 - share). 0.01 is "
        "enough for a curve.",
        dp_sgd.budget_ratio,
    )
    noised_loss_bound: float | None = argument(
        None,
        "With noised_loss_budget_ratio: each example's loss is clipped to [0, bound]. Public: "
        "choose it without looking at the rows, for example twice the loss of a guess (log of the "
        "number of classes).",
        dp_sgd.loss_bound,
    )
    release: list[str] = argument(
        [],
        f"Un-noised quantities to log and publish anyway, of {', '.join(RELEASABLE)} (only with "
        "dp_sgd: the norm of each logged step's clipped mean before noise). Epsilon does not "
        "cover them, and the card says so. For experiments on public rows.",
        _list_of_names,
    )
    insecure_seed: int | None = argument(
        None,
        "For tests only: makes noise and draws reproducible. Whoever knows the seed can remove the "
        "noise, and the card says that the run is not private.",
        partial(integer, minimum=0),
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(
            f"{dp_sgd.BOUND} {dp_sgd.RATIO}",
            "privacy_mode",
            (dp_sgd.DP_SGD,),
            "Only the steps of DP-SGD add up losses over a secret draw. Remove it.",
            UnsupportedArgumentError,
        ),
        Need(dp_sgd.BOUND, dp_sgd.RATIO, is_given, "Set both, or remove both."),
        Need(dp_sgd.RATIO, dp_sgd.BOUND, is_given, "Set both, or remove both."),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a norm of clipped gradients where a step adds up, or measures by, other things."""
        gauges = [n for n in (quantile.NORM_QUANTILE, scaling.BETA) if getattr(args, n) is not None]
        if gauges and CLIPPED_GRADIENT_NORM in (args.release or ()):
            expected = f"to be without {CLIPPED_GRADIENT_NORM!r} with `{gauges[0]}`"
            found.unsupported("release", expected, _EITHER)
        if args.privacy_mode != dp_sgd.DP_SGD and CLIPPED_GRADIENT_NORM in (args.release or ()):
            found.unsupported(
                "release",
                f"to be without {CLIPPED_GRADIENT_NORM!r} when privacy_mode={args.privacy_mode!r}",
                "Only a step of DP-SGD adds up clipped gradients and nothing else. Remove it.",
            )


@dataclass
class MemoryArguments(ArgumentGroup):
    """Parameters of memory and speed."""

    clipping_strategy: str | None = argument(
        None,
        "How clipped sums are computed, never what they are: book_keeping (one backward pass), "
        "two_pass (two over one graph, the least memory) or per_example (explicit per-example "
        "gradients, slow). Unset means two_pass under gradient checkpointing, else book_keeping.",
        dp_sgd.STRATEGIES,
    )
    clipping_memory_ratio: float = argument(
        dp_sgd.MEMORY_RATIO,
        "How much memory book_keeping may take for speed, at least 1: an estimate of its peak "
        "relative to training without privacy. More than 1.05 pays for long sequences.",
        dp_sgd.check_memory_ratio,
    )
    chunked_loss: bool = argument(
        False,
        "Compute a causal language model's loss block by block of the vocabulary, so that the "
        "logits of a batch are never all in memory, at the cost of one or two more products of "
        "the head.",
    )
    max_tokens_per_physical_batch: int | None = argument(
        None,
        "The most tokens of a physical batch, padding included, in addition to the limit "
        "per_device_train_batch_size: short examples then come in larger batches than long ones.",
    )
    auto_physical_batch_size: bool = argument(
        False,
        "Whether to find, on synthetic examples before training, the largest physical batch that "
        "fits into the GPU, and to write it into per_device_train_batch_size (at its default, 8, "
        "no upper limit).",
    )
    auto_physical_batch_length: int | None = argument(
        None,
        "With auto_physical_batch_size, the number of tokens of the synthetic examples, to which "
        "you truncate rows; text needs it. A longer row is refused.",
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(
            "auto_physical_batch_length",
            "auto_physical_batch_size",
            (True,),
            "Set auto_physical_batch_size=True, or remove it.",
        ),
        Need(
            "auto_physical_batch_size",
            "dp_fp_variant",
            (None, PRIVATE_ENCODER),
            "It is found for steps that clip gradients. Set `per_device_train_batch_size`.",
        ),
        Need(
            "auto_physical_batch_size",
            "torch_compile",
            (False,),
            "What compiled steps take is not measured. Set `per_device_train_batch_size`.",
        ),
        Need(
            "auto_physical_batch_size",
            "views_per_example",
            (1,),
            "What the views of a row take together is not measured. Set "
            "`per_device_train_batch_size`.",
        ),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a physical batch of less than one example."""
        found.attempt("per_device_train_batch_size", integer, 1, "It is the physical batch.")


# (training arguments, number of the model's classes) -> plan
PlanOfArguments = Callable[[Any, int | None], MechanismPlan]


def gradient_plan(args: Any, num_classes: int | None) -> dp_sgd.DpSgdPlan:
    """Return the plan of ``privacy_mode="dp_sgd"``."""
    plan = dp_sgd.DpSgdPlan.of(
        args.per_example_max_grad_norm,
        args.noise_multiplier,
        args.clipping,
        sampling=args.sampling,
        max_batch_size=args.max_logical_batch_size,
        by_row=args.privacy_unit == USER and args.unit_sampling == BY_ROW,
        noised_loss_bound=args.noised_loss_bound,
        noised_loss_budget_ratio=args.noised_loss_budget_ratio,
        mean_runs=args.private_selection_mean_runs,
        clipping_quantile=args.clipping_quantile,
        clipping_quantile_learning_rate=args.clipping_quantile_learning_rate,
        clipping_quantile_budget_ratio=args.clipping_quantile_budget_ratio,
        gradient_scaling_beta=args.gradient_scaling_beta,
        views_per_example=args.views_per_example,
        router_balance=args.router_balance,
        router_balance_budget_ratio=args.router_balance_budget_ratio,
        views_are_completions=args.views_are_completions,
    )
    if args.rows_per_group is None:
        return plan
    return replace(plan, draw=grouped(plan.draw, args.rows_per_group))


MODES: dict[str, PlanOfArguments] = {dp_sgd.DP_SGD: gradient_plan, DP_FP: forward_plan}


def register_mode(name: str, plan: PlanOfArguments) -> None:
    """Let ``DPTrainingArguments(privacy_mode=name)`` select a mechanism.

    Raises: ConfigError for a name that is taken.
    """
    if MODES.setdefault(name, plan) is not plan:
        raise ConfigError(f"Expected a new name for privacy_mode, got {name!r}, which is taken.")


def plan_of(
    args: Any,
    num_examples: int,
    tuner: Tuner | None,
    num_classes: int | None = None,
    units: UnitTable | None = None,
    watch: Callable[[list[Weighed]], object] | None = None,
) -> PrivacyPlan:
    """Return the plan of a run, or of one that is only planned, for so many rows or users. An
    accountant that cannot describe it is refused here, and not after the training. ``watch`` is
    called with independent noise beside the bands, or beside those that "auto" chooses among."""
    spent: tuple[Event, ...] = ()
    if args.earlier_runs:
        from hf_dp.run.earlier import (
            earlier_evidence,  # which takes torch, as a plan alone does not
        )

        unit = args.privacy_unit, args.neighboring_relation
        earlier = earlier_evidence(args.earlier_runs, num_examples, *unit, units)
        spent = tuple(event for each in earlier for event in each.ledger.events)
    mechanism: Any = MODES[args.privacy_mode](args, num_classes)
    if args.bands is not None and tuner is not None and not tuner.gradients_are_noised_sums:
        expected = "to be unset with this peft_config, whose sums mean something else in each step"
        raise invalid(BANDS, args.bands, expected, "Remove it.", UnsupportedArgumentError)
    solve = partial(
        PrivacyPlan.solve,
        num_examples=num_examples,
        expected_batch_size=args.expected_batch_size,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        target_epsilon=args.target_epsilon,
        target_delta=args.target_delta,
        accountant=args.accountant or "pld",
        selection=None if tuner is None else tuner.plan(args.per_example_max_grad_norm),
        prior_events=spent,
        privacy_unit=args.privacy_unit,
        neighboring_relation=args.neighboring_relation,
        users=users_of(args, units),
    )

    def solved(bands: int | None) -> PrivacyPlan:
        own = mechanism if bands is None else replace(mechanism, draw=banded(mechanism.draw, bands))
        plan = solve(mechanism=own)
        epsilon((*spent, *plan.events()), plan.delta, plan.accountant)
        return plan

    auto = args.bands == AUTO
    if not auto and (watch is None or args.bands is None or args.target_epsilon is None):
        return solved(args.bands)  # at a given noise, epsilon differs: nothing to compare
    found = weigh(solved, partial(workload_of, args), CHOICES if auto else (args.bands,))
    if watch is not None:
        watch(found)
    return (min(found, key=lambda one: one.weights) if auto else found[-1]).plan
