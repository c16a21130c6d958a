"""The settings of a plan: those of the command line, else of a recipe."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_dp._validate import integer
from hf_dp.cli.config import peft_config
from hf_dp.errors import ConfigError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.sampling import POISSON

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable
    from hf_dp.plans.privacy import PrivacyPlan
    from hf_dp.plans.units import Users

# option -> the key of a recipe, whose value it replaces
KEYS = {
    "batch_size": "expected_batch_size",
    "max_batch_size": "max_logical_batch_size",
    "sampling": "sampling",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "delta": "target_delta",
    "clipping_norm": "per_example_max_grad_norm",
    "target_epsilon": "target_epsilon",
    "noise_multiplier": "noise_multiplier",
    "accountant": "accountant",
    "clipping": "clipping",
    "noised_loss_budget_ratio": "noised_loss_budget_ratio",
    "noised_loss_bound": "noised_loss_bound",
    "mean_runs": "private_selection_mean_runs",
}


def refuse_other_modes(mode: str, command: str, planned: Sequence[str] = ("dp_sgd",)) -> None:
    """Raise ConfigError for a privacy mode that a command does not plan.

    Args: command: that plans, for the message. planned: the modes that it plans.
    """
    if mode not in planned:
        why = "it releases noised rows, not sums" if mode == "dp_fp" else "it spends no privacy"
        raise ConfigError(
            f"The recipe's privacy_mode is {mode!r}: {why}. {command} plans "
            f"{' and '.join(planned)} only."
        )


def settings_of(args: argparse.Namespace, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the settings by option name: the command line's, else the recipe's."""
    settings: dict[str, Any] = {option: _number(recipe.get(key)) for option, key in KEYS.items()}
    given = {option: getattr(args, option, None) for option in KEYS}
    for one, other in (("epochs", "steps"), ("target_epsilon", "noise_multiplier")):
        if given[one] is not None or given[other] is not None:
            # One of a pair also replaces the recipe's other.
            settings[one] = settings[other] = None
    settings |= {option: value for option, value in given.items() if value is not None}
    if recipe.get("max_steps") == -1 and given["steps"] is None:
        settings["steps"] = None
    settings["peft"] = recipe.get("peft")
    settings["forward"] = recipe if recipe.get("privacy_mode") == DP_FP else None
    settings["variant"] = getattr(args, "dp_fp_variant", None)
    settings["num_classes"] = (
        getattr(args, "num_classes", None) or len(recipe.get("class_names") or []) or None
    )
    if settings["variant"] is not None and settings["forward"] is None:
        raise ConfigError(
            "--dp-fp-variant is for recipes with privacy_mode: dp_fp. Leave it out, or give such a "
            "recipe."
        )
    settings["num_examples"], settings["users"] = args.num_examples, _users(recipe)
    if args.num_examples is None and recipe:
        if settings["users"] is None:
            settings["num_examples"] = _rows(recipe)
        else:
            settings["table"] = _whose(recipe, settings["users"])
            settings["num_examples"] = len(settings["table"])
            settings["users"] = with_rows(settings["users"], settings["table"])
    if settings["users"] is not None and settings["users"].by_row and "table" not in settings:
        raise ConfigError(
            "With unit_sampling=examples the rows to draw from are counted user by user. Name the "
            "recipe's train_file, and leave --num-examples unset."
        )
    return settings


def _users(recipe: dict[str, Any]) -> Users | None:
    """Return what a recipe says of users. Raises: InvalidArgumentError."""
    if not recipe:
        return None
    from argparse import Namespace

    from hf_dp.trainer.unit_arguments import ARGUMENTS, unit_problems, users_of

    names = ("auto_physical_batch_size", *ARGUMENTS)
    said = Namespace(
        privacy_unit=recipe.get("privacy_unit", "example"),
        **{name: recipe.get(name) for name in names},
    )
    for problem in unit_problems(said).values():
        raise problem
    return users_of(said)


def _whose(recipe: dict[str, Any], users: Users) -> UnitTable:
    """Return whose the training rows of a recipe are. Raises: ConfigError, DataError."""
    from hf_dp.batches.units import split_off_units
    from hf_dp.tasks.files import load_file

    if not recipe.get("train_file"):
        raise ConfigError(
            "The recipe's training rows are not available here, so the number of their users is "
            "not known. Give --num-examples USERS."
        )
    rows = load_file(recipe["train_file"], recipe.get("train_split", "train"))
    most = recipe.get("max_train_rows")
    return split_off_units(rows if most is None else rows.select(range(most)), users.column)[0]


def _number(value: Any) -> Any:
    """Return a number that YAML reads as text, like 1e-5; leave words as they are."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _rows(recipe: dict[str, Any]) -> int:
    """Return how many training rows the recipe's data has.

    Raises: ConfigError where the data is not available.
    """
    here = recipe.get("train_file") or recipe.get("dataset_name") == "demo"
    if here and recipe.get("data_format"):
        from hf_dp.tasks.generation.data import count_examples

        return count_examples(recipe)
    if recipe.get("max_train_rows"):
        return int(recipe["max_train_rows"])
    if recipe.get("dataset_name") == "demo":
        from hf_dp.tasks.demo_sentences import demo_dataset

        return len(demo_dataset()["train"])
    if recipe.get("train_file"):
        from hf_dp.tasks.files import load_file

        return len(load_file(recipe["train_file"], recipe.get("train_split", "train")))
    raise ConfigError(
        "The recipe's training rows are not available here, so their number is not known. Give "
        "--num-examples N."
    )


def plan_of(settings: dict[str, Any]) -> PrivacyPlan:
    """Return the plan of these settings. Raises: ConfigError, InvalidArgumentError."""
    from hf_dp.plans.privacy import PrivacyPlan

    if settings["num_examples"] is None:
        raise ConfigError(
            "Expected --num-examples N, the rows of the training set (or --config with data), got "
            "neither."
        )
    if settings["forward"] is not None:
        return _forward_plan(settings)
    epochs, steps = settings["epochs"], settings["steps"]
    clipping_norm = 0.1 if settings["clipping_norm"] is None else settings["clipping_norm"]
    adapter, users = peft_config(settings["peft"]), settings["users"]
    return PrivacyPlan.create(
        num_examples=settings["num_examples"],
        expected_batch_size=settings["batch_size"],
        max_batch_size=settings["max_batch_size"],
        clipping_norm=clipping_norm,
        num_train_epochs=3.0 if epochs is None else epochs,
        max_steps=-1 if steps is None else integer("steps", steps, 1),
        target_epsilon=settings["target_epsilon"],
        noise_multiplier=settings["noise_multiplier"],
        target_delta=settings["delta"],
        accountant=settings["accountant"] or "pld",
        clipping=settings["clipping"] or "flat",
        sampling=settings["sampling"] or POISSON,
        noised_loss_bound=settings["noised_loss_bound"],
        mean_runs=settings["mean_runs"],
        noised_loss_budget_ratio=settings["noised_loss_budget_ratio"],
        selection=adapter.selection_plan(clipping_norm)
        if hasattr(adapter, "selection_plan")
        else None,
        users=users,
        privacy_unit="example" if users is None else "user",
    )


def _forward_plan(settings: dict[str, Any]) -> PrivacyPlan:
    """Return the plan of a recipe of DP-FP. Raises: ConfigError, InvalidArgumentError."""
    from hf_dp.cli.plan_forward import forward_arguments, mechanism_of
    from hf_dp.plans.privacy import PrivacyRequest

    recipe = {key: _number(value) for key, value in settings["forward"].items()}
    given = {key: settings[option] for option, key in KEYS.items()}
    args = forward_arguments(recipe, given, settings["variant"])
    adapter, users = peft_config(settings["peft"]), settings["users"]
    epochs, steps = settings["epochs"], settings["steps"]
    return PrivacyRequest(
        num_examples=settings["num_examples"],
        expected_batch_size=args.expected_batch_size,
        mechanism=mechanism_of(args, settings["num_classes"]),
        num_train_epochs=3.0 if epochs is None else epochs,
        max_steps=-1 if steps is None else integer("steps", steps, 1),
        target_epsilon=settings["target_epsilon"],
        target_delta=settings["delta"],
        accountant=args.accountant,
        selection=adapter.selection_plan(args.per_example_max_grad_norm)
        if hasattr(adapter, "selection_plan")
        else None,
        users=users,
        privacy_unit="example" if users is None else "user",
    ).plan()


def with_rows(users: Users, table: UnitTable) -> Users:
    """Return the users with the number of rows to draw from, where rows are drawn."""
    rows = len(table.capped(users.max_rows)) if users.by_row else None
    return dataclasses.replace(users, num_rows=rows)
