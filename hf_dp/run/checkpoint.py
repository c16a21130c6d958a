"""Checkpoints appear complete or not at all: written aside, synced, renamed.

What is half done is in one folder, ``_saving``. A kill leaves it behind, and :func:`tidy` removes
it at the next start. One process of a run calls these functions, with the run's lock.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hf_dp.errors import LedgerError, OutputError
from hf_dp.run.ledger_file import LEDGER
from hf_dp.run.witnesses import checkpoints
from hf_dp.statement.durable import sync_folder, sync_tree

# Names that start with "_" are never pushed to the Hub, and no tool takes them for a checkpoint.
SAVING = "_saving"
_REPLACED = "replaced-"
_OURS = re.compile(rf"({_REPLACED})?(checkpoint-\d+)")


def checkpoint_of(resume_from_checkpoint: str | bool, folder: Path) -> Path:
    """Return the checkpoint that Trainer's argument means, or raise LedgerError, also for one
    without an optimizer's state, from which Trainer would go on with a new one."""
    last = next(iter(checkpoints(folder)), None)
    chosen = last if resume_from_checkpoint is True else Path(str(resume_from_checkpoint))
    new = (
        f"Start a new run in a new output_dir, and name {folder.name!r} in `earlier_runs` if there "
        f"is a {LEDGER}: what it records was spent on the same rows."
    )
    if chosen is None:
        raise LedgerError(
            f"resume_from_checkpoint=True, but output_dir {folder.name!r} has no checkpoint. {new}"
        )
    if not chosen.is_dir():
        instead = "" if last is None else f" The last one in output_dir is {str(last)!r}."
        raise LedgerError(f"resume_from_checkpoint={str(chosen)!r} is not a folder.{instead}")
    names = {path.name.partition("_")[0].partition(".")[0] for path in chosen.iterdir()}
    if not {"optimizer", "scheduler"} <= names and not _OURS.fullmatch(chosen.name):
        inside = list(map(str, checkpoints(chosen)))
        instead = (
            "Start a new run from its weights in a new output_dir, and name this folder in "
            f"`earlier_runs` if there is a {LEDGER}: what it records was spent on the same rows."
        )
        raise LedgerError(
            f"resume_from_checkpoint={str(chosen)!r} is not a checkpoint: it has no state of "
            "optimizer and schedule. A folder of saved weights has none. "
            + (f"Pass one of its checkpoints, {inside}." if inside else instead)
        )
    if not {"optimizer", "scheduler"} <= names:
        raise LedgerError(
            f"The checkpoint {chosen.name!r} has no state of optimizer and schedule (it was saved "
            f"with save_only_model=True), so the run would continue as a different one. {new}"
        )
    return chosen


def stage(folder: Path) -> Path:
    """Return the folder below which the next checkpoint is written, empty. Raises: OSError."""
    tidy(folder)
    saving = folder / SAVING
    saving.mkdir(parents=True, exist_ok=True)
    return saving


def publish(folder: Path, name: str) -> Path:
    """Let ``_saving/checkpoint-N`` appear as ``checkpoint-N``, durably.

    One of that name is replaced: after a kill, or an OSError, :func:`tidy` puts it back if the new
    one is not there.
    """
    saving, final = folder / SAVING, folder / name
    sync_tree(saving / name)
    if final.exists():
        os.rename(final, saving / f"{_REPLACED}{name}")
    try:
        os.rename(saving / name, final)
    except OSError:
        tidy(folder)
        raise
    sync_folder(saving)
    sync_folder(folder)
    tidy(folder)
    return final


def rotate(folder: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints but ``keep``, the newest and ``best``, as Trainer's
    ``save_total_limit``. Each leaves by a rename first, so that no half of one is left."""
    if not keep or keep < 0:
        return
    # Not by step: a branch that went on from an earlier checkpoint has the lower number.
    ordered = checkpoints(folder)[::-1]
    ordered.sort(key=lambda path: path.stat().st_mtime_ns)
    protected = [*ordered[-1:], *(path for path in ordered if best and path == Path(best))]
    surplus = len(ordered) - max(keep, len(set(protected)))
    for path in [path for path in ordered if path not in protected][: max(0, surplus)]:
        (folder / SAVING).mkdir(exist_ok=True)
        os.rename(path, folder / SAVING / path.name)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what a killed save left in ``_saving``, and put back a replaced checkpoint."""
    saving = folder / SAVING
    if not saving.is_dir() or saving.is_symlink():
        return
    for path in sorted(saving.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        if match[1] and not (folder / match[2]).exists():
            os.rename(path, folder / match[2])
            sync_folder(folder)
        else:
            shutil.rmtree(path)
    if not any(saving.iterdir()):
        saving.rmdir()


@contextmanager
def named_disk_errors(what: str, folder: str | os.PathLike[str], next_move: str) -> Iterator[None]:
    """Raise OutputError where a folder cannot be written to, with what to do but making room."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        of_torch = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
        if isinstance(error, RuntimeError) and not of_torch:  # torch.save has no error class
            raise
        cause = error.__cause__ if isinstance(error, OutputError) else error  # said more exactly
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise OutputError(
            f"{what} could not be written to {os.fspath(folder)!r} ({why}). Make room, or make the "
            f"folder writable. {next_move}"
        ) from error
