"""Files of an upload that goes on in the background, kept while checkpoints come and go."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hf_dp.publishing.publication import Publication

# Names that start with "_" are never published.
STAGED = "_publishing-"


def stage(
    publication: Publication, folder: Path, *, linked: bool = True
) -> tuple[Publication, Path]:
    """Return the publication with its files in a new folder ``_publishing-...`` in ``folder``, and
    that folder, for :func:`clear`.

    Args: linked: whether hard links will do. They cost no space, and a checkpoint that is rotated
        away leaves them; a file that is written again in its place would change under the upload,
        and is copied instead. So is a file on a disk without links.

    Raises: OSError when the disk refuses.
    """
    place = Path(tempfile.mkdtemp(prefix=STAGED, dir=folder))
    files: dict[str, bytes | Path] = {}
    for name, content in publication.files.items():
        if isinstance(content, Path):
            target = place / name.replace("/", "--")
            _put(content.resolve(), target, linked)
            content = target
        files[name] = content
    return replace(publication, files=MappingProxyType(files)), place


def clear(place: Path) -> None:
    """Remove what was staged."""
    shutil.rmtree(place, ignore_errors=True)


def clear_all(folder: Path) -> None:
    """Remove what a kill may have left staged. No push may be under way."""
    for place in folder.glob(f"{STAGED}*"):
        clear(place)


def _put(source: Path, target: Path, linked: bool) -> None:
    try:
        if linked:
            return os.link(source, target)
    except OSError:  # no hard links there, as on some network disks
        pass
    shutil.copyfile(source, target)
