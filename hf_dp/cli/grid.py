"""The grid of a sweep: from the words of the command line to its runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cli.cell_runs import RECIPE, Cell, in_words, with_settings
from hf_dp.cli.config import check_recipe, load_yaml, read_yaml
from hf_dp.cli.non_private import BATCH, NON_PRIVATE, private_keys
from hf_dp.cli.train import with_recipe
from hf_dp.errors import ConfigError


def read_recipes(paths: Sequence[str], fixed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the recipes of a sweep and set ``fixed`` in all of them.

    Returns: the recipes by name, which is the path below the folder that they share, without its
        ending. The cards of their runs name the file.

    Raises: ConfigError for a recipe that is named twice, and for keys that its task does not have.
    """
    files = [Path(path).resolve() for path in paths]
    shared = os.path.commonpath([file.parent for file in files])
    found: dict[str, dict[str, Any]] = {}
    for path, file in zip(paths, files, strict=True):
        name = file.relative_to(shared).with_suffix("").as_posix()
        if name in found:
            raise ConfigError(
                f"Expected the recipes of `--config` to have different names, got {path!r} twice. "
                "Leave one out, or rename it."
            )
        found[name] = with_recipe(with_settings(read_yaml(path), fixed), path)
        check_recipe(found[name])
    return found


def grid(
    words: Sequence[str], seeds: Sequence[int], folder: Path, recipes: Sequence[str] = ()
) -> Iterator[Cell]:
    """Yield all combinations; of several recipes, each cell names its own.

    Raises: ConfigError for a word that is not KEY=VALUES, or a key that comes twice.
    """
    axes: dict[str, list[Any]] = {RECIPE: list(recipes)} if len(recipes) > 1 else {}
    for word in words:
        key, _, text = word.partition("=")
        _refuse_own(key)
        if not key or not text or key in axes:
            raise ConfigError(
                f"Expected each word of `--grid` to be KEY=A,B with a new key, got {word!r}. "
                "For example --grid learning_rate=1e-4,1e-3."
            )
        axes[key] = _yaml(f"[{text}]", word)
    for what, given in {**axes, "--seeds": list(seeds)}.items():
        # 1 and 1.0 are the same, 1 and true are not
        typed = [(isinstance(value, bool), value) for value in given]
        if any(value in typed[:place] for place, value in enumerate(typed)):
            raise ConfigError(
                f"Expected the values of {what} to be different from each other, got {given}. "
                "Leave the repeated ones out."
            )
    for settings in _combinations(axes):
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        for seed in seeds:
            yield Cell(settings, seed, folder / f"{_name(settings)}-{name}-seed{seed}")


def _combinations(axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield all combinations, each once.

    Where runs with and without privacy stand side by side, the privacy arguments of the grid are
    those of the former: a run without privacy is one, whatever their values.
    """
    several = len(axes.get("privacy_mode", [])) > 1
    found: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        if several and settings["privacy_mode"] == NON_PRIVATE:
            unread = private_keys() - {BATCH}
            settings = {key: value for key, value in settings.items() if key not in unread}
        found.setdefault(json.dumps(settings, sort_keys=True), settings)
    yield from found.values()


def _name(settings: dict[str, Any]) -> str:
    text = "-".join(f"{key}={in_words(value)}" for key, value in settings.items()) or "run"
    return "".join(letter if letter.isalnum() or letter in "=-._" else "_" for letter in text)[:80]


def setting(word: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE. Raises: ConfigError."""
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(
            f"Expected each word of `--set` to be KEY=VALUE, got {word!r}. "
            "For example --set max_steps=100."
        )
    _refuse_own(key)
    return key, _yaml(text, word)


def _refuse_own(key: str) -> None:
    """Raise ConfigError for a key that the sweep itself sets."""
    own = {"seed": "--seeds", "output_dir": "--output-dir", RECIPE: "--config A.yaml B.yaml"}
    if key in own:
        raise ConfigError(f"`{key}` is the sweep's own: use {own[key]}.")


def _yaml(text: str, word: str) -> Any:
    try:
        value = load_yaml(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError) as problem:
        raise ConfigError(
            f"{word!r} is no plain YAML value: {str(problem).splitlines()[0]}. Write text, a "
            "number, a list or a mapping. Text with brackets or commas needs quotes inside those "
            """of the shell: "train_split='train[:20]','train[20:]'"."""
        ) from problem
    return value
