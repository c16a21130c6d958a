"""``hf-dp suggest``: settings that learn, each with its reason, before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_dp._arguments import argument
from hf_dp.cli.config import DEFAULT_TASK, LengthArguments
from hf_dp.cli.options import Parser, add_fields, taken
from hf_dp.cli.recipes import (
    PlannedArguments,
    refuse_other_modes,
    rows_of,
    trained_numbers,
    tuner_of,
)
from hf_dp.cli.tasks import read_recipe
from hf_dp.errors import ConfigError, DataError
from hf_dp.planning import forecast
from hf_dp.trainer.privacy_arguments import BudgetArguments
from hf_dp.trainer.row_arguments import users_of

if TYPE_CHECKING:
    from hf_dp.planning import Choice, Forecast, Suggestion

EXAMPLES = """examples:
  hf-dp suggest --num_examples 67349 --target_epsilon 3
  hf-dp suggest --config recipes/sst2/minilm_dp_adam_eps3.yaml --num_examples 67349
  hf-dp suggest --config recipe.yaml --num_train_epochs 1 --output suggested.yaml

The suggestions read public numbers only: how many examples there are, epsilon, delta and the model.
They are a starting point. A search on private rows costs epsilon for each run (hf-dp sweep).
A recipe's num_train_epochs is not read: without the option, it is as many as the rules ask for.
"""
_BUDGET = ("target_epsilon", "target_delta", "accountant")


@dataclass
class SuggestOptions:
    """What is known, and what is printed."""

    num_examples: int | None = argument(None, "Rows of the training set, or users.")
    parameters: int | None = argument(
        None, "Numbers that train. Unset means those of the recipe's model."
    )
    output: str | None = argument(
        None,
        "With --config: a new file for the recipe with these settings and an output folder "
        "of its own.",
    )
    json: bool = argument(False, "One JSON object on stdout.")


def main(argv: Sequence[str]) -> int:
    """Print the suggestion; return 2 (with a line on stderr) for what cannot be suggested."""
    parser = Parser(
        "hf-dp suggest",
        usage="hf-dp suggest [--config FILE] [--NAME VALUE ...]",
        description="Suggest batch size, steps, clipping norm, learning rate and what to train "
        "for DP-Adam, each with its reason; for a recipe of text classification that names "
        "model_name_or_path and class_names, also a template and label words. Prints YAML. "
        "Nothing is run on your rows.",
        epilog=EXAMPLES,
    )
    parser.option("--config", "a recipe: its data, model, epsilon and delta are read", "FILE")
    add_fields(parser, SuggestOptions)
    add_fields(parser, BudgetArguments, _BUDGET)
    add_fields(parser, LengthArguments, ("num_train_epochs",))
    given, recipe, asked = read_recipe(parser, argv)
    options = taken(SuggestOptions, given)
    refuse_other_modes(recipe.get("privacy_mode", "dp_sgd"), "hf-dp suggest")
    if options.output is not None and given.config is None:
        raise ConfigError("`--output` needs a recipe. Give --config FILE.")
    if options.output is not None and Path(options.output).exists():
        raise ConfigError(
            f"Expected `--output` to be a new file, but {options.output!r} exists. Choose another "
            "name."
        )
    recipe |= {name: getattr(given, name) for name in _BUDGET if hasattr(given, name)}
    found = _suggestion(options, recipe, getattr(given, "num_train_epochs", None))
    for name in sorted(asked.keys() & found.settings.keys() - {"peft"}):
        raise ConfigError(
            f"`--{name}` is what hf-dp suggest chooses. Leave it out, and compare with "
            f"`hf-dp plan --{name} ...`."
        )
    if options.output is not None:
        replaced = {**recipe, **found.settings, "target_epsilon": found.plan.target_epsilon}
        # max_steps decides; a number of epochs beside it would only mislead.
        replaced |= {"num_train_epochs": None, "noise_multiplier": None}
        if folder := recipe.get("output_dir"):  # that of the recipe may hold its run
            replaced["output_dir"] = f"{str(folder).rstrip('/')}_suggested"
        kept = {key: value for key, value in replaced.items() if value is not None}
        text = yaml.safe_dump(kept, sort_keys=False)
        Path(options.output).write_text(text, encoding="utf-8")
    ahead = forecast(found.plan, parameters=found.parameters)
    if options.json:
        report = {
            "settings": found.settings,
            "reasons": {choice.name: choice.reason for choice in found.choices},
            "plan": found.plan.to_dict(),
            "effective_noise_multiplier": ahead.effective_noise_multiplier,
        }
        print(json.dumps(report, allow_nan=False))
    else:
        print(_text(found, ahead, recipe))
    return 0


_CHANGES_THE_NOISE = (
    "bands", "clipping_quantile", "earlier_runs", "max_logical_batch_size",
    "noised_loss_budget_ratio", "router_balance", "rows_per_group",
)  # fmt: skip


def _suggestion(
    options: SuggestOptions, recipe: dict[str, Any], epochs: float | None
) -> Suggestion:
    from hf_dp.planning import CLIPPING_NORM, suggest

    if recipe.get("target_epsilon") is None:
        raise ConfigError(
            "Expected --target_epsilon, or a recipe (--config) that sets it, got neither. Add "
            "--target_epsilon."
        )
    for name in _CHANGES_THE_NOISE:
        if recipe.get(name) is not None:
            raise ConfigError(
                f"Expected `{name}` to be left out, got {recipe[name]!r}: the noise of what is "
                "suggested is that of a run without it. Remove it, put it back into the suggested "
                "recipe, and see what `hf-dp plan` says."
            )
    # Batch and noise are what is chosen here; any valid ones let the other arguments be checked.
    args = PlannedArguments.of(recipe, expected_batch_size=1, noise_multiplier=None)
    assert args.target_epsilon is not None
    users, peft = users_of(args), recipe.get("peft")
    num_examples, units = rows_of(recipe, options.num_examples, users)
    if units is not None:
        users = users_of(args, units)
    counted = options.parameters is None and "model_name_or_path" in recipe
    tuner = tuner_of(recipe)
    found = suggest(
        num_examples,
        args.target_epsilon,
        epochs=epochs,
        parameters=trained_numbers(recipe, peft) if counted else options.parameters,
        peft=peft,
        target_delta=args.target_delta,
        accountant=args.accountant,
        sampling=args.sampling,
        mean_runs=args.private_selection_mean_runs,
        selection=None if tuner is None else tuner.plan(CLIPPING_NORM),
        users=users,
        privacy_unit=args.privacy_unit,
    )
    if counted and found.parameters is None:
        found = dataclasses.replace(
            found, parameters=trained_numbers(recipe, found.settings["peft"])
        )
    return dataclasses.replace(found, choices=(*found.choices, *_label_words(recipe)))


def _label_words(recipe: dict[str, Any]) -> list[Choice]:
    """Return a template and label words for a recipe that classifies texts by a new head, whose
    model and classes are named. They are made of these names; no row is read."""
    names, model = recipe.get("class_names"), recipe.get("model_name_or_path")
    of_texts = recipe.get("task", DEFAULT_TASK) == DEFAULT_TASK
    if not (of_texts and names and model) or recipe.get("infilling"):
        return []
    from transformers import AutoConfig, AutoTokenizer

    from hf_dp.losses import is_decoder
    from hf_dp.planning import Choice
    from hf_dp.run.gguf import reading
    from hf_dp.tasks.sources import loading, resolve_model
    from hf_dp.tasks.templates import propose

    with loading(f"The tokenizer of {model!r}", "Give a Hub name, a folder or package:NAME."):
        file = recipe.get("gguf_file")
        path = resolve_model(model, file)
        tokenizer = AutoTokenizer.from_pretrained(path, **reading(file))
        base = AutoConfig.from_pretrained(path, **reading(file))
    causal = is_decoder(base)
    heads = ("MaskedLM", "CausalLM", "LMHeadModel", "ForPreTraining")
    if not any(each.endswith(heads) for each in base.architectures or ["CausalLM" * causal]):
        return []  # no head that was trained to fill in words
    if not causal and tokenizer.mask_token is None:
        return []
    columns = recipe.get("text_columns", "")
    texts = 1 if isinstance(columns, str) else len(columns)
    try:
        infilling = propose(tokenizer, names, texts, causal, recipe.get("label_column", "label"))
    except DataError as error:
        why = f"left out, so that a new head is trained: {error}".rstrip(".")
        return [Choice("infilling", None, why)]
    reason = (
        "asking for a word that the base knows, here from the class names, needs no new weights; "
        "check with `hf-dp eval --zero-shot` what it knows, and try other words (Li et al., "
        "section 3.2)"
    )
    if infilling.several_tokens:
        reason += ". No single tokens were found: each text is read once per class"
    return [Choice("infilling", infilling.block, reason)]


def _text(found: Suggestion, ahead: Forecast, recipe: dict[str, Any]) -> str:
    """Return the suggestion as YAML: what it means in comments, then each setting below its
    reason."""
    from hf_dp.accounting.composition import doubt_of_delta
    from hf_dp.planning import doubts

    plan = found.plan
    what = "users" if plan.users is not None else "examples"
    lines = [
        f"{plan.num_examples:,} {what}, epsilon {plan.target_epsilon:g} at delta "
        f"{plan.delta:.4g} ({plan.accountant}): noise multiplier {plan.noise_multiplier:.4g}, "
        f"effective {plan.noise_multiplier / plan.sample_rate:.4g} (/ sample rate), "
        f"{ahead.epochs:.3g} epochs."
    ]
    lines += filter(None, [doubt_of_delta(plan.delta, plan.of_delta)])
    if found.parameters is not None:
        rate = found.settings["learning_rate"]
        lines += doubts(plan, parameters=found.parameters, learning_rate=rate, optimizer="adamw")
    shown = [_comment(line) for line in lines]
    for choice in found.choices:
        before = recipe.get(choice.name)
        has = "" if before in (None, choice.value) else f" The recipe has {before}."
        shown.append("")
        shown.append(_comment(f"{choice.reason[0].upper()}{choice.reason[1:]}.{has}"))
        shown.append(yaml.safe_dump({choice.name: choice.value}, sort_keys=False).strip())
    return "\n".join(shown)


def _comment(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="#   "))
