"""Text from a run, made safe for a card's YAML and Markdown; and what can be a name on the Hub."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import PurePosixPath, PureWindowsPath

from huggingface_hub.utils import HFValidationError, validate_repo_id

_IN_CACHE = re.compile(r"(?:models|datasets)--([\w.-]+)[\\/]snapshots[\\/]")
_SAYS_NOTHING = re.compile(r"model|models|checkpoint(-\d+)?|final|best|latest|outputs?|files|main")


def one_line(value: object) -> str:
    """Return text without line breaks, control and formatting characters (bidirectional overrides
    and zero-width ones among the latter)."""
    text = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in str(value))
    return " ".join(text.split())


def public_name(value: object) -> str | None:
    """Return one line, with a local path reduced to its last component; None for no text.

    Where that says nothing ("model", "checkpoint-12"), the one before it stands, too. A folder of
    the Hub's cache is named by its repository."""
    if value is None:
        return None
    text = one_line(value)
    if not _is_local(text):
        return text or None
    if cached := _IN_CACHE.search(text):
        return "/".join(cached[1].split("--"))
    path = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    parts = [part for part in path.parts if part not in ("/", "\\", ".", "..", "~", path.anchor)]
    says_nothing = len(parts) > 1 and _SAYS_NOTHING.fullmatch(parts[-1])
    return "/".join(parts[-2:] if says_nothing else parts[-1:]) or None


def source_name(value: object) -> str | None:
    """Return the name of a model or data set, as :func:`public_name`, that says of a local one that
    it is local: "bert (local)" cannot be taken for a repository."""
    name, text = public_name(value), one_line(value)
    if name is not None and name.startswith("package:"):
        return f"{name.removeprefix('package:')} (in a Python package)"
    if name is None or not _is_local(text) or _IN_CACHE.search(text):
        return name
    return f"{name} (local)"


def markdown(value: object) -> str:
    """Escape a value, as one line, so that Markdown and HTML see only text."""
    text = re.sub(r"([\\`*{}\[\]<>#|~!&$@^])", r"\\\1", one_line(value))
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    # A list item or an underlined heading.
    return re.sub(r"^(\d*)([-+=.)])(?=[\s=-]|$)", r"\1\\\2", text)


def is_repository(value: str | None) -> bool:
    """Return whether a text can be the id of a repository on the Hub."""
    if not value:
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return not value.startswith(("~", "."))


def _is_local(text: str) -> bool:
    if text.startswith((".", "/", "~", "\\", "file:")) or re.match(r"[A-Za-z]:[\\/]", text):
        return True
    return os.sep in text and os.path.exists(text)
