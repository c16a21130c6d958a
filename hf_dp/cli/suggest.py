"""``hf-dp suggest``: settings that learn, each with its reason, before anything is spent."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_dp.cli.account import ACCOUNTANTS
from hf_dp.cli.config import check_recipe, peft_config, read_yaml
from hf_dp.cli.options import Parser, hyphenated
from hf_dp.cli.plan_settings import refuse_other_modes, settings_of
from hf_dp.errors import ConfigError, DataError
from hf_dp.plans.sampling import POISSON

if TYPE_CHECKING:
    from hf_dp.planning import Forecast, Suggestion

EXAMPLES = """examples:
  hf-dp suggest --num-examples 67349 --target-epsilon 3
  hf-dp suggest --config recipes/sst2/minilm_dp_adam_eps3.yaml --num-examples 67349 --measure
  hf-dp suggest --config recipe.yaml --epochs 1 --output suggested.yaml

The suggestions read public numbers only: how many examples there are, epsilon, delta and the model.
They are a starting point. A search on private rows costs epsilon for each run (hf-dp sweep).
"""
_LENGTH, _PHYSICAL = 128, 8  # where the recipe says nothing; 8 is Trainer's own


@dataclass(frozen=True)
class _Measured:
    """Examples per second, and the peak bytes of a physical batch; None where not measured."""

    throughput: float | None = None
    bytes: int | None = None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp suggest",
        description="Suggest batch size, steps, clipping norm, learning rate and what to train "
        "for DP-Adam, each with its reason. Prints YAML. Nothing is run on your rows.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a recipe: its data, model, epsilon and delta are read")
    add("--num-examples", type=int, metavar="N", help="rows of the training set, or users")
    add("--target-epsilon", type=float, metavar="EPSILON", help="epsilon to stay within")
    add("--delta", type=float, help="default: 1 / (2 N)")
    add("--accountant", choices=ACCOUNTANTS, help="whose epsilon counts (default: pld)")
    add(
        "--epochs",
        type=float,
        metavar="E",
        help="passes that there is time for (default: as many as the rules ask for; a recipe's "
        "num_train_epochs is not read)",
    )
    add("--parameters", type=int, metavar="P", help="numbers that train (default: the recipe's)")
    add("--throughput", type=float, metavar="X", help="examples per second, for the time")
    add(
        "--measure",
        action="store_true",
        help="with --config: measure speed and memory on made-up examples of max_length here",
    )
    add("--output", metavar="FILE", help="with --config: write the recipe with these settings")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the suggestion; return 2 (with a line on stderr) for what cannot be suggested."""
    args = build_parser().parse_args(hyphenated(argv))
    recipe = {} if args.config is None else read_yaml(args.config)
    check_recipe(recipe)
    refuse_other_modes(recipe.get("privacy_mode", "dp_sgd"), "hf-dp suggest")
    _check(args)
    settings = settings_of(args, recipe)
    found = _suggestion(args, settings, recipe)
    measured = _measure(recipe, found) if args.measure else _Measured(args.throughput)
    if args.output is not None:
        _write(recipe, found, Path(args.output))
    print(_json(found, measured) if args.json else _text(found, measured, recipe))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that need a recipe, or exclude each other."""
    for option in ("measure", "output"):
        if getattr(args, option) and args.config is None:
            raise ConfigError(f"`--{option}` needs a recipe. Give --config FILE.")
    if args.measure and args.throughput is not None:
        raise ConfigError("`--measure` finds the throughput. Leave `--throughput` out.")
    if args.output is not None and Path(args.output).exists():
        raise ConfigError(
            f"Expected `--output` to be a new file, but {args.output!r} exists. Choose another "
            "name."
        )


def _suggestion(
    args: argparse.Namespace, settings: dict[str, Any], recipe: dict[str, Any]
) -> Suggestion:
    from hf_dp.planning.suggestion import CLIPPING_NORM, suggest

    for name in ("num_examples", "target_epsilon"):
        if settings[name] is None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"Expected {option}, or a recipe (--config) that says it, got neither. Add "
                f"{option}."
            )
    users, peft = settings["users"], settings["peft"]
    adapter = peft_config(peft)
    selects = hasattr(adapter, "selection_plan")
    counted = args.parameters is None and "model_name_or_path" in recipe
    found = suggest(
        settings["num_examples"],
        settings["target_epsilon"],
        epochs=args.epochs,
        parameters=trained_numbers(recipe, peft) if counted else args.parameters,
        peft=peft,
        target_delta=settings["delta"],
        accountant=settings["accountant"] or "pld",
        sampling=settings["sampling"] or POISSON,
        mean_runs=settings["mean_runs"],
        selection=adapter.selection_plan(CLIPPING_NORM) if selects else None,
        users=users,
        privacy_unit="example" if users is None else "user",
    )
    if counted and found.parameters is None:
        found = dataclasses.replace(
            found, parameters=trained_numbers(recipe, found.settings["peft"])
        )
    return found


def trained_numbers(recipe: dict[str, Any], peft: dict[str, Any] | None) -> int:
    """Return how many numbers of the recipe's model train. No weights are made."""
    model = _model(recipe, peft, "meta")
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _model(recipe: dict[str, Any], peft: dict[str, Any] | None, device: str) -> Any:
    """Return the recipe's model as it would train, with random weights.

    Raises: DataError for a model that cannot be found; ConfigError for a task without privacy.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    from hf_dp.cli.tasks import DEFAULT_TASK
    from hf_dp.tasks.files import resolve_model
    from hf_dp.tasks.models import freeze
    from hf_dp.tuners.apply import apply_peft

    task = recipe.get("task", DEFAULT_TASK)
    classes = {
        "text_classification": AutoModelForSequenceClassification,
        "image_classification": AutoModelForImageClassification,
        "causal_lm": AutoModelForCausalLM,
        "seq2seq": AutoModelForSeq2SeqLM,
    }
    if task not in classes:
        raise ConfigError(f"The task {task!r} trains without privacy: nothing to suggest.")
    auto = AutoModelForMaskedLM if recipe.get("infilling") else classes[task]
    name = recipe["model_name_or_path"]
    try:
        config = AutoConfig.from_pretrained(resolve_model(name))
        with torch.device(device):
            model = auto.from_config(config)
        model.tie_weights()
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {name!r} could not be loaded: {str(problem).splitlines()[0]} Give "
            "--num-examples, --target-epsilon and --parameters instead of --config."
        ) from problem
    freeze(model, recipe.get("freeze", ()))
    adapter = peft_config(peft)
    return model if adapter is None else apply_peft(model, adapter, torch.device(device))


def _measure(recipe: dict[str, Any], found: Suggestion) -> _Measured:
    """Time private steps of the recipe's model on made-up examples, on this machine."""
    import torch

    from hf_dp.benchmarks.private_step import measure_step

    device = "cuda" if torch.cuda.is_available() and not recipe.get("use_cpu") else "cpu"
    cost = measure_step(
        _model(recipe, found.settings["peft"], device),
        int(recipe.get("per_device_train_batch_size", _PHYSICAL)),
        int(recipe.get("max_length", _LENGTH)),
        bf16=bool(recipe.get("bf16")),
    )
    return _Measured(cost.throughput, cost.bytes)


def _write(recipe: dict[str, Any], found: Suggestion, path: Path) -> None:
    """Write the recipe with the suggested settings in place of its own."""
    replaced = {**recipe, **found.settings}
    # max_steps decides; a number of epochs beside it would only mislead.
    kept = {
        key: value
        for key, value in replaced.items()
        if value is not None and key not in ("num_train_epochs", "noise_multiplier")
    }
    kept["target_epsilon"] = found.plan.target_epsilon
    path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")


def _forecast(found: Suggestion, measured: _Measured) -> Forecast:
    from hf_dp.planning import forecast

    return forecast(found.plan, parameters=found.parameters, throughput=measured.throughput)


def _text(found: Suggestion, measured: _Measured, recipe: dict[str, Any]) -> str:
    """Return the suggestion as YAML: what it means in comments, then each setting below its
    reason."""
    from hf_dp.run.outlook import doubts

    plan, ahead = found.plan, _forecast(found, measured)
    what = "users" if plan.users is not None else "examples"
    lines = [
        f"{plan.num_examples:,} {what}, epsilon {plan.target_epsilon:g} at delta "
        f"{plan.delta:.4g} ({plan.accountant}): noise multiplier {plan.noise_multiplier:.4g}, "
        f"effective {ahead.effective_noise_multiplier:.4g} (/ sample rate), {ahead.epochs:.3g} "
        "epochs.",
        _time(ahead, measured),
        _memory(found, ahead, measured),
    ]
    if found.parameters is not None:
        rate = found.settings["learning_rate"]
        lines += doubts(plan, parameters=found.parameters, learning_rate=rate, optimizer="adamw")
    shown = [_comment(line) for line in lines]
    for choice in found.choices:
        before = recipe.get(choice.name)
        has = "" if not recipe or before in (None, choice.value) else f" The recipe has {before}."
        shown.append("")
        shown.append(_comment(f"{choice.reason[0].upper()}{choice.reason[1:]}.{has}"))
        shown.append(yaml.safe_dump({choice.name: choice.value}, sort_keys=False).strip())
    return "\n".join(shown)


def _comment(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="#   "))


def _time(ahead: Forecast, measured: _Measured) -> str:
    if ahead.seconds is None:
        return "Time: not known. Give --config and --measure, or --throughput, examples per second."
    whence = (
        "measured here on made-up examples of full length; shorter ones are faster"
        if measured.bytes is not None
        else "as given"
    )
    return (
        f"Time: {ahead.seconds / 3600:.2f} hours for {ahead.examples:,.0f} examples at "
        f"{measured.throughput:.3g} a second ({whence}), without start, evaluation and saving."
    )


def _memory(found: Suggestion, ahead: Forecast, measured: _Measured) -> str:
    if measured.bytes is not None:
        return (
            f"Memory: {measured.bytes / 2**30:.2f} GiB at the peak of a physical batch of full "
            "length, measured here; Adam's moments and the sums of a step on top."
        )
    if ahead.state_bytes is None:
        return "Memory: not known. Give --parameters, or --config with a model."
    return (
        f"Memory: {ahead.state_bytes / 2**30:.2f} GiB for weights, gradient sums and Adam's "
        f"moments of the {found.parameters:,} numbers that train; activations on top, which "
        "per_device_train_batch_size sets."
    )


def _json(found: Suggestion, measured: _Measured) -> str:
    ahead = _forecast(found, measured)
    return json.dumps(
        {
            "settings": found.settings,
            "reasons": {choice.name: choice.reason for choice in found.choices},
            "plan": found.plan.to_dict(),
            "effective_noise_multiplier": ahead.effective_noise_multiplier,
            "seconds": ahead.seconds,
            "state_bytes": ahead.state_bytes,
            "measured": {"throughput": measured.throughput, "bytes": measured.bytes},
        },
        allow_nan=False,
    )
