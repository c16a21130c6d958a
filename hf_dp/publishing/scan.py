"""What stands inside the files that go: local paths are taken out, and what cannot be is refused.

A JSON file that a model needs may hold the path from which it was loaded, and text the name of a
folder, a machine or a token. Weights may hold metadata.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import get_token
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_dp.cards.details import is_repository
from hf_dp.errors import LedgerError
from hf_dp.run.witnesses import HEAD_KEY, head_in, read_metadata

_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
_ABSOLUTE = re.compile(r"/[^/\s]+/|~[\w.-]*/|[A-Za-z]:[\\/]|\\\\[^\\]|file:")
_INSIDE = re.compile(r"(?<![\w/.-])/[\w.-]+/[\w.-]|\bfile:/|(?<!\w)[A-Za-z]:\\\w")
_ADDRESS = re.compile(r"\b(https?|hf)://(?!\S*@)\S+")  # others, and ones with a password, may tell
_OTHER_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://")
_SHORTEST_NAME = 4  # of a machine; shorter ones are words, too
_SHORTEST_TOKEN = 8

_BASE = "base_model_name_or_path"
# Where a file came from: nothing reads these keys, or every loader replaces them.
_ORIGIN = frozenset(
    "_name_or_path name_or_path tokenizer_file special_tokens_map_file vocab_file merges_file "
    "cache_dir".split()
)
# Vocabularies hold any word there is, "/usr" and the names of machines among them.
_VOCABULARY = "tokenizer.json vocab.json added_tokens.json entity_vocab.json emoji.json".split()
_NAME_IT = "Name the base on the Hub: --base-model ID, or trainer.describe(base_model=ID)."
_SAVE_IT = (
    f"{_NAME_IT} If the base was never saved: before training, save it with save_pretrained and "
    "load it from there; or, after training, set trainer.model = trainer.model.merge_and_unload(), "
    "and call trainer.save_model(ANOTHER_FOLDER)."
)
# What the metadata of weights may hold beside the head. Other entries are refused: the digest of a
# file covers them, so they cannot be taken out here.
_METADATA = {"format": ("pt", "tf", "flax", "np", "mlx")}


class Scan:
    """Looks through the files of one publication for tokens, places and names of this machine.

    Args: base_model: the id on the Hub that an adapter is to name; None keeps what it names.

    Attributes: refusals: what keeps the folder from being published, each with its next move.
        changes: what was taken out or replaced, by file and key."""

    def __init__(
        self, folder: Path, base_model: str | None = None, tokens: Iterable[str | None] = ()
    ):
        self.base_model = base_model
        self.refusals: list[str] = []
        self.changes: list[str] = []
        given = [token for token in (*tokens, *known_tokens()) if token]
        self.tokens = [token for token in given if len(token) >= _SHORTEST_TOKEN]
        folder = folder.resolve()
        # A checkpoint lies in the run's folder.
        run = folder.parent if folder.name.startswith("checkpoint-") else folder
        self.places = [str(place) for place in (folder, run, Path.home()) if len(place.parts) > 1]
        try:
            self.user = getpass.getuser()
        except (OSError, KeyError):  # a user without a name, as in some containers
            self.user = ""
        name = socket.gethostname()
        self.machine = "" if name in CONFIG_MAPPING_NAMES else name  # "bert" is a model_type, too

    def published(self, name: str, content: bytes) -> bytes:
        """Return what is published of a file that is not weights."""
        text = content.decode("utf-8", errors="replace")
        if secret := self.secret_in(text):
            self._refuse(name, secret, "Remove it, and revoke the token if others could read it.")
        elif name.endswith(".json") and name not in _VOCABULARY:
            return self._json(name, content)
        elif name.endswith((".md", ".jinja")) and (place := self.place_in(text)):
            self._refuse(name, place, "Remove it from the text.")
        return content

    def look_at_weights(self, name: str, path: Path) -> None:
        """Refuse weights whose metadata holds more than their format and what hf_dp says there."""
        try:
            head_in(path)
            for key, value in read_metadata(path).items():
                if key != HEAD_KEY and value not in _METADATA.get(key, ()):
                    what = f"{key!r} in its metadata, which hf_dp did not write"
                    self._refuse(name, what, "Save the weights without metadata of your own.")
        except LedgerError as problem:
            self.refusals.append(str(problem))

    def _json(self, name: str, content: bytes) -> bytes:
        try:
            values = json.loads(content, object_pairs_hook=_once)
        except (ValueError, RecursionError) as problem:
            self.refusals.append(f"{name} cannot be read as JSON ({problem}). Save it again.")
            return content
        before = len(self.changes)
        if isinstance(values, dict) and name.endswith("config.json"):
            values = self._without_origin(name, values)
            if name == "adapter_config.json":
                self._name_base(name, values)
        for key, text in _texts(values):
            is_program = any(part.startswith("chat_template") for part in key.split("."))
            if found := self.place_in(text) if is_program else self.found_in(text):
                self._refuse(f"{name}: {key}", found, "Remove it, or write a public name there.")
        if len(self.changes) == before:
            return content
        return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()

    def _without_origin(
        self, name: str, values: dict[str, object], at: str = ""
    ) -> dict[str, object]:
        kept: dict[str, object] = {}
        for key, value in values.items():
            if key in _ORIGIN and isinstance(value, str) and is_local(value):
                self.changes.append(f"{name}: {at}{key} is left out, a local path")
            elif isinstance(value, dict):
                kept[key] = self._without_origin(name, value, f"{at}{key}.")
            else:
                kept[key] = value
        return kept

    def _name_base(self, name: str, values: dict[str, object]) -> None:
        base = values.get(_BASE)
        if self.base_model is not None and base != self.base_model:
            values[_BASE] = self.base_model
            self.changes.append(f"{name}: {_BASE} is now {self.base_model!r}")
        elif not base:
            what = "no name of the adapter's base, so nobody can load the adapter"
            self._refuse(f"{name}: {_BASE}", what, _SAVE_IT)
        elif isinstance(base, str) and is_local(base):
            values[_BASE] = None  # refused once, not again as a local path
            what = f"{base!r}, no name on the Hub: a local path, which nobody else could load"
            self._refuse(f"{name}: {_BASE}", what, _NAME_IT)

    def _refuse(self, where: str, what: str, next_move: str) -> None:
        self.refusals.append(f"{where} holds {what}. {next_move}")

    def secret_in(self, text: str) -> str:
        """Say which secret a text holds; empty if none."""
        found = any(token in text for token in self.tokens) or _TOKEN.search(text)
        return "a token of the Hub" if found else ""

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
            return "an address that is not that of a public page"
        if is_local_path(paths) or _INSIDE.search(paths):
            return "a local path"
        if self.user and re.search(rf"[\\/]{re.escape(self.user)}[\\/]", paths):
            return "the user's name in a path"
        known = len(self.machine) >= _SHORTEST_NAME and self.machine != "localhost"
        if known and re.search(rf"(?<![\w-]){re.escape(self.machine)}(?![\w-])", value):
            return "the name of this machine"
        return ""


def known_tokens() -> list[str]:
    """List the tokens of the Hub that this process knows."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return [token for token in (get_token(), *map(os.environ.get, names)) if token]


def scrubbed(text: str, tokens: Iterable[str | None] = ()) -> str:
    """Return a text without tokens."""
    for token in filter(None, (*tokens, *known_tokens())):
        text = text.replace(token, "<token>")
    return _TOKEN.sub("<token>", text)


def is_local(name: str) -> bool:
    """Return whether the name of a model or file is not one on the Hub, or is shadowed by a file
    here."""
    return is_local_path(name) or not is_repository(name) or os.path.exists(name)


def is_local_path(value: str) -> bool:
    """Return whether a value is a path of this machine: absolute, or of something that exists."""
    if "\n" in value or "\0" in value:
        return False
    exists = re.match(r"/.|\.\.?[\\/]", value) is not None and os.path.exists(value)
    return _ABSOLUTE.match(value) is not None or exists


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a key that stands twice: only the last is read, and the first would leave unseen."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key occurs twice in the block with {next(iter(values))!r}")
    return values


def _texts(value: object, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield each string, with the keys that lead to it; keys count as strings, too."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield f"{at}.{key}".lstrip("."), str(key)
            yield from _texts(inside, f"{at}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, inside in enumerate(value):
            yield from _texts(inside, f"{at}[{number}]")
