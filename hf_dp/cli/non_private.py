"""``--privacy_mode non_private``: any private recipe as its own baseline without privacy.

What only a private run reads is left out of the file's keys, and each key that is left out is
named. The batch stays as large, and the run gets a folder of its own. A privacy argument on the
command line beside ``non_private`` stays the error that it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_dp.cli.launch import launched_processes
from hf_dp.plans.dp_fp import FROZEN, PUBLISHED

NON_PRIVATE = "non_private"
BATCH, PHYSICAL, ACCUMULATION = (
    "expected_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
_DEFAULT_PHYSICAL = 8  # TrainingArguments'
_SELECTIONS = {
    "frost": "partitions are chosen by magnitudes that are not clipped or noised",
    "param": "parameters are chosen by gradients that are not clipped or noised",
    "rgp": "gradients are projected onto carriers, not clipped or noised",
}


@dataclass(frozen=True)
class Asked:
    """Hold what the command line itself says: None for what it leaves to the file."""

    privacy_mode: str | None = None
    output_dir: str | None = None
    physical: int | None = None
    accumulation: int | None = None

    @property
    def non_private(self) -> bool:
        """Return whether it asks for a run without privacy."""
        return self.privacy_mode == NON_PRIVATE


def asked_for(words: Sequence[str]) -> Asked:
    """Read from command-line words what decides how a recipe becomes its baseline."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = {
        "privacy_mode": ("privacy_mode", str),
        "output_dir": ("output_dir", str),
        "physical": (PHYSICAL, int),
        "accumulation": (ACCUMULATION, int),
    }
    for own, (name, kind) in names.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=own, type=kind)
    try:
        return Asked(**vars(parser.parse_known_args(list(words))[0]))
    except argparse.ArgumentError:  # a wrong word, which the command's own parser reports
        return Asked()


def as_asked(values: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a file's keys as the command line wants them: without privacy where it says so."""
    wanted = asked_for(words)
    return baseline(values, wanted) if wanted.non_private else values


def baseline(values: dict[str, Any], wanted: Asked) -> dict[str, Any]:
    """Return a recipe's keys for a run without privacy, in a folder of its own."""
    kept = without_privacy(values, wanted)
    if wanted.output_dir is None and (folder := folder_of(values)) != values.get("output_dir"):
        kept["output_dir"] = folder
        _say(f"output_dir {folder}")
    return kept


def folder_of(values: Mapping[str, Any]) -> Any:
    """Return where a recipe's run without privacy goes: a private run's folder holds its claim."""
    folder = values.get("output_dir")
    if folder is None or values.get("privacy_mode") == NON_PRIVATE:
        return folder
    return f"{str(folder).rstrip('/')}_{NON_PRIVATE}"


def without_privacy(values: dict[str, Any], wanted: Asked | None = None) -> dict[str, Any]:
    """Return a recipe's keys without those that only a private run reads; name these on stderr.

    A batch has as many examples as the private run expects in one, and what trains is the same.
    """
    wanted = wanted or Asked()
    dropped = {name: value for name, value in values.items() if name in private_keys()}
    kept = {name: value for name, value in values.items() if name not in dropped}
    kept["privacy_mode"] = NON_PRIVATE
    if dropped:
        _say("without " + ", ".join(f"{name} {value}" for name, value in dropped.items()))
    kept |= _of_dp_fp(values, dropped)
    kind = str((values.get("peft") or {}).get("peft_type", "")).lower()
    if kind in _SELECTIONS:
        _say(f"peft {kind}: {_SELECTIONS[kind]}")
    if (logical := dropped.get(BATCH)) is not None and wanted.accumulation is None:
        of = kept if wanted.physical is None else {PHYSICAL: wanted.physical}
        kept |= _batches(int(logical), int(of.get(PHYSICAL, _DEFAULT_PHYSICAL)), values)
    return kept


@cache
def private_keys() -> frozenset[str]:
    """Return the names of the arguments that only private runs read."""
    from transformers import TrainingArguments

    from hf_dp.trainer.arguments import DPTrainingArguments

    ours, theirs = (
        {one.name for one in dataclasses.fields(cls)}
        for cls in (DPTrainingArguments, TrainingArguments)
    )
    return frozenset(ours - theirs - {"privacy_mode"})


def _of_dp_fp(values: Mapping[str, Any], dropped: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a recipe of DP-FP leaves to its variant; add its batch to those
    dropped."""
    from hf_dp.trainer.forward_arguments import PUBLISHED_BATCH_SIZE, PUBLISHED_LEARNING_RATE

    variant = values.get("dp_fp_variant")
    if variant == FROZEN and not values.get("peft"):
        _say("peft head: as in the recipe, nothing below the head trains")
        return {"peft": {"peft_type": "head"}}
    if variant == PUBLISHED:
        dropped.setdefault(BATCH, PUBLISHED_BATCH_SIZE)
        if values.get("learning_rate") is None:
            return {"learning_rate": PUBLISHED_LEARNING_RATE}
    return {}


def _batches(logical: int, physical: int, values: Mapping[str, Any]) -> dict[str, int]:
    """Return physical batches and their number that hold ``logical`` examples together.

    They are exactly as many where a divisor of at least half the physical size allows it, else the
    nearest number.
    """
    each = max(1, round(logical / launched_processes()))  # of one process
    physical = min(physical, each)
    size = next(size for size in range(physical, 0, -1) if each % size == 0)
    count = each // size
    if 2 * size < physical:
        pairs = [
            (min(physical, round(each / count)), count)
            for count in (each // physical, each // physical + 1)
        ]
        size, count = min(pairs, key=lambda pair: abs(pair[0] * pair[1] - each))
    unit = "rows, where the recipe has users" if values.get("privacy_unit") == "user" else "rows"
    processes = launched_processes()
    by = f" x {processes} processes" if processes > 1 else ""
    _say(f"batches of {size} x {count}{by} = {size * count * processes} {unit}")
    return {PHYSICAL: size, ACCUMULATION: count}


def _say(text: str) -> None:
    if int(os.environ.get("RANK") or 0) == 0:  # of several processes, the main one
        print(f"{NON_PRIVATE}: {text}", file=sys.stderr)
