"""Read and collate each row as if no other row had been there before.

A data collator, a transform and ``__getitem__`` are the user's code. What one row leaves behind for
the next (a counter, the state of a generator) would reach other examples unclipped. So each row
gets a copy of what the code holds, from one snapshot, and what it binds elsewhere is put back.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
import transformers as hf
from datasets import Dataset as Table
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from hf_dp.errors import DataError, SharedStateError
from hf_dp.noise import GENERATORS, seed_in_place

logger = hf.utils.logging.get_logger(__name__)

# Also processors and configurations.
_MODEL = (torch.nn.Module, Tokenizer, hf.utils.PushToHubMixin, hf.TrainingArguments, Table)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range)
_CONSTANT = (
    *_ATOMS, type, Enum, np.dtype, np.generic, torch.dtype, torch.device, types.GenericAlias,
    types.ModuleType, types.CodeType, type(logger),
)  # fmt: skip
_CACHED = type(functools.cache(len))
_PARTS = {  # of what stands for functions
    staticmethod: ("__func__",), classmethod: ("__func__",), property: ("fget", "fset", "fdel"),
    types.MethodType: ("__func__", "__self__"), types.BuiltinFunctionType: ("__self__",),
}  # fmt: skip
_REBUILT = (tuple, frozenset, staticmethod, classmethod, property, types.MethodType)
_FUNCTIONS = (types.FunctionType, functools.partial, staticmethod, classmethod, property)
# Packages that keep nothing of rows in globals.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {
    "accelerate", "datasets", "hf_dp", "numpy", "peft", "PIL", "tokenizers", "torch",
    "torchvision", "transformers", "trl",
}  # fmt: skip
_LONG = 64  # a longer container in a data set holds its rows
_NONE = object()  # no value; in a snapshot, a seed that is drawn when it is loaded

Space = dict[str, object] | type  # where names are bound to values
_Words = hf.PreTrainedTokenizerBase


class _Copies(pickle.Unpickler):
    """Loads what an ``Isolated`` dumped; ``get`` returns what stands for a key."""

    # A method, since Python 3.13.0 lets nobody set it (CPython issue 125631).
    def __init__(self, file: io.BytesIO, get: Callable[[int], object]):
        super().__init__(file)
        self._get = get

    def persistent_load(self, key: int) -> object:
        return self._get(key)


class Isolated(pickle.Pickler):
    """A data collator, or a data set (``has_rows``), in which no row leaves a trace. ``data`` has
    the data sets that it reaches. DataError: for a Trainer, and what cannot be copied (an open
    file)."""

    def __init__(self, root: object, has_rows: bool = False, _steps: bool = True):
        super().__init__(file := io.BytesIO())
        self.data, self._root, self._rows, self._steps = list[object](), root, has_rows, _steps
        self._made_of, self._named = (root, has_rows), set[str]()
        self._shared, self._spaces = dict[int, object](), dict[int, Space]()
        self._words, self._classes = set[str](), dict[type, None]()
        self._objects, self._generators = list[object](), list[object]()
        self._seeds, self._growing = list[tuple[Space, str]](), list[Any]()
        self._todo = list[tuple[Space, str, bool, bool]]()
        name = getattr(root, "__qualname__", type(root).__qualname__)
        self._add({name: root}, name, copied=True)
        for space, key, rows, copied in self._todo:  # grows
            self._rows, self._copied, self._top = rows, copied, _vars(space)[key]
            end, memo = file.tell(), self.memo.copy()
            try:
                self.dump(self._top)
            except DataError:
                raise
            except Exception as problem:
                if copied:
                    raise DataError(
                        f"Expected {name} to be copyable, since each example gets a fresh copy, "
                        f"but copying failed: {problem}. Let it hold only values, tokenizers and "
                        "models; open files inside the call."
                    ) from problem
            if not copied:  # only looked at
                file.truncate(file.seek(end))
                self.memo = memo
        self._rows, self._copied = False, True
        self.dump(self._objects)
        self._fresh = [(space, key) for space, key, _, copied in self._todo if copied]
        self._snapshot, self._late = file.getvalue(), [dict[str, object]() for _ in self._objects]
        self._set = [{n for n, v in vars(each).items() if v is not None} for each in self._objects]
        if has_rows and _steps:  # what a data set holds beside its steps are its own rows
            own = Isolated(root, has_rows, _steps=False).data
            self.data = [each for each in self.data if all(each is not row for row in own)]
        if self._named and _steps:
            logger.warning(
                f"{name} names globals that all rows share: {', '.join(sorted(self._named))}. If "
                "it changes them, one row reaches others, and epsilon does not cover that: make "
                "them attributes or defaults, which are fresh for each row. If not, ignore this."
            )

    def __reduce__(self) -> tuple[object, ...]:
        return Isolated, self._made_of

    @contextmanager
    def fresh(self) -> Iterator[Any]:
        """Yield the copy for one row, with seeds from Python's global generator, which is private
        here; put back afterwards what it bound elsewhere."""
        before = [(space, dict(_vars(space))) for space in self._spaces.values()]
        sizes = [*map(len, self._growing)]
        undo = [seed_in_place(each, random.getrandbits(63)) for each in self._generators]
        load = _Copies(io.BytesIO(self._snapshot), self._get)
        try:
            for space, name in self._fresh:
                _put(space, name, load.load())
            for space, name in self._seeds:
                _put(space, name, random.getrandbits(31))
            for each, late in zip(objects := load.load(), self._late):
                vars(each).update(late)
            root, name = self._fresh[0]
            yield _vars(root)[name]
        finally:
            for space, old in before:
                new = _vars(space)
                if len(new) == len(old) and all(map(operator.is_, new.values(), old.values())):
                    continue
                for name in {*new, *old}:
                    value, was = new.get(name, _NONE), old.get(name, _NONE)
                    if old.get(name) is None and isinstance(value, _MODEL):
                        self.persistent_id(value)  # loaded when first needed
                    elif value is not was and name[:2] != "__":
                        _put(space, name, was)
            for back in undo:
                back()
            # Not put back. Also where the row fails otherwise: the tokens stay.
            if any(len(each) != size for each, size in zip(self._growing, sizes)):
                why = "It adds tokens to a tokenizer, or rows to a data set, which later rows see. "
                raise SharedStateError(f"{why}Add them beforehand.")
        for each, late, known in zip(objects, self._late, self._set):
            for name, value in vars(each).items():
                if isinstance(value, _MODEL) and name not in known:  # loaded when first needed
                    self.persistent_id(late.setdefault(name, value))

    def _get(self, key: int) -> object:
        return self._shared[key] if key else random.getrandbits(31)

    def persistent_id(self, value: object) -> int | None:
        """Return the key of what all rows share, None for what is copied."""
        if type(value) in _ATOMS or value is _NONE or id(value) in self._shared:
            return None if type(value) in _ATOMS else 0 if value is _NONE else id(value)
        step = callable(value) and not isinstance(value, type) and value is not self._top
        if step and not self._steps:
            return 0
        if isinstance(value, hf.Trainer):
            raise DataError(
                "The data collator refers to a Trainer, which would carry state from one example "
                "to the next. Make the collator a function, and pass it what it needs."
            )
        if isinstance(value, GENERATORS):
            self._generators.append(value)
        if isinstance(value, (Dataset, Table)) and all(each is not value for each in self.data):
            self.data.append(value)
        if isinstance(value, Table) and value.format["type"] == "custom" and self._steps:
            self._add(value.format["format_kwargs"], "transform", copied=True)
        if isinstance(value, _MODEL) and hasattr(value, "__dict__"):
            self._spaces[id(vars(value))] = vars(value)
            words = getattr(value, "tokenizer", value)  # of a processor
            self._growing += [words] if isinstance(words, _Words) else []
        rows = [*vars(value).values()] if isinstance(value, Dataset) else []
        for each in filter(self._is_row, rows + [value] * (self._rows or not self._copied)):
            self._shared[id(each)] = each
            self._growing += [each] if isinstance(each, (list, dict, set)) else []
            self._add({"": getattr(each, "__dict__", None)}, "")
        if isinstance(value, _CACHED) and _is_own(value, value):
            self._named.add(value.__name__)
            self._add({"": value.__wrapped__}, "")
        if not isinstance(value, _REBUILT) and _is_shared(value):
            self._shared[id(value)] = value
        if isinstance(value, (type, types.FunctionType)):
            self._look_up(value)
        return id(value) if id(value) in self._shared else None

    def _is_row(self, value: object) -> bool:
        """Return whether rows of a data set share a value: arrays, files and long containers."""
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            return value is self._root or len(value) > _LONG
        taken_apart = (Dataset, types.CellType, types.FunctionType, functools.partial, *_PARTS)
        kept = isinstance(value, taken_apart) or value is self._root or _is_shared(value)
        return not kept and _is_whole(value)

    def reducer_override(self, value: object) -> Any:
        """Take functions apart, and let seeds be drawn when objects are loaded."""
        if isinstance(value, types.CellType):
            state = {} if value == types.CellType() else {"cell_contents": value.cell_contents}
            return types.CellType, (), state, None, None, _fill
        if isinstance(value, types.FunctionType):
            self._shared[id(value.__globals__)] = value.__globals__
            parts = (value.__code__, value.__globals__, value.__name__, None, value.__closure__)
            state = {n: getattr(value, n) for n in ("__defaults__", "__kwdefaults__", "__dict__")}
            return types.FunctionType, parts, state, None, None, _fill
        if type(value) in _PARTS and not isinstance(value, types.BuiltinFunctionType):
            return type(value), tuple(getattr(value, name) for name in _PARTS[type(value)])
        if isinstance(value, functools.partial) or not hasattr(value, "__dict__"):
            return NotImplemented
        own = value is self._root or isinstance(value, Dataset)
        plain = (object.__new__, (type(value),), vars(value))
        made = plain if own and _is_whole(value) else value.__reduce_ex__(4)
        if len(made) > 2 and isinstance(made[2], dict):
            seeds = [k for k, each in made[2].items() if k.endswith("seed") and type(each) is int]
            made = (*made[:2], made[2] | dict.fromkeys(seeds, _NONE), *made[3:])
            if self._copied:
                self._objects.append(value)
            elif seeds:
                self._spaces[id(vars(value))] = vars(value)
                self._seeds += [(vars(value), key) for key in seeds]
        return made

    def _look_up(self, code: type | types.FunctionType) -> None:
        """Look up what the code of a function or class of the user's own names. What it names may
        be an attribute of any class whose objects it is given."""
        own = [each for each in getattr(code, "__mro__", [code]) if _is_own(each, each)]
        names = set[str]().union(*map(_names, own))
        self._words |= names
        self._classes |= dict.fromkeys(each for each in own if isinstance(each, type))
        imported: Space = {name: sys.modules[name] for name in names & sys.modules.keys()}
        spaces: list[Space] = [*(getattr(each, "__globals__", each) for each in own), imported]
        spaces += [each for each in self._classes if each not in own]
        for space in spaces:  # grows
            if space is not imported:
                self._spaces[id(space)] = space
            for name in (self._words if isinstance(space, type) else names) & _vars(space).keys():
                each = _vars(space)[name]
                known = isinstance(each, (types.ModuleType, type, _CACHED, *_FUNCTIONS))
                if known and not _is_own(each, code):
                    continue
                if isinstance(each, (types.ModuleType, type)):
                    beyond = each if isinstance(each, type) else vars(each)
                    spaces += [beyond] * all(beyond is not other for other in spaces)
                self._add(space, name)

    def _add(self, space: Space, name: str, copied: bool = False) -> None:
        """Let a value be looked at, or be a copy for each row."""
        if any(space is other and name == key for other, key, *_ in self._todo):
            return
        value, rows = _vars(space)[name], self._rows and name != "transform"
        shared = _is_shared(value) or isinstance(value, Dataset)
        copied = copied or not shared and isinstance(value, _FUNCTIONS)
        self._todo.append((space, name, rows, copied))
        if copied:
            self._spaces[id(space)] = space
        descriptor = isinstance(space, type) and hasattr(type(value), "__get__")
        if name and not (copied or shared or descriptor or rows and self._is_row(value)):
            self._named.add(name)


def _is_shared(value: object) -> bool:
    """Return whether nothing in a value could change that would have to be fresh."""
    if isinstance(value, types.FunctionType):
        held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        kept = value.__dict__ or {*value.__code__.co_freevars} - {"__class__"}
        return not kept and all(isinstance(each, _CONSTANT) for each in held)
    if type(value) in _PARTS:
        return all(_is_shared(getattr(value, name)) for name in _PARTS[type(value)])
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_shared, value))
    if isinstance(value, torch.nn.Module):  # one without weights is a transform
        return any(True for _ in value.parameters())
    return type(value) is object or isinstance(value, (*_CONSTANT, *_MODEL, *GENERATORS, _CACHED))


def _is_whole(value: object) -> bool:
    """Return whether an object has a way of its own to be copied, or none."""
    ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    try:
        plain = all(getattr(type(value), way) is getattr(object, way) for way in ways)
        return not (plain and value.__reduce_ex__(4))
    except TypeError:
        return True


def _names(value: type | types.FunctionType) -> set[str]:
    """Return the names in the code of a function or class, and those of a class's functions."""
    members = dict(vars(value)) if isinstance(value, type) else {value.__name__: value}
    members.pop("__annotate_func__", None)  # since Python 3.14; no row runs annotations
    names = {name for name, each in members.items() if isinstance(each, (*_FUNCTIONS, _CACHED))}
    code = [getattr(each, "__func__", getattr(each, "fget", each)) for each in members.values()]
    for each in code:  # grows
        each = getattr(each, "__code__", each)
        names.update(getattr(each, "co_names", ()))
        code += getattr(each, "co_consts", ())
    return names - {*dir(type)} | names & {"__call__"}


def _module(value: object) -> str:
    value = getattr(value, "func", value)  # of a partial
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    return str(
        getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
    )


def _is_own(value: object, beside: object) -> bool:
    """Return whether code or a module is the user's: not installed, or beside what names it."""
    module, home = _module(value), _module(beside)
    file, top = getattr(sys.modules.get(module), "__file__", None), module.partition(".")[0]
    near = top == home.partition(".")[0] or "-packages" not in str(file)
    return near and top not in _LIBRARIES


def _vars(space: Space) -> Mapping[str, object]:
    return vars(space) if isinstance(space, type) else space


def _put(space: Space, name: str, value: object) -> None:
    if isinstance(space, type):
        delattr(space, name) if value is _NONE else setattr(space, name, value)
    elif value is _NONE:
        del space[name]
    else:
        space[name] = value


def _fill(value: object, state: dict[str, object]) -> None:
    for name, each in state.items():
        object.__setattr__(value, name, each)
