"""What stands inside the files that go: local paths are taken out, and what cannot be is refused.

A JSON file that a model needs may hold the path from which it was loaded, and text the name of a
folder. Weights may hold metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dp.cards.hub_rules import is_repository
from hf_dp.errors import LedgerError
from hf_dp.publishing.private_words import PrivateWords, is_local_path
from hf_dp.run.mark import STAMP_PREFIX
from hf_dp.run.other_training import STAMP
from hf_dp.run.weights_file import read_metadata

BASE_KEY = "base_model_name_or_path"
# Where a file came from: nothing reads these keys, or every loader replaces them.
_ORIGIN = ("_name_or_path", "name_or_path")
_FILES = ("tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file", "cache_dir")
# Vocabularies hold any word there is, "/usr" and the names of machines among them.
_VOCABULARY = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "entity_vocab.json",
    "emoji.json",
)
_NAME_IT = "Name the base on the Hub: --base-model ID, or trainer.describe(base_model=ID)."
_TEMPLATE_KEY = "chat_template"
# Of metadata in weights. Others are refused: the digest of a file covers them, so that they cannot
# be taken out here.
_METADATA = {"format": ("pt", "tf", "flax", "np", "mlx"), STAMP: ("hf_dp",)}


class Contents:
    """Looks through the files of one publication.

    Args: base_model: the id on the Hub that an adapter is to name; None keeps what it names.

    Attributes:
        refusals: what keeps the folder from being published, each with its next move.
        changes: what was taken out or replaced, by file and key.
        remarks: what others will miss.
    """

    def __init__(self, words: PrivateWords, base_model: str | None = None):
        self.words, self.base_model = words, base_model
        self.refusals: list[str] = []
        self.changes: list[str] = []
        self.remarks: list[str] = []

    def published(self, name: str, content: bytes) -> bytes:
        """Return what is published of a file that is not weights."""
        text = content.decode("utf-8", errors="replace")
        if secret := self.words.secret_in(text):
            self._refuse(name, secret, "Take it out, and revoke the token if others could read it.")
        elif name.endswith(".json") and name not in _VOCABULARY:
            return self._json(name, content)
        elif name.endswith((".md", ".jinja")) and (place := self.words.place_in(text)):
            self._refuse(name, place, "Take it out of the text.")
        return content

    def look_at_weights(self, name: str, path: Path) -> None:
        """Refuse weights whose metadata holds more than their format and hf_dp's own mark."""
        try:
            keys = [
                key
                for key, value in read_metadata(path).items()
                if value not in _METADATA.get(key, ()) and not key.startswith(STAMP_PREFIX)
            ]
        except LedgerError as problem:
            self.refusals.append(str(problem))
            return
        for key in keys:
            self._refuse(
                name,
                f"{key!r} in its metadata, which nobody here has looked at",
                "Save the weights with save_pretrained, without metadata of your own.",
            )

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
            is_program = any(part.startswith(_TEMPLATE_KEY) for part in key.split("."))
            found = self.words.place_in(text) if is_program else self.words.found_in(text)
            if found:
                self._refuse(f"{name}: {key}", found, "Take it out, or write a public name there.")
        if len(self.changes) == before:
            return content
        return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()

    def _without_origin(self, name: str, values: dict[str, Any], at: str = "") -> dict[str, Any]:
        kept = {}
        for key, value in values.items():
            local = isinstance(value, str) and is_local(value)
            if local and (key in _ORIGIN or key in _FILES):
                self.changes.append(f"{name}: {at}{key} is left out, a local path")
                continue
            is_block = isinstance(value, dict)
            kept[key] = self._without_origin(name, value, f"{at}{key}.") if is_block else value
        return kept

    def _name_base(self, name: str, values: dict[str, Any]) -> None:
        base = values.get(BASE_KEY)
        if self.base_model is not None and base != self.base_model:
            values[BASE_KEY] = self.base_model
            self.changes.append(f"{name}: {BASE_KEY} is now {self.base_model!r}")
        elif isinstance(base, str) and base and is_local(base):
            values[BASE_KEY] = None  # refused once, not again as a local path
            self._refuse(
                f"{name}: {BASE_KEY}",
                f"{base!r}, no name on the Hub: a local path, which says something of this machine "
                "and which nobody else could load",
                _NAME_IT,
            )
        elif not base:
            self.remarks.append(
                f"{name} names no base model, so others cannot load the adapter alone. {_NAME_IT}"
            )

    def _refuse(self, where: str, what: str, next_move: str) -> None:
        self.refusals.append(f"{where} holds {what}. {next_move}")


def is_local(name: str) -> bool:
    """Return whether the name of a model or file is not one on the Hub, or is shadowed by a file
    here."""
    return is_local_path(name) or not is_repository(name) or os.path.exists(name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice: only the last is read, and the first would leave unseen."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key stands twice in the block with {next(iter(values))!r}")
    return values


def _texts(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
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
