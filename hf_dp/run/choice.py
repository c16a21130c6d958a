"""From which checkpoint a run goes on: the last complete one, or the one that is named."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging

from hf_dp.errors import LedgerError
from hf_dp.run.checkpoint import numbered
from hf_dp.run.manifest import MANIFEST, damage, has_manifest
from hf_dp.statement.record import FILE_NAME

logger = logging.get_logger(__name__)

_STATE = "trainer_state.json"
_OPTIMIZER = "optimizer"


def checkpoint_of(resume_from_checkpoint: str | bool | None, folder: str) -> str | None:
    """Return the checkpoint that Trainer's argument means: a path, the last complete one for True,
    or None.

    Every file is compared with the manifest of its checkpoint.

    Raises: LedgerError for True without a complete checkpoint, and for a path whose checkpoint is
        incomplete or damaged; the message names the file and the checkpoint to use instead.
    """
    if resume_from_checkpoint is True:
        return str(_last_complete(Path(folder)))
    if not resume_from_checkpoint:
        return None
    named = Path(resume_from_checkpoint)
    if not named.is_dir():
        raise LedgerError(
            f"resume_from_checkpoint={str(named)!r} is not a folder. {_instead(named)}"
        )
    if not has_manifest(named) and (named / _STATE).exists():
        logger.warning(
            "The checkpoint %s has no %s: it was written by an earlier version of hf_dp, or not to "
            "its end. Its files cannot be checked.",
            named.name,
            MANIFEST,
        )
    elif problem := damage(named):
        raise LedgerError(
            f"The checkpoint {named.name!r} is incomplete or damaged: {problem}. {_instead(named)}"
        )
    _refuse_weights_alone(named)
    return str(named)


def _last_complete(folder: Path) -> Path:
    skipped: list[str] = []
    for checkpoint in numbered(folder):
        problem = damage(checkpoint)
        if not problem:
            for each in skipped:
                logger.warning("Skipped %s. %s is complete.", each, checkpoint.name)
            _refuse_weights_alone(checkpoint)
            return checkpoint
        skipped.append(f"the incomplete or damaged checkpoint {checkpoint.name!r}: {problem}")
    if skipped:
        raise LedgerError(
            f"resume_from_checkpoint=True, but no checkpoint in output_dir {folder.name!r} is "
            f"complete: {'; '.join(skipped)}. Restore one from a backup. One of an earlier version "
            "of hf_dp, which wrote no manifest, is resumed from when you pass its path. "
            f"{_anew(folder)}"
        )
    raise LedgerError(
        f"resume_from_checkpoint=True, but output_dir {folder.name!r} has no checkpoint. "
        f"{_anew(folder)}"
    )


def _refuse_weights_alone(checkpoint: Path) -> None:
    """Raise LedgerError for a checkpoint from which Trainer would go on with a new optimizer."""
    if not any(_OPTIMIZER in path.name for path in checkpoint.iterdir()):
        raise LedgerError(
            f"The checkpoint {checkpoint.name!r} has no state of the optimizer (it was saved with "
            "save_only_model=True), so the run would go on as another one. Start a new run in a "
            f"new output_dir, and name this one in `earlier_runs`; {FILE_NAME} here counts."
        )


def _instead(named: Path) -> str:
    for checkpoint in numbered(named.parent):
        if checkpoint.name != named.name and not damage(checkpoint):
            return f"The last complete one beside it is {str(checkpoint)!r}: resume from that."
    return "There is no complete one beside it. Restore it from a backup, or start a new run."


def _anew(folder: Path) -> str:
    if not (folder / FILE_NAME).exists():
        return "Leave resume_from_checkpoint out to start a run."
    return (
        "Without a complete checkpoint the run cannot be continued. Start a new run in a new "
        f"output_dir. What {FILE_NAME} here records was spent on the same rows, and both count "
        "together: name this folder in `earlier_runs`."
    )
