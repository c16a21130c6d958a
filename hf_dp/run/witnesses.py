"""Whatever knows how far a run has come: the head, and what traveled with checkpoints and weights.

A ledger that does not contain what one of them knows went back, and nobody goes on with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_dp.errors import LedgerError
from hf_dp.run.ledger_file import COPY, HEAD, LEDGER, Lines, damaged, read_copy, read_head, read_own
from hf_dp.statement.durable import Head, loads, replace_file
from hf_dp.statement.evidence import FILE_NAME, Evidence, file_of, read

_BACKUP = "Restore a backup of the whole folder that is not older; without it, the privacy of this "
_BACKUP += "run is not known."


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a run's folder by their steps, the newest first."""
    found = [
        (int(number), path)
        for path in folder.glob("checkpoint-*")
        if (number := path.name.removeprefix("checkpoint-")).isdecimal() and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def heads_in(folder: Path) -> Iterator[tuple[Path, Head]]:
    """Yield what the files of one folder know, besides the ledger itself."""
    if (head := read_head(folder)) is not None:
        yield folder / HEAD, head
    if (copy := read_copy(folder)) is not None:
        yield folder / COPY, copy.head
    if (folder / FILE_NAME).exists() and (head := read(folder).head) is not None:
        yield folder / FILE_NAME, head
    for path in weights_files(folder):
        if (head := head_in(path)) is not None:
            yield path, head


def whole_ledger(folder: Path, *others: Path) -> Lines | None:
    """Return the ledger of the run in a folder, or None. LedgerError: when anything in the folder,
    its checkpoints or others knows what it lacks, and when the folder is a copy of a checkpoint."""
    places = dict.fromkeys([folder, *checkpoints(folder), *others])
    known = [found for place in places for found in heads_in(place)]
    own = read_own(folder)  # last: the run may be going on
    for where, head in known:
        if own.contains(head) if own is not None else head.lines == 0:
            continue
        if own is not None and own.run_id != head.run_id:
            raise LedgerError(
                f"{where} belongs to run {head.run_id}, but {LEDGER} in {folder} belongs to run "
                f"{own.run_id}; one folder is for one run. Resume in the output_dir that it was "
                "written under, or move the files of one run to a folder of their own."
            )
        has = "is missing" if own is None else f"has {len(own.digests)} lines but not that one"
        raise LedgerError(
            f"{LEDGER} in {folder} went back: {where} knows line {head.lines} of it, and it {has}. "
            f"The missing releases would not be counted. {_advice(folder, known)}"
        )
    first_alone = own is not None and len(own.digests) == 1  # a kill came before the head
    if own is not None and not first_alone and read_head(folder) is None:
        raise damaged(folder / HEAD, "it is missing")
    return own


def _advice(folder: Path, known: list[tuple[Path, Head]]) -> str:
    """Say how to put the longest copy back, where it contains all that is known."""
    if not any(where == folder / HEAD for where, _ in known):
        return (
            f"This is a copy of a checkpoint. Continue in the run's own output_dir. Else: {_BACKUP}"
        )
    for where, _ in known:
        copy = read_copy(where.parent) if where.name == COPY else None
        if copy is not None and all(copy.contains(head) for _, head in known):
            words = shlex.join(["cp", str(where), str(folder / LEDGER)])
            return f"Restore the longest copy: `{words}`."
    return f"No copy here contains it. {_BACKUP}"


def read_run(path_or_dir: str | Path) -> Evidence:
    """Return what a run has released: by its own ledger in its output folder, elsewhere by its
    ``privacy.json``."""
    path = file_of(path_or_dir)
    folder = path.parent
    if path.name != FILE_NAME or not any((folder / name).exists() for name in (LEDGER, HEAD)):
        return read(path_or_dir)
    own = whole_ledger(folder)
    if own is None:
        raise damaged(folder / LEDGER, "it has no complete line")
    known = own.evidence()
    stated = read(folder) if path.exists() else None
    if stated is None or stated.head != own.head:
        return known
    return replace(stated, plan=own.plan, ledger=own.ledger, weaknesses=own.weaknesses)


def refuse_leftovers(folder: Path) -> None:
    """Raise LedgerError for another run's weights or logs, which would seem to be this run's."""
    patterns = ("*.safetensors", "*.bin", "checkpoint-*", "trainer_state.json")
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise LedgerError(
            f"output_dir {folder.name!r} already holds {found[0]!r} but no {LEDGER}: weights or "
            "logs of another run. Choose a new output_dir; otherwise this run's privacy statement "
            "would seem to cover them."
        )


def refuse_foreign(folder: Path, run_id: str | None) -> None:
    """Raise LedgerError when a folder holds what is of another run, or of any (run_id None)."""
    for name in (LEDGER, HEAD, COPY, FILE_NAME):
        found = _run_of(folder / name)
        if found is not None and found != run_id:
            raise LedgerError(
                f"The folder {folder.name!r} holds {name} of another run ({found}). Pass "
                "resume_from_checkpoint to continue that run, or choose another folder (a new "
                "output_dir), and name this one in `earlier_runs` if it was on the same rows. "
                "Otherwise the evidence of what was spent would be lost."
            )


def _run_of(path: Path) -> str | None:
    """Return the run that a file is of; None where there is none, or no whole line of it."""
    if not path.exists():
        return None
    if path.name == FILE_NAME:
        return read(path).run_id
    with open(path, encoding="utf-8", errors="replace") as stream:
        line = stream.readline()
    try:
        return str(json.loads(line)["run_id"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, str(error)) from error


# -- the head in the metadata of saved weights, whose tensors stay as they are --

_CHUNK = 1 << 24
# Files that stand beside weights: masks of what trains (hf_dp.tuners.single_entries).
NOT_WEIGHTS = ("selection_masks.safetensors",)
HEAD_KEY = "hf_dp_ledger_head"  # in the metadata


def last_with_weights(folder: Path) -> Path | None:
    """Return the last checkpoint in a run's folder that holds weights, or None."""
    return next((each for each in checkpoints(folder) if weights_files(each)), None)


def weights_files(folder: Path) -> list[Path]:
    """List the safetensors files with weights in a folder: a model, its shards or an adapter, which
    PEFT puts into a folder of its name if it has one; and those of a module in a numbered folder,
    as sentence-transformers has them."""
    patterns = ("*.safetensors", "*/adapter_model*.safetensors", "[0-9]*_*/model.safetensors")
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    return sorted(
        path
        for path in found
        if not path.name.startswith("_")
        and path.name not in NOT_WEIGHTS
        and not (path.parent != folder and path.parent.name.startswith(("_", "checkpoint-")))
    )


def head_in(path: Path) -> Head | None:
    """Return the head that a weights file carries, or None. Raises: LedgerError."""
    text = read_metadata(path).get(HEAD_KEY)
    try:
        return None if text is None else Head.from_dict(loads(text))
    except (ValueError, RecursionError, LedgerError) as error:
        raise _unreadable(path, f"its {HEAD_KEY} is not one: {error}") from error


def put_head(path: Path, head: Head) -> None:
    """Let a weights file carry a head, durably; LedgerError for another run's, or a later one."""
    there = head_in(path)
    if there is not None and (there.run_id != head.run_id or there.lines > head.lines):
        raise LedgerError(
            f"{path} was saved by run {there.run_id} after line {there.lines} of its ledger, but "
            f"this is run {head.run_id} at line {head.lines}. Save into another folder."
        )
    add_metadata(path, {HEAD_KEY: json.dumps(head.to_dict())})


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: LedgerError when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error)) from error


def add_metadata(path: Path, added: Mapping[str, str]) -> None:
    """Put ``added`` into the metadata of a safetensors file, durably and in one step. Other
    metadata and the bytes of the tensors stay as they are."""
    metadata = {**read_metadata(path), **added}

    def changed() -> Iterator[bytes]:
        # 8 bytes with the length of the header, the header, and tensors at a multiple of 8 bytes.
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header["__metadata__"] = metadata
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text += b" " * (-len(text) % 8)
            yield len(text).to_bytes(8, "little") + text
            while chunk := stream.read(_CHUNK):
                yield chunk

    replace_file(path, changed())


def _unreadable(path: Path, why: str) -> LedgerError:
    return LedgerError(
        f"Expected {path} to be a safetensors file, whose metadata may say what was spent for it, "
        f"but it cannot be read ({why}). Restore it. If a kill interrupted its saving, delete it: "
        "no model could load it."
    )
