"""The help of ``hf-dp train`` and ``hf-dp eval``, made from the registry of tasks.

It is quick because it imports only the dataclasses of the chosen task. ``DPTrainingArguments``
needs transformers, so its most used arguments are listed here; a test compares them with the class.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any

from hf_dp.cli.tasks import TASKS

# argument -> (metavar, help); a default in parentheses is what the class or its resolution gives
PRIVACY = {
    "target_epsilon": ("E", "epsilon to spend; give this or noise_multiplier"),
    "noise_multiplier": ("S", "standard deviation of the noise / clipping norm"),
    "target_delta": ("D", "delta (default: 1 / (2 x number of training rows))"),
    "expected_batch_size": (
        "B",
        "logical batch: expected number of examples in a step; sample rate = B / rows",
    ),
    "sampling": (
        "NAME",
        "poisson, or random_allocation: each row once an epoch, in a random step (default: "
        "poisson)",
    ),
    "private_selection_mean_runs": (
        "K",
        "expected number of runs of a search that releases only the best; set by hf-dp sweep "
        "--private-selection",
    ),
    "max_logical_batch_size": (
        "B",
        "largest sample that a step uses in full; needs accountant pld (default: no limit)",
    ),
    "per_device_train_batch_size": (
        "b",
        "physical batch: changes memory, never the result (default: 8)",
    ),
    "auto_physical_batch_size": (
        "True|False",
        "find the largest physical batch that fits into the GPU (default: False)",
    ),
    "per_example_max_grad_norm": ("C", "clipping norm, L2 (default: 0.1)"),
    "accountant": ("NAME", "pld, rdp or prv; gdp_clt is an estimate (default: pld)"),
    "privacy_mode": ("NAME", "dp_sgd, dp_fp or non_private (default: dp_sgd)"),
    "noised_loss_budget_ratio": (
        "R",
        "share of the privacy budget for a noised training loss (default: none is released)",
    ),
    "noised_loss_bound": ("B", "with it: each loss is clipped to [0, B], a public number"),
    "release": (
        "NAME",
        "un-noised quantities to publish: training_loss, clipped_gradient_norm (default: none)",
    ),
}
_METAVARS = {int: "N", float: "X", bool: "True|False"}


def formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter with 100 columns that keeps the line breaks of descriptions."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=100)


def command_parser(
    prog: str,
    usage: str,
    description: str,
    epilog: str,
    base: argparse.ArgumentParser,
    arguments: Iterable[type],
) -> argparse.ArgumentParser:
    """Return a parser that is only there for its help.

    Args:
        base: the parser of the options that the command reads itself.
        arguments: the dataclasses of the other options.
    """
    parser = argparse.ArgumentParser(
        prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=formatter,
        parents=[base],
        add_help=False,
        conflict_handler="resolve",
    )
    for cls in arguments:
        add_fields(parser, cls)
    return parser


def list_tasks(names: Iterable[str]) -> str:
    """Return a line for each task."""
    width = max(map(len, TASKS))
    return "\n".join(["tasks:", *(f"  {name:<{width}}  {TASKS[name].help}" for name in names)])


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a group with an option for each field of a dataclass, with its help and its default."""
    title = inspect.cleandoc(cls.__doc__ or "").splitlines()[0].rstrip(".")
    add = parser.add_argument_group(title[0].lower() + title[1:]).add_argument
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = _kind(hints[field.name])
        repeated = typing.get_origin(kind) is list
        item = typing.get_args(kind)[0] if repeated else kind
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = " ".join(map(str, field.default_factory()))
        shown = default not in (None, "", dataclasses.MISSING)
        text = field.metadata["help"]
        add(
            f"--{field.name}",
            nargs="+" if repeated else None,
            metavar=_METAVARS.get(item, "TEXT"),
            help=(f"{text.rstrip('.')} (default: {default})" if shown else text).replace("%", "%%"),
        )


def add_privacy(parser: argparse.ArgumentParser) -> None:
    """Add a group with the most used arguments of ``DPTrainingArguments``."""
    add = parser.add_argument_group("privacy").add_argument
    for name, (metavar, text) in PRIVACY.items():
        add(f"--{name}", nargs="+" if name == "release" else None, metavar=metavar, help=text)


def _kind(hint: Any) -> Any:
    """Return the type of a field on the command line: text if text is allowed, and never None."""
    if not isinstance(hint, types.UnionType):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return str if str in kinds else kinds[0]
