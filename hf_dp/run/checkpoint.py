"""Checkpoints appear complete or not at all: written aside, synced, renamed.

What is half done is in one folder, ``_saving``. A kill leaves it behind, and :func:`tidy` removes
it at the next start. One process of a run calls these functions, with the run's lock.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hf_dp.run.manifest import write_manifest
from hf_dp.statement.durable import sync_folder, sync_tree

# Names that start with "_" are never pushed to the Hub, and no tool takes them for a checkpoint.
SAVING = "_saving"
_REPLACED, _DELETED = "replaced-", "deleted-"
_OURS = re.compile(rf"({_REPLACED}|{_DELETED})?(checkpoint-\d+)")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def numbered(folder: Path) -> list[Path]:
    """List the checkpoints in a run's folder by their steps, the newest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def stage(folder: Path) -> Path:
    """Return the folder below which the next checkpoint is written, empty.

    Raises: OSError when the disk refuses.
    """
    tidy(folder)
    saving = folder / SAVING
    saving.mkdir(parents=True, exist_ok=True)
    return saving


def publish(folder: Path, name: str) -> Path:
    """Let ``_saving/checkpoint-N`` appear as ``checkpoint-N``, with its manifest, durably.

    One of that name is replaced: after a kill, :func:`tidy` puts it back if the new one is not
    there.

    Raises: OSError when the disk refuses. A checkpoint that was there is there still.
    """
    saving, final = folder / SAVING, folder / name
    write_manifest(saving / name)
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
    """Delete the oldest checkpoints until ``keep`` are left, as Trainer's ``save_total_limit``.

    The newest and ``best`` stay. Each leaves by a rename first, so that no half of one is left.

    Args: keep: None or 0 for all. best: the path of the best checkpoint, or None.
    """
    if not keep or keep < 0:
        return
    # Not by step: a branch that went on from an earlier checkpoint has the lower number.
    oldest_first = numbered(folder)[::-1]
    ordered = sorted(oldest_first, key=lambda path: path.stat().st_mtime_ns)
    protected = [*ordered[-1:], *(path for path in ordered if best and path == Path(best))]
    surplus = len(ordered) - max(keep, len(set(protected)))
    for path in [path for path in ordered if path not in protected][: max(0, surplus)]:
        (folder / SAVING).mkdir(exist_ok=True)
        os.rename(path, folder / SAVING / f"{_DELETED}{path.name}")
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what a killed save left in ``_saving``, and nothing else.

    A checkpoint that was being replaced is put back.
    """
    saving = folder / SAVING
    if not saving.is_dir() or saving.is_symlink():
        return
    for path in sorted(saving.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        if match[1] == _REPLACED and not (folder / match[2]).exists():
            os.rename(path, folder / match[2])
            sync_folder(folder)
        else:
            shutil.rmtree(path)
    if not any(saving.iterdir()):
        saving.rmdir()
