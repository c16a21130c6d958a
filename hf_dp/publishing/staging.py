"""Files of an upload that goes on in the background, kept while checkpoints come and go."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hf_dp.publishing.publication import Publication

# Names that start with "_" are never published.
STAGED = "_publishing"


def stage(publication: Publication, folder: Path, name: str, *, linked: bool = True) -> Publication:
    """Return the publication with its files in ``folder/_publishing/name``.

    Args: linked: whether hard links will do. They cost no space, and a checkpoint that is rotated
        away leaves them; a file that is written again in its place would change under the upload,
        and is copied instead. So is a file on a disk without links.

    Raises: OSError when the disk refuses.
    """
    staged = folder / STAGED / name
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    files: dict[str, bytes | Path] = {}
    for path, content in publication.files.items():
        if isinstance(content, Path):
            target = staged / path.replace("/", "--")
            _put(content.resolve(), target, linked)
            content = target
        files[path] = content
    return replace(publication, files=MappingProxyType(files))


def clear(folder: Path, name: str = "") -> None:
    """Remove what was staged under a name; without one everything, as a kill may have left it."""
    shutil.rmtree(folder / STAGED / name, ignore_errors=True)
    if name and (folder / STAGED).is_dir() and not any((folder / STAGED).iterdir()):
        (folder / STAGED).rmdir()


def _put(source: Path, target: Path, linked: bool) -> None:
    try:
        if linked:
            return os.link(source, target)
    except OSError:  # no hard links there, as on some network disks
        pass
    shutil.copyfile(source, target)
