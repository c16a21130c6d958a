"""Words that must not be in a published file: tokens, local paths, names of user and machine."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
_ABSOLUTE = re.compile(r"/[^/\s]+/|~[\w.-]*/|[A-Za-z]:[\\/]|\\\\[^\\]|file:")
_INSIDE = re.compile(r"(?<![\w/.-])/[\w.-]+/[\w.-]|\bfile:/|(?<!\w)[A-Za-z]:\\\w")
_ADDRESS = re.compile(r"\b(https?|hf)://(?!\S*@)\S+")  # others, and ones with a password, may tell
_OTHER_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://")
_SHORTEST_NAME = 4  # of a machine; shorter ones are words, too
_SHORTEST_TOKEN = 8
_NO_NAMES = ("localhost",)


@dataclass(frozen=True)
class PrivateWords:
    """What to look for in published text.

    Args:
        tokens: of the Hub.
        places: folders of this machine: the user's home, the folder that is published.
        user, machine: their names.
    """

    tokens: tuple[str, ...]
    places: tuple[str, ...]
    user: str
    machine: str

    @classmethod
    def of(cls, folder: Path, tokens: Iterable[str | None] = ()) -> PrivateWords:
        """Return those of this machine, this user and this folder."""
        folder, home = folder.resolve(), Path.home()
        # A checkpoint lies in the run's folder.
        run = folder.parent if folder.name.startswith("checkpoint-") else folder
        given = (*tokens, *known_tokens())
        return cls(
            tuple(dict.fromkeys(t for t in given if t is not None and len(t) >= _SHORTEST_TOKEN)),
            tuple(str(place) for place in (folder, run, home) if len(place.parts) > 1),
            _user(),
            socket.gethostname(),
        )

    def secret_in(self, text: str) -> str:
        """Say which secret a text holds; empty if none."""
        if any(token in text for token in self.tokens) or _TOKEN.search(text):
            return "a token of the Hub"
        return ""

    def place_in(self, text: str) -> str:
        """Say which folder of this machine a text names; empty if none."""
        for place in self.places:
            for spelled in (place, place.replace("\\", "\\\\")):  # as it is, and as in JSON
                if re.search(re.escape(spelled) + r"(?![\w.-])", text):
                    return f"the folder {place}"
        return ""

    def found_in(self, value: str) -> str:
        """Say what is private about a value of a configuration; empty if nothing is."""
        if found := self.secret_in(value) or self.place_in(value):
            return found
        paths = _ADDRESS.sub("", value)
        if _OTHER_ADDRESS.search(paths):
            return "an address that is not a public page's"
        if is_local_path(paths) or _INSIDE.search(paths):
            return "a local path"
        if self.user and re.search(rf"[\\/]{re.escape(self.user)}[\\/]", paths):
            return "the user's name in a path"
        known = len(self.machine) >= _SHORTEST_NAME and self.machine not in _NO_NAMES
        if known and re.search(rf"(?<![\w-]){re.escape(self.machine)}(?![\w-])", value):
            return "the name of this machine"
        return ""


def known_tokens() -> list[str]:
    """List the tokens of the Hub that this process knows."""
    from huggingface_hub import get_token

    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    found = [get_token(), *(os.environ.get(name) for name in names)]
    return list(dict.fromkeys(token for token in found if token))


def scrubbed(text: str, tokens: Iterable[str | None] = ()) -> str:
    """Return a text without tokens."""
    for token in (*tokens, *known_tokens()):
        if token:
            text = text.replace(token, "<token>")
    return _TOKEN.sub("<token>", text)


def is_local_path(value: str) -> bool:
    """Return whether a value is a path of this machine: absolute, or of something that exists."""
    if "\n" in value:
        return False
    if _ABSOLUTE.match(value):
        return True
    return bool(re.match(r"/.|\.\.?[\\/]", value)) and _exists(value)


def _exists(value: str) -> bool:
    try:
        return os.path.exists(value)
    except ValueError:
        return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return ""
