"""Text from a run, made safe for a card's YAML and Markdown."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import PurePosixPath, PureWindowsPath


def one_line(value: object) -> str:
    """Return text without line breaks, control and formatting characters.

    Bidirectional overrides and zero-width characters are among the latter.
    """
    text = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in str(value))
    return " ".join(text.split())


def public_name(value: object) -> str | None:
    """Return one line, with a local path reduced to its last component; None for no text."""
    if value is None:
        return None
    text = one_line(value)
    if not _is_local(text):
        return text or None
    last = PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name
    return None if last in ("", ".", "..", "~") else last


def hub_id(value: object) -> str | None:
    """Return the value if it can be a hub id, else None.

    The hub refuses a card whose metadata links to anything else.
    """
    if value is None or _is_local(one_line(value)):
        return None
    return one_line(value) if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", one_line(value)) else None


def markdown(value: object) -> str:
    """Escape a value, as one line, so that Markdown and HTML see only text.

    Underscores inside a word need no escape.
    """
    text = re.sub(r"([\\`*{}\[\]<>#|~!&$@^])", r"\\\1", one_line(value))
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    # A list item or an underlined heading.
    return re.sub(r"^(\d*)([-+=.)])(?=[\s=-]|$)", r"\1\\\2", text)


def _is_local(text: str) -> bool:
    if text.startswith((".", "/", "~", "\\", "file:")) or re.match(r"[A-Za-z]:[\\/]", text):
        return True
    return os.sep in text and os.path.exists(text)
