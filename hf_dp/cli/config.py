"""Read flat YAML and the command line into dataclasses.

The command line wins, and an unknown key is an error.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib.util
import re
import types
import typing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, cast

import yaml
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_dp.cli.argument_groups import PRIVACY
from hf_dp.errors import ConfigError, HfDpError


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as YAML 1.2 does; PyYAML's own loader takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises: yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_yaml(path: str) -> dict[str, Any]:
    """Return the keys of one configuration file. Raises: ConfigError."""
    try:
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(
            f"The configuration file {path!r} cannot be read: {problem.strerror}. Give --config "
            "the path of a YAML file."
        ) from problem
    except yaml.YAMLError as problem:
        raise ConfigError(
            f"The configuration file {path!r} is not valid YAML: {problem}"
        ) from problem
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            f"The configuration file {path!r} must be a mapping of names to values, got a "
            f"{type(values).__name__}. Write lines like `learning_rate: 1e-3`."
        )
    return values


def parse(
    dataclass_types: Sequence[type],
    values: dict[str, Any],
    words: Sequence[str],
    *,
    prog: str,
    extra: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Return instances of the dataclasses, from YAML ``values`` and command-line ``words``.

    The words win. Numbers that stand as text are converted.

    Args:
        prog: the command's name, for its usage line.
        extra: keys of ``values`` that are none of the dataclasses'.

    Raises:
        ConfigError: unknown keys, each with the nearest known one, or a value of another kind.
        SystemExit: a wrong word, which argparse reports.
    """
    from transformers import HfArgumentParser, TrainingArguments

    hints = {name: hint for cls in dataclass_types for name, hint in _hints(cls).items()}
    check_keys(values, {*hints, *extra})
    check_words(words, set(hints))
    defaults = {name: value for name, value in values.items() if name in hints}
    for name, value in defaults.items():
        if isinstance(value, str) and str(hints[name]).startswith("list"):
            defaults[name] = [value]  # one value of a list need not be written as one
        if value is False and name.endswith("_strategy"):
            defaults[name] = "no"  # which YAML reads as a truth value
    for cls in dataclass_types:
        if not issubclass(cls, TrainingArguments):  # those check their own
            for name in defaults.keys() & _hints(cls).keys():
                defaults[name] = checked(name, defaults[name], hints[name])
    parser = HfArgumentParser(cast(Any, dataclass_types), prog=prog, allow_abbrev=False)
    parser.set_defaults(**defaults)
    for action in parser._actions:
        if action.dest in defaults:
            action.required = False
        if {dict, str} <= set(typing.get_args(hints.get(action.dest))):
            action.type = _block_or_text
    try:
        return parser.parse_args_into_dataclasses(args=list(words), args_file_flag=None)
    except HfDpError:
        raise
    except ValueError as problem:
        raise ConfigError(
            f"{str(problem).splitlines()[0]} See `hf-dp train --help-all` for all keys."
        ) from problem


def _block_or_text(word: str) -> Any:
    """Return the block that a word like ``{template: ...}`` writes in YAML, or the word."""
    if not word.startswith("{"):
        return word
    try:
        return load_yaml(word)
    except yaml.YAMLError as problem:
        message = f"{word!r} is not valid YAML: {problem}"
        raise argparse.ArgumentTypeError(message) from problem


def _hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's arguments, resolved."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls) if field.init}


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return a YAML value if it fits an annotation; convert numbers where a float is expected.

    Raises: ConfigError naming the key, its value and the kind that was expected.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, (str, int)) and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(value)  # 1e-3 is text to YAML, and 1 an integer
    try:
        validate_typed_dict(TypedDict("Value", {name: hint}), {name: value})  # type: ignore
    except StrictDataclassFieldValidationError as problem:
        words = [str(kind) if typing.get_args(kind) else kind.__name__ for kind in kinds]
        expected = " or ".join(word for word in words if word != "NoneType")
        expected = expected.replace("str", "text").replace("dict", "a block")
        raise ConfigError(
            f"Expected `{name}` to be {expected}, got {value!r}. Change it in the configuration "
            "file."
        ) from problem
    return value


def check_keys(
    values: Iterable[str], known: set[str], what: str = "configuration key", prefix: str = ""
) -> None:
    """Raise ConfigError for every key of ``values`` that is not in ``known``."""
    problems = []
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean `{prefix}{near[0]}`?)" if near else ""
            problems.append(f"`{prefix}{key}`{hint}")
    if problems:
        raise ConfigError(
            f"Unknown {what} {', '.join(problems)}. See `hf-dp train --help-all` for all keys."
        )


def check_words(words: Sequence[str], known: set[str]) -> None:
    """Raise ConfigError for every option among the words that sets none of the ``known`` keys."""
    given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    switches = {"help", *(f"no_{name}" for name in known)}
    unknown = [name for name in given if name.replace("-", "_") not in known | switches]
    check_keys(unknown, known, "option", "--")


@functools.cache
def training_arguments() -> frozenset[str]:
    """Return the names of the training arguments. Those of transformers are read from its source:
    to import it takes seconds, in which a misspelled key would wait."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    source = Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8")
    theirs = {
        each.target.id
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef) and cls.name == "TrainingArguments"
        for each in cls.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not each.target.id.startswith("_")
    }
    return frozenset(theirs | {own.name for group in PRIVACY for own in dataclasses.fields(group)})


def check_early(
    values: dict[str, Any], words: Sequence[str], arguments: Sequence[type], training: bool = True
) -> None:
    """Raise ConfigError for keys and options that no argument of a task has, before transformers is
    imported.

    Args: arguments: the dataclasses of the task. training: whether the words may train.
    """
    own = {field.name for cls in arguments for field in dataclasses.fields(cls)}
    known = own | training_arguments()
    check_keys(values, {*known, "task", "peft", "card"})
    check_words(words, known if training else own)


def check_recipe(values: dict[str, Any]) -> None:
    """Raise ConfigError for keys of a recipe that its task does not have."""
    from hf_dp.cli.tasks import DEFAULT_TASK, training_module

    check_early(values, (), training_module(values.get("task", DEFAULT_TASK)).ARGUMENTS)


def peft_config(values: dict[str, Any] | None) -> Any:
    """Return a PEFT config from a YAML block ``{peft_type: lora, r: 8, ...}``, or None.

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
        raise ConfigError(
            f"The `peft` block {values!r} is refused by peft: {problem} See the options of peft's "
            f"{methods[method].__name__}."
        ) from problem


def card_block(values: Any) -> dict[str, Any]:
    """Return what the YAML block ``card: {license: mit, language: en, ...}`` says of the card.

    Raises: ConfigError for an unknown key; InvalidArgumentError for what the Hub would refuse.
    """
    if not values:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"Expected `card` to be a block like {{license: mit, language: en}}, got {values!r}."
        )
    from hf_dp.cards.details import SETTABLE, CardDetails

    check_keys(values, set(SETTABLE))
    CardDetails().with_given(**values)
    return dict(values)
