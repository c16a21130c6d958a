"""What a complete checkpoint holds: the names, sizes and digests of its files.

The manifest is written last. A checkpoint that agrees with it is as it was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dp.statement.digests import digest_of_file
from hf_dp.statement.durable import replace_file
from hf_dp.statement.strict_json import loads

# Names that start with "_" are never pushed to the Hub.
MANIFEST = "_manifest.json"
VERSION = 1
# The card is text for people, who may edit it; nothing is resumed from it.
_NOT_LISTED = (MANIFEST, "README.md")


def write_manifest(checkpoint: Path) -> None:
    """List the files of a checkpoint, durably. Raises: OSError when the disk refuses."""
    files = {name: _measured(checkpoint / name) for name in sorted(_files(checkpoint))}
    text = json.dumps({"manifest_version": VERSION, "files": files}, indent=1)
    replace_file(checkpoint / MANIFEST, [text.encode(), b"\n"])


def damage(checkpoint: Path) -> str:
    """Say which file of a checkpoint is missing or is not as it was saved; empty if none.

    Files that were added later are no damage.
    """
    try:
        listed = _listed(loads((checkpoint / MANIFEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last"
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, (size, digest) in listed.items():
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"its {name} has {found:,} bytes, and had {size:,} when it was saved"
            if digest_of_file(path) != digest:
                return f"its {name} is not what was saved (the SHA-256 differs)"
        except FileNotFoundError:
            return f"its {name} is missing"
        except OSError as error:
            return f"its {name} cannot be read ({error})"
    return ""


def has_manifest(checkpoint: Path) -> bool:
    """Return whether the checkpoint has a manifest, as all that were saved aside have."""
    return (checkpoint / MANIFEST).exists()


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            relative = Path(parent, name).relative_to(folder).as_posix()
            if relative not in _NOT_LISTED:
                yield relative


def _measured(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest_of_file(path)}


def _listed(values: Any) -> dict[str, tuple[int, str]]:
    """Read a manifest. Raises: ValueError when it is not one of this version."""
    if not isinstance(values, dict) or values.get("manifest_version") != VERSION:
        raise ValueError(f"expected version {VERSION}")
    files = values.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("expected a list of files")
    listed = {}
    for name, entry in files.items():
        parts = Path(name).parts
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"} or ".." in parts:
            raise ValueError(f"expected bytes and sha256 of {name!r}, got {entry!r}")
        listed[name] = (entry["bytes"], entry["sha256"])
    return listed


def manifest_digest(checkpoint: str | os.PathLike[str]) -> str:
    """Return a digest of a checkpoint's manifest, and so of its files; words if there is none."""
    path = Path(checkpoint, MANIFEST)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "not there"
