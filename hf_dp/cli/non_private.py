"""``--privacy_mode non_private``: any private recipe as its own baseline without privacy.

What only a private run reads is left out of the file's keys, and each key that is left out is
named. The batch stays as large, and the run gets a folder of its own. A privacy argument on the
command line beside ``non_private`` stays the error that it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hf_dp.cli.config import Recipe, private_keys
from hf_dp.cli.launch import launched_processes
from hf_dp.cli.options import given_options
from hf_dp.plans.dp_fp import FROZEN, PUBLISHED

NON_PRIVATE = "non_private"
# With it, `hf-dp train` leaves out what only a private run reads of its file.
AS_BASELINE = ["--privacy_mode", NON_PRIVATE]
BATCH, PHYSICAL, ACCUMULATION = (
    "expected_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


def as_asked(values: Recipe, words: Sequence[str]) -> Recipe:
    """Return a file's keys as the command line wants them: without privacy where it says so."""
    asked = given_options(words)
    if asked.get("privacy_mode") != NON_PRIVATE:
        return values
    kept, folder = without_privacy(values, words), folder_of(values)
    if "output_dir" not in asked and folder != values.get("output_dir"):
        kept["output_dir"] = folder
        _say(f"output_dir {folder}")
    return kept


def folder_of(values: Recipe) -> str | None:
    """Return where a recipe's run without privacy goes: a private run's folder holds its claim."""
    folder = values.get("output_dir")
    if folder is None or values.get("privacy_mode") == NON_PRIVATE:
        return folder
    return f"{str(folder).rstrip('/')}_{NON_PRIVATE}"


def without_privacy(values: Recipe, words: Sequence[str] = ()) -> Recipe:
    """Return a recipe's keys without those that only a private run reads; name these on stderr.

    A batch has as many examples as the private run expects in one, and what trains is the same.
    """
    asked = given_options(words)
    dropped = {name: value for name, value in values.items() if name in private_keys()}
    kept = {name: value for name, value in values.items() if name not in dropped}
    kept["privacy_mode"] = NON_PRIVATE
    variant = values.get("dp_fp_variant")
    if variant == FROZEN and not values.get("peft"):
        kept["peft"] = {"peft_type": "head"}
    if variant == PUBLISHED:
        from hf_dp.trainer.forward_arguments import PUBLISHED_BATCH_SIZE, PUBLISHED_LEARNING_RATE

        dropped.setdefault(BATCH, PUBLISHED_BATCH_SIZE)
        kept.setdefault("learning_rate", PUBLISHED_LEARNING_RATE)
    if dropped:
        _say("without " + ", ".join(f"{name} {value}" for name, value in dropped.items()))
    if BATCH in dropped and ACCUMULATION not in asked:
        most = int(asked.get(PHYSICAL) or kept.get(PHYSICAL, 8))  # 8 is TrainingArguments'
        kept |= _batches(int(dropped[BATCH]), most)
    return kept


def _batches(logical: int, most: int) -> dict[str, int]:
    """Return physical batches, of at most ``most`` and above half of it, and their number, which
    hold as nearly ``logical`` examples together as such sizes can."""
    processes = launched_processes()
    each = max(1, round(logical / processes))  # of one process
    most = min(most, each)
    size = min(range(most, most // 2, -1), key=lambda one: abs(one * round(each / one) - each))
    count = round(each / size)
    _say(f"batches of {size} x {count} x {processes} processes = {size * count * processes} rows")
    return {PHYSICAL: size, ACCUMULATION: count}


def _say(text: str) -> None:
    if int(os.environ.get("RANK") or 0) == 0:  # of several processes, the main one
        print(f"{NON_PRIVATE}: {text}", file=sys.stderr)
