"""Check the arguments of a private run: their ranges, and which contradict each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate.utils import DistributedType

from hf_dp._validate import in_unit_interval, integer, invalid, non_negative, one_of, positive
from hf_dp.accounting import ACCOUNTANTS
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.forms import check_memory_ratio
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.best_of_runs import ARGUMENT, check_mean_runs
from hf_dp.plans.dp_fp import DP_FP, PRIVATE_ENCODER
from hf_dp.plans.dp_sgd import CLIPPINGS
from hf_dp.plans.noised_loss import BOUND, RATIO, budget_ratio, half_given, loss_bound
from hf_dp.plans.sampling import SAMPLINGS
from hf_dp.plans.units import NEIGHBORING_RELATIONS, PRIVACY_UNITS
from hf_dp.statement.unnoised import CLIPPED_GRADIENT_NORM, RELEASABLE
from hf_dp.statement.weaknesses import OTHER_TRAINING

Problems = dict[str, InvalidArgumentError]


def attempt(
    args: Any, problems: Problems, name: str, check: Callable[..., object], *details: object
) -> None:
    """Set the argument to what the check returns, or record the problem."""
    try:
        setattr(args, name, check(name, getattr(args, name), *details))
    except InvalidArgumentError as error:
        problems[name] = error


def check_budget(args: Any, problems: Problems) -> None:
    """Check the privacy budget and the accountant."""
    if args.target_epsilon is not None:
        attempt(args, problems, "target_epsilon", positive, "Typical values are 1 to 10.")
    if args.target_delta is not None:
        attempt(args, problems, "target_delta", in_unit_interval, "Leave it unset for 1/(2N).")
    if args.noise_multiplier is not None:
        attempt(
            args,
            problems,
            "noise_multiplier",
            positive,
            "For a run without noise use privacy_mode='non_private'.",
        )
    attempt(args, problems, "accountant", one_of, ACCOUNTANTS)
    attempt(args, problems, "privacy_unit", one_of, PRIVACY_UNITS)
    attempt(
        args, problems, "neighboring_relation", one_of, NEIGHBORING_RELATIONS, "Use 'zero_out'."
    )
    if args.target_epsilon is None and args.noise_multiplier is None:
        problems["target_epsilon"] = invalid(
            "target_epsilon",
            None,
            "to be given when `noise_multiplier` is not",
            "One of the two determines the privacy of the run. Set exactly one.",
        )
    if args.target_epsilon is not None and args.noise_multiplier is not None:
        problems.setdefault(
            "target_epsilon",
            invalid(
                "target_epsilon",
                args.target_epsilon,
                f"to be unset when `noise_multiplier` ({args.noise_multiplier!r}) is given",
                "Each determines the other. Remove one of the two.",
            ),
        )
    if args.is_published_dp_fp and args.accountant != "gdp_clt":
        problems["accountant"] = invalid(
            "accountant",
            args.accountant,
            "to be unset for DP-FP as published",
            "No accountant has a bound for it; 'gdp_clt' computes the paper's own figure.",
        )
    elif (
        args.accountant == "gdp_clt"
        and args.target_epsilon is not None
        and not args.is_published_dp_fp
    ):
        problems["accountant"] = invalid(
            "accountant",
            args.accountant,
            "to be a bound when `target_epsilon` is given",
            "The noise is calibrated to a bound, and gdp_clt is an estimate. "
            "Use 'pld', or give `noise_multiplier` instead.",
        )


def check_mechanism(args: Any, problems: Problems) -> None:
    """Check batches, clipping and rows."""
    attempt(
        args,
        problems,
        "expected_batch_size",
        integer,
        1,
        "It is the logical batch of a private step; set it (per_device_train_batch_size is "
        "memory only).",
    )
    attempt(args, problems, "sampling", one_of, SAMPLINGS)
    if args.private_selection_mean_runs is not None:
        attempt(args, problems, ARGUMENT, check_mean_runs)
        if args.earlier_runs:
            problems["earlier_runs"] = invalid(
                "earlier_runs",
                args.earlier_runs,
                "to be empty with private_selection_mean_runs",
                "No bound is implemented for both.",
                UnsupportedArgumentError,
            )
        if args.evaluate_on_training_rows:
            problems["evaluate_on_training_rows"] = invalid(
                "evaluate_on_training_rows",
                True,
                f"to be False with {ARGUMENT}",
                "The score that selects a run must not read the training rows.",
                UnsupportedArgumentError,
            )
        if args.release:
            problems["release"] = invalid(
                "release",
                args.release,
                f"to be empty with {ARGUMENT}",
                "The score that selects a run must not be released without noise.",
                UnsupportedArgumentError,
            )
    if args.max_logical_batch_size is not None:
        attempt(
            args, problems, "max_logical_batch_size", integer, 1, "Leave it unset for no limit."
        )
    attempt(
        args,
        problems,
        "per_device_train_batch_size",
        integer,
        1,
        "It is the physical batch: memory only.",
    )
    attempt(args, problems, "per_example_max_grad_norm", positive, "The default is 0.1.")
    attempt(args, problems, "clipping", one_of, CLIPPINGS)
    if args.clipping_strategy is not None:
        attempt(args, problems, "clipping_strategy", one_of, STRATEGIES)
    attempt(args, problems, "clipping_memory_ratio", check_memory_ratio)
    attempt(args, problems, "chunked_loss", _true_or_false)
    if args.max_tokens_per_physical_batch is not None:
        attempt(
            args,
            problems,
            "max_tokens_per_physical_batch",
            integer,
            1,
            "Leave it unset for no limit.",
        )
    _check_physical_batch(args, problems)
    attempt(args, problems, "earlier_runs", _list_of_paths)
    if args.other_training is not None:
        attempt(args, problems, "other_training", one_of, OTHER_TRAINING)
    attempt(args, problems, "max_grad_norm", non_negative, "Use 0 to switch it off.")
    for name in (
        "clip_noised_gradient",
        "start_over",
        "rows_are_chunks",
        "adapter_init_data_is_public",
        "evaluate_on_training_rows",
    ):
        attempt(args, problems, name, _true_or_false)
    attempt(args, problems, "padding_values", _numbers_by_column)
    if problems.keys() & {"max_grad_norm", "clip_noised_gradient"}:
        return
    if args.max_grad_norm and not args.clip_noised_gradient:
        problems["max_grad_norm"] = invalid(
            "max_grad_norm",
            args.max_grad_norm,
            "to be unset or 0 in private modes",
            "It clips the averaged gradient after noise, not the gradient of each example. To clip "
            "the latter, set `per_example_max_grad_norm`. To clip after noise, set "
            "clip_noised_gradient=True.",
            UnsupportedArgumentError,
        )
    if args.clip_noised_gradient and not args.max_grad_norm:
        problems["clip_noised_gradient"] = invalid(
            "clip_noised_gradient",
            True,
            "to be False when `max_grad_norm` is 0",
            "Set `max_grad_norm` above 0.",
        )


def _check_physical_batch(args: Any, problems: Problems) -> None:
    name, length = "auto_physical_batch_size", "auto_physical_batch_length"
    attempt(args, problems, name, _true_or_false)
    if args.auto_physical_batch_length is not None:
        attempt(args, problems, length, integer, 1, "Leave it unset for what the model takes.")
        if not args.auto_physical_batch_size and length not in problems:
            problems[length] = invalid(
                length,
                args.auto_physical_batch_length,
                f"to be unset without `{name}`",
                f"Set {name}=True, or remove it.",
            )
    variant = args.dp_fp_variant if args.privacy_mode == DP_FP else PRIVATE_ENCODER
    if args.auto_physical_batch_size and variant not in (None, PRIVATE_ENCODER):
        problems[name] = invalid(
            name,
            args.auto_physical_batch_size,
            f"to be False with dp_fp_variant={variant!r}",
            "It is found for steps that clip per-example gradients. Set "
            "`per_device_train_batch_size`.",
        )


def check_release(args: Any, problems: Problems) -> None:
    """Check what is released without noise, and whether the noise is secret."""
    attempt(args, problems, "release", _list_of_names, RELEASABLE)
    if CLIPPED_GRADIENT_NORM in (args.release or ()) and args.privacy_mode != "dp_sgd":
        problems["release"] = invalid(
            "release",
            args.release,
            f"to be without {CLIPPED_GRADIENT_NORM!r} when privacy_mode={args.privacy_mode!r}",
            "Only a step of DP-SGD adds up clipped gradients and nothing else. Remove it.",
            UnsupportedArgumentError,
        )
    if args.insecure_seed is not None:
        attempt(args, problems, "insecure_seed", integer, 0, "Leave it unset outside tests.")


def check_noised_loss(args: Any, problems: Problems) -> None:
    """Check the noised loss that is released beside the gradients."""
    given = [name for name in (BOUND, RATIO) if getattr(args, name) is not None]
    if args.privacy_mode != "dp_sgd":
        for name in given:
            problems[name] = invalid(
                name,
                getattr(args, name),
                f"to be unset when privacy_mode={args.privacy_mode!r}",
                "Only the steps of DP-SGD add up losses over a secret draw; DP-FP's last layer "
                "trains on released rows. Remove it.",
                UnsupportedArgumentError,
            )
        return
    for name, check in ((BOUND, loss_bound), (RATIO, budget_ratio)):
        if name in given:
            attempt(args, problems, name, check)
    for missing, other in ((BOUND, RATIO), (RATIO, BOUND)):
        if given == [other]:
            problems[missing] = half_given(missing, other)


def surrounding_problems(args: Any) -> Problems:
    """Return the problems with the processes and devices of a run.

    These are known only after ``TrainingArguments.__post_init__``.
    """
    problems: Problems = {}
    if not args.is_private:
        return problems
    problems |= _launch_problems(args)
    if args.n_gpu > 1:
        problems["n_gpu"] = invalid(
            "n_gpu",
            args.n_gpu,
            "to be at most 1 in private modes",
            "One process with several GPUs uses DataParallel, which splits batches behind the "
            "clipping engine's back. Set CUDA_VISIBLE_DEVICES to one device.",
            UnsupportedArgumentError,
        )
    return problems


def _launch_problems(args: Any) -> Problems:
    """Return the problem of processes that do not know of each other, if there is one.

    Each would take itself for the only one, and release a model of its own from one budget.
    """
    launched = os.environ.get("WORLD_SIZE") or ("1" if args.world_size == 1 else None)
    if launched is not None and launched != str(args.world_size):
        found = invalid(
            "$WORLD_SIZE",
            launched,
            f"to be {args.world_size}, the number of processes that accelerate knows, in private "
            "modes",
            "Each process takes itself for the only one, and would release a model of its own from "
            "one budget. On a machine without accelerators, set use_cpu=True (use_cpu: true).",
            UnsupportedArgumentError,
        )
        return {"WORLD_SIZE": found}
    # What `accelerate launch --cpu` sets for several processes, of which it starts only one.
    meant = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if meant and on_cpu and "WORLD_SIZE" not in os.environ:
        found = invalid(
            "--num_processes",
            "one process",
            "to start as many processes as it names, in private modes",
            "`accelerate launch --cpu` starts one process whatever `--num_processes` says. Use "
            "`torchrun --nproc_per_node 2` or `hf-dp train --num_processes 2`, with use_cpu=True "
            "where there is a GPU; for one process, leave `--num_processes` away and unset "
            "MASTER_ADDR.",
            UnsupportedArgumentError,
        )
        return {"num_processes": found}
    if args.world_size > 1 and CLIPPED_GRADIENT_NORM in args.release:
        found = invalid(
            "release",
            args.release,
            f"to be without {CLIPPED_GRADIENT_NORM!r} with {args.world_size} processes",
            "None of them has the whole sum before its noise. Launch one process, or remove it.",
            UnsupportedArgumentError,
        )
        return {"release": found}
    shards = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")
    kind = args.distributed_state.distributed_type if args.distributed_state else None
    if shards and kind in (DistributedType.NO, DistributedType.MULTI_CPU):
        found = invalid(
            "fsdp",
            args.fsdp,
            "to be unset on a CPU, and with one process, in private modes",
            "accelerate shards on accelerators only, and would silently train whole copies. Remove "
            "it (on a CPU call torch.distributed.fsdp.fully_shard on the model, in a loop of your "
            "own with PrivateRun).",
            UnsupportedArgumentError,
        )
        return {"fsdp": found}
    if args.world_size > 1 and args.max_logical_batch_size is not None:
        found = invalid(
            "max_logical_batch_size",
            args.max_logical_batch_size,
            f"to be None with {args.world_size} processes",
            "Each draws from rows of its own, so none knows when the whole draw is too large. "
            "Leave it unset, or launch one process.",
            UnsupportedArgumentError,
        )
        return {"max_logical_batch_size": found}
    return {}


def raise_all(problems: Problems) -> None:
    """Raise one error for all problems: a single problem unchanged, several as a list."""
    errors = list(problems.values())
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    all_unsupported = all(isinstance(error, UnsupportedArgumentError) for error in errors)
    kind = UnsupportedArgumentError if all_unsupported else InvalidArgumentError
    raise kind(
        "\n- ".join(
            [f"{len(errors)} arguments must change before this run can start:", *map(str, errors)]
        )
    )


def _true_or_false(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, value, "to be True or False", "Write it without quotes.")
    return value


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
    if not isinstance(value, (list, tuple)):
        raise invalid(
            name,
            value,
            f"to be a list of names among {list(known)}",
            "Leave it empty to release nothing.",
        )
    return [one_of(name, item, known, "Leave it empty to release nothing.") for item in value]


def _list_of_paths(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise invalid(
            name, value, "to be a list of folders", "Leave it empty if the rows were never used."
        )
    return list(value)
