"""Read flat YAML and the command line into dataclasses, as TRL does: the YAML file gives defaults,
the command line wins, and an unknown name is an error."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hf_dp._arguments import argument
from hf_dp._validate import invalid, one_of
from hf_dp.cli.launch import launched_processes
from hf_dp.cli.options import Parser, add_fields, check_names, given_options
from hf_dp.errors import ConfigError, HfDpError
from hf_dp.plans.dp_fp import FROZEN, PUBLISHED
from hf_dp.plans.draws import GROUP
from hf_dp.trainer.forward_arguments import ForwardArguments
from hf_dp.trainer.privacy_arguments import (
    BudgetArguments,
    MemoryArguments,
    ReleaseArguments,
    StepArguments,
)
from hf_dp.trainer.row_arguments import AuditArguments, RowArguments, UnitArguments

if typing.TYPE_CHECKING:
    from peft import PeftConfig

Recipe = dict[str, Any]  # keys of a configuration, as YAML has them
DEFAULT_TASK = "text_classification"
NON_PRIVATE = "non_private"
# With it, `hf-dp train` leaves out what only a private run reads of its file.
AS_BASELINE = ["--privacy_mode", NON_PRIVATE]
BATCH, PHYSICAL = "expected_batch_size", "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
_OF_TEXTS = (str, str | None, list[str], list[str] | None)
BLOCKS = ("task", "peft", "card")  # keys of a recipe that are no dataclass's


@dataclasses.dataclass
class LengthArguments:
    """Parameters of transformers' own that every run needs."""

    num_train_epochs: float = argument(
        3.0, "Passes over the rows: steps = epochs x rows / expected_batch_size, rounded up."
    )
    max_steps: int = argument(-1, "Number of optimizer steps, instead of epochs; -1 for none.")


# What determines epsilon, and all that is about privacy.
PLANNED = (
    BudgetArguments,
    UnitArguments,
    StepArguments,
    LengthArguments,
    ReleaseArguments,
    ForwardArguments,
)
PRIVACY = (*PLANNED, RowArguments, AuditArguments, MemoryArguments)


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number and refuses a key that stands twice, as YAML 1.2 does. PyYAML's own
    loader takes the former for text, and of the latter the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping. Raises: MarkedYAMLError for a key that stands twice."""
        node = super().compose_mapping_node(anchor)
        before = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in before:
                problem = f"the key {key.value!r} stands twice. Leave one of them out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            before.add((key.tag, str(key.value)))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_yaml(path: str) -> Recipe:
    """Return the keys of one configuration file."""
    try:
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{path!r} cannot be read: {problem.strerror}.") from problem
    except yaml.YAMLError as problem:
        raise ConfigError(f"{path!r} is not valid YAML: {problem}") from problem
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            f"The configuration file {path!r} must be a mapping of names to values, got a "
            f"{type(values).__name__}. Write lines like `learning_rate: 1e-3`."
        )
    return values


class CommandParser(Parser):
    """A parser of a command's own options; the other words are arguments of a task."""

    def __init__(self, prog: str, words: str) -> None:
        super().__init__(prog, usage=f"{prog} {words}", add_help=False, conflict_handler="resolve")
        self.add_argument("-h", "--help", action="store_true", help="show this text and exit")
        self.option("--config", "flat YAML: any argument listed here, by its name", "FILE")

    def add_task(self) -> None:
        """Add ``--task``."""
        said = f"one of the tasks above (default: {DEFAULT_TASK}); --help lists its arguments"
        self.option("--task", said, "NAME")

    def read(
        self,
        argv: Sequence[str],
        described: Callable[[str], tuple[str, str, Iterable[type]]],
        task: str = DEFAULT_TASK,
    ) -> tuple[argparse.Namespace, Recipe, list[str]]:
        """Return the command's own options, the keys of its file, and the other words; or print
        what the help says for a task: description, examples, arguments."""
        args, words = self.parse_known_args(list(argv))
        values = {} if args.config is None else read_yaml(args.config)
        values["task"] = getattr(args, "task", None) or values.get("task", task)
        if args.help or not argv:
            self.description, self.epilog, arguments = described(values["task"])
            for cls in arguments:
                add_fields(self, cls)
            self.print_help()
            raise SystemExit(0 if argv else 2)
        return args, values, words


def parse(
    kinds: Sequence[type], values: Recipe, words: Sequence[str], *, prog: str
) -> tuple[Any, ...]:
    """Return instances of the dataclasses, from YAML ``values`` and command-line ``words``.

    The words win.

    Raises: ConfigError for unknown names, and for values of another kind.
    """
    from transformers.hf_argparser import DataClassType, HfArgumentParser

    hints = hints_of(kinds)
    check_names(values, {*hints, *BLOCKS}, "configuration key")
    _check_words(words, set(hints))
    gone, words = nulls(words)
    values = fitted(values | gone, hints)
    parser = HfArgumentParser(map(DataClassType, kinds), prog=prog, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    for action in parser._actions:
        name, hint = action.dest, hints.get(action.dest)
        if {dict, str} <= set(typing.get_args(hint)):
            action.type = _block_or_text
        if name in values:
            parser.set_defaults(**{name: _as_default(values[name], hint)})
            action.required = False
    try:
        return parser.parse_args_into_dataclasses(args=list(words), args_file_flag=None)
    except HfDpError:
        raise
    except ValueError as problem:
        raise ConfigError(f"{str(problem).splitlines()[0]} See --help for all names.") from problem


def hints_of(kinds: Iterable[type]) -> dict[str, object]:
    """Return the types of the arguments of dataclasses."""
    hints: dict[str, object] = {}
    for cls in kinds:
        hints |= _hints(cls)
    return hints


@functools.cache
def _hints(cls: type) -> dict[str, object]:
    """Return the types of a dataclass's arguments; a sweep asks again for each of its runs."""
    types = typing.get_type_hints(cls)
    return {field.name: types[field.name] for field in dataclasses.fields(cls) if field.init}


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}. See --help for all names.")


def fitted(values: Recipe, hints: Mapping[str, object]) -> Recipe:
    """Return YAML values for arguments of these types. A list of texts need not be written as one,
    and nothing (``null``) is left out where an argument cannot be None: it means the default.

    Raises: InvalidArgumentError for what is no text in such a list.
    """
    found = {}
    for name, value in values.items():
        hint = hints.get(name)
        if value is None and name in hints and types.NoneType not in typing.get_args(hint):
            continue
        if value is not None and hint in (list[str], list[str] | None):
            value = [_text(name, each) for each in (value if isinstance(value, list) else [value])]
        if value is False and name.endswith("_strategy"):
            value = "no"  # which YAML reads as a truth value
        found[name] = value
    return found


def _text(name: str, value: object) -> str:
    """Return one text of a list; what YAML reads as a number is text, too."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        advice = (
            "YAML reads words like yes, no, on, off and null otherwise: put quotes around them."
        )
        raise invalid(name, value, "to hold texts", advice)
    return str(value)


def _as_default(value: object, hint: object) -> object:
    """Return a YAML value as a default of argparse, which converts and checks what is text."""
    known = type(value) in (typing.get_args(hint) or (hint,))
    return str(value) if isinstance(value, (int, float)) and not known else value


def nulls(words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Return as keys of a recipe the options whose only word is ``null``, which take a value of the
    file away; and the other words."""
    options: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--") and word != "--":
            name = word[2:].partition("=")[0].replace("-", "_")
            options.pop(name, None)  # of several, the last one counts
            options[name] = []
        options[name].append(word)
    gone = [
        name
        for name, given in options.items()
        if name and [*given[0].split("=", 1)[1:], *given[1:]] == ["null"]
    ]
    left = [word for name, given in options.items() if name not in gone for word in given]
    return dict.fromkeys(gone), left


def as_keys(words: Sequence[str], hints: Mapping[str, object] | None = None) -> Recipe:
    """Return options of a command line as keys of a recipe: numbers, truth values and blocks are
    read as in YAML, all else is text, and so is what the ``hints`` of arguments take for text;
    several words are a list, and none means True.

    Raises: ConfigError for a word that follows no option.
    """
    of_texts = {name for name, hint in (hints or {}).items() if hint in _OF_TEXTS}
    found: dict[str, list[object]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, word = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = []
            if not equals:
                continue
        if not name:
            raise ConfigError(f"Expected options like --train_file FILE, got {word!r}.")
        found[name].append(word if name in of_texts else _value(word))
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def _value(word: str) -> object:
    try:
        value = load_yaml(word)
    except yaml.YAMLError:
        return word
    plain = value is None or isinstance(value, (bool, int, float))
    return value if plain or word.startswith("{") else word


def _block_or_text(word: str) -> object:
    """Return the block that a word like ``{template: ...}`` writes in YAML, or the word."""
    try:
        return load_yaml(word) if word.startswith("{") else word
    except yaml.YAMLError as problem:
        message = f"{word!r} is not valid YAML: {problem}"
        raise argparse.ArgumentTypeError(message) from problem


def _check_words(words: Sequence[str], known: set[str]) -> None:
    """Raise ConfigError for every option among the words that sets none of the ``known`` keys."""
    check_names(
        given_options(words),
        {"config", "help", *known, *(f"no_{name}" for name in known)},
        "option",
    )


@functools.cache
def _of_transformers() -> frozenset[str]:
    """Return the names of transformers' training arguments, read from its source: to import it
    takes seconds, in which a misspelled key would wait."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    source = Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8")
    return frozenset(
        each.target.id
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef) and cls.name == "TrainingArguments"
        for each in cls.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not each.target.id.startswith("_")
    )


@functools.cache
def _of_privacy() -> frozenset[str]:
    return frozenset(own.name for group in PRIVACY for own in dataclasses.fields(group))


def private_keys() -> frozenset[str]:
    """Return the names of the arguments that only private runs read."""
    return _of_privacy() - _of_transformers() - {"privacy_mode"}


def training_arguments() -> frozenset[str]:
    """Return the names of all training arguments."""
    return _of_transformers() | _of_privacy()


def check_early(
    values: Recipe, words: Sequence[str], arguments: Iterable[type], training: bool = True
) -> None:
    """Raise ConfigError for names that no argument has, before transformers is imported."""
    own = {field.name for cls in arguments for field in dataclasses.fields(cls)}
    known = own | training_arguments()
    check_names(values, {*known, *BLOCKS}, "configuration key")
    _check_words(words, known if training else own)


def _block(name: str, values: object, example: str) -> Recipe:
    """Return a copy of a block of a recipe, empty where there is none."""
    if values and not isinstance(values, dict):
        raise ConfigError(f"Expected `{name}` to be a block like {example}, got {values!r}.")
    return dict(values) if isinstance(values, dict) else {}


def peft_config(values: object) -> PeftConfig | None:
    """Return a PEFT config from a YAML block ``{peft_type: lora, r: 8, ...}``, or None."""
    options = _block("peft", values, "{peft_type: lora, r: 8}")
    if not options:
        return None
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    import hf_dp.tuners.methods  # noqa: F401 - registers ours

    methods = {
        str(getattr(kind, "value", kind)).lower(): cls
        for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    name = one_of("peft.peft_type", str(options.pop("peft_type", "")).lower(), sorted(methods))
    method: Any = methods[name]
    check_names(
        options,
        [each.name for each in dataclasses.fields(method) if each.init],
        "configuration key",
    )
    try:
        return method(**options)
    except HfDpError:
        raise
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"The `peft` block {values!r} is refused by peft: {problem} See the options of peft's "
            f"{method.__name__}."
        ) from problem


def card_block(values: object) -> Recipe:
    """Return what the YAML block ``card: {license: mit, language: en, ...}`` says of the card."""
    found = _block("card", values, "{license: mit, language: en}")
    if found:
        from hf_dp.cards.details import SETTABLE, CardDetails

        check_names(found, SETTABLE, "configuration key")
        CardDetails().with_given(**found)
    return found


# -- `--privacy_mode non_private`: any private recipe as its own baseline ---


def as_asked(values: Recipe, words: Sequence[str]) -> Recipe:
    """Return a file's keys as the command line wants them: without privacy where it says so."""
    asked = given_options(words)
    if asked.get("privacy_mode") != NON_PRIVATE:
        return values
    kept, folder = without_privacy(values, words), folder_of(values)
    if "output_dir" not in asked and folder != values.get("output_dir"):
        kept["output_dir"] = folder
        _say(f"output_dir {folder}")
    return kept


def folder_of(values: Recipe) -> str | None:
    """Return where a recipe's run without privacy goes: a private run's folder holds its claim."""
    folder = values.get("output_dir")
    if folder is None or values.get("privacy_mode") == NON_PRIVATE:
        return folder
    return f"{str(folder).rstrip('/')}_{NON_PRIVATE}"


def without_privacy(values: Recipe, words: Sequence[str] = ()) -> Recipe:
    """Return a recipe's keys without those that only a private run reads; name these on stderr. A
    batch has nearly as many rows as the private run expects examples, unless the recipe says how
    many; and what trains is the same."""
    asked = given_options(words)
    dropped = {name: value for name, value in values.items() if name in private_keys()}
    kept = {name: value for name, value in values.items() if name not in dropped}
    kept["privacy_mode"] = NON_PRIVATE
    variant = values.get("dp_fp_variant")
    if variant == FROZEN and not values.get("peft"):
        kept["peft"] = {"peft_type": "head"}
    if variant == PUBLISHED:
        from hf_dp.trainer.forward_arguments import PUBLISHED_BATCH_SIZE, PUBLISHED_LEARNING_RATE

        dropped.setdefault(BATCH, PUBLISHED_BATCH_SIZE)
        kept.setdefault("learning_rate", PUBLISHED_LEARNING_RATE)
    if dropped:
        _say("without " + ", ".join(f"{name} {value}" for name, value in dropped.items()))
    if BATCH in dropped and ACCUMULATION not in {*asked, *kept}:
        most = _whole(PHYSICAL, asked.get(PHYSICAL) or kept.get(PHYSICAL, 8))  # as transformers
        logical = _whole(BATCH, dropped[BATCH]) * (dropped.get(GROUP) or 1)
        kept |= _batches(logical, most, most if PHYSICAL in asked else most // 2 + 1)
        if dropped.get("privacy_unit") == "user" and dropped.get("unit_sampling") != "examples":
            _say(
                f"{BATCH} counts users, and these batches rows. For as many rows as these users "
                f"have, set {PHYSICAL} and {ACCUMULATION}"
            )
    return kept


def _whole(name: str, value: Any) -> int:
    try:
        number = round(float(value))
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise invalid(name, value, "to be a whole number of at least 1")
    return number


def _batches(logical: int, most: int, least: int) -> dict[str, int]:
    """Return physical batches of ``least`` to ``most`` examples, and their number, which hold as
    nearly ``logical`` examples together as such sizes can."""
    processes = launched_processes()
    each = max(1, round(logical / processes))  # of one process
    if least < most:
        most = min(most, each)
    sizes = range(most, min(least, most) - 1, -1)
    size = min(sizes, key=lambda one: abs(one * max(1, round(each / one)) - each))
    count = max(1, round(each / size))
    _say(f"batches of {size} x {count} x {processes} processes = {size * count * processes} rows")
    return {PHYSICAL: size, ACCUMULATION: count}


def _say(text: str) -> None:
    if int(os.environ.get("RANK") or 0) == 0:  # of several processes, the main one
        print(f"{NON_PRIVATE}: {text}", file=sys.stderr)
