"""Flat YAML and command line into dataclasses: the command line wins, an unknown key is an
error."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dp.errors import ConfigError, HfDpError


def split_config(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take ``--config FILE`` out of ``argv`` and read it: (its keys, the other words).

    Raises: ConfigError for a missing, unreadable or non-flat file.
    """
    words, path = [], None
    waiting = iter(argv)
    for word in waiting:
        if word == "--config":
            path = next(waiting, None)
            if path is None:
                raise ConfigError(
                    "--config needs a file, for example --config recipes/demo/minilm_dp_adam.yaml"
                )
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
        else:
            words.append(word)
    return ({} if path is None else read_yaml(path)), words


def read_yaml(path: str) -> dict[str, Any]:
    """The keys of one configuration file. Raises: ConfigError."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(
            f"The configuration file {path!r} cannot be read: {problem.strerror}."
        ) from problem
    except yaml.YAMLError as problem:
        raise ConfigError(
            f"The configuration file {path!r} is not valid YAML: {problem}"
        ) from problem
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"The configuration file {path!r} must be a mapping of names to values.")
    return values


def parse(
    dataclass_types: Sequence[type],
    values: dict[str, Any],
    words: Sequence[str],
    *,
    prog: str,
    extra: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Instances of the dataclasses, from YAML ``values`` overridden by command-line ``words``.

    Raises: ConfigError naming every unknown key, with the nearest known one. (argparse reports a
        wrong word and exits.)
    """
    from transformers import HfArgumentParser

    known = {
        field.name: field
        for cls in dataclass_types
        for field in dataclasses.fields(cls)
        if field.init
    }
    check_keys(values, {*known, *extra})
    parser = HfArgumentParser(list(dataclass_types), prog=prog, allow_abbrev=False)  # type: ignore[arg-type]
    defaults = {name: value for name, value in values.items() if name in known}
    for name, value in defaults.items():
        if isinstance(value, str) and str(known[name].type).startswith("list"):
            defaults[name] = [value]  # one value of a list need not be written as one
        if value is False and name.endswith("_strategy"):
            defaults[name] = "no"  # which YAML reads as a truth value
    for cls in dataclass_types:
        if cls.__module__.startswith("hf_dp.cli"):  # TrainingArguments check their own
            for name, kind in typing.get_type_hints(cls).items():
                if name in defaults:
                    check_kind(name, defaults[name], kind)
    parser.set_defaults(**defaults)
    for action in parser._actions:
        if action.dest in values:
            action.required = False
    try:
        return parser.parse_args_into_dataclasses(args=list(words), args_file_flag=None)
    except ValueError as problem:
        if isinstance(problem, HfDpError):
            raise
        raise ConfigError(
            f"{str(problem).splitlines()[0]} See `hf-dp train --help-all` for all keys."
        ) from problem


_BLOCKS = ("infilling",)  # text, or a block of their own


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError for a YAML value of another kind than the annotation ``kind`` says: text,
    numbers, lists of them."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if (isinstance(value, dict) and name in _BLOCKS) or any(_is_of(value, each) for each in kinds):
        return
    words = " or ".join(
        str(getattr(each, "__name__", each)) for each in kinds if each is not type(None)
    )
    expected = str(kinds[0]) if typing.get_origin(kinds[0]) is list else words
    raise ConfigError(f"Expected `{name}` to be {expected.replace('str', 'text')}, got {value!r}.")


def _is_of(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return isinstance(value, list) and all(_is_of(each, item) for each in value)
    if kind is float and isinstance(value, str):  # 1e-3 is text to YAML
        try:
            return float(value) is not None
        except ValueError:
            return False
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def check_keys(values: dict[str, Any], known: set[str]) -> None:
    """Raise ConfigError for every key of ``values`` that is not in ``known``."""
    problems = []
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            problems.append(f"`{key}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
    if problems:
        raise ConfigError(
            f"Unknown configuration key {', '.join(problems)}. See `hf-dp train --help-all` for "
            "all keys."
        )


def peft_config(values: dict[str, Any] | None) -> Any:
    """A PEFT config from a YAML block ``{peft_type: lora, r: 8, ...}``, or None.

    Raises: ConfigError for an unknown method or option.
    """
    if not values:
        return None
    if not isinstance(values, dict):
        raise ConfigError(
            f"Expected `peft` to be a block like {{peft_type: lora, r: 8}}, got {values!r}."
        )
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    import hf_dp.tuners.methods  # noqa: F401 - registers ours

    methods = {
        str(getattr(kind, "value", kind)).lower(): cls
        for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    options = dict(values)
    method = str(options.pop("peft_type", "")).lower()
    if method not in methods:
        near = difflib.get_close_matches(method, methods, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"Expected `peft.peft_type` to be one of {sorted(methods)}, got {method!r}.{hint}"
        )
    fields = {field.name for field in dataclasses.fields(methods[method]) if field.init}
    check_keys(options, fields)
    try:
        return methods[method](**options)
    except HfDpError:
        raise
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"The `peft` block {values!r} is refused by peft: {problem}") from problem
