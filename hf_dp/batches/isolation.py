"""Read and collate each row as if no other row had been there before.

A data collator, a transform and ``__getitem__`` are the user's code. What one row leaves behind for
the next (a counter, the state of a generator) would reach other examples unclipped. So attributes,
closures and defaults are put back after each row, and generators are seeded anew. Of globals, those
are looked at that the code names. Nothing is imported, and nothing is run.
"""

from __future__ import annotations

import copy
import dis
import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from datasets import Dataset as Table
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from hf_dp.errors import DataError
from hf_dp.noise import GENERATORS, seed_in_place

logger = hf.utils.logging.get_logger(__name__)

_CONSTANT = (
    type(None), int, float, complex, str, bytes, range, type, Enum, np.dtype, np.generic,
    torch.dtype, torch.device, types.BuiltinFunctionType, types.GenericAlias, logging.Logger,
    random.SystemRandom,
)  # fmt: skip
# Also tokenizers, processors and configurations.
_MODEL = (torch.nn.Module, Tokenizer, hf.utils.PushToHubMixin, hf.TrainingArguments)
_SHARED = (*_MODEL, Table)  # large; what is assigned to their attributes is put back
_CONTAINER = (list, tuple, dict, set, frozenset, deque)
_HARMLESS = (*_CONSTANT, *_SHARED, *GENERATORS, Dataset, tuple, frozenset, functools.partial)
_COPIED_BY = {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__"}
# Packages that keep nothing of rows in globals.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {
    "accelerate", "datasets", "hf_dp", "numpy", "peft", "PIL", "tokenizers", "torch",
    "transformers", "trl",
}  # fmt: skip
_LONG = 64  # a longer container in a data set holds its rows


class _How(NamedTuple):
    fresh: bool = True  # for each row; a global is not
    long: bool = True  # so are arrays, files and long containers
    noted: bool = True  # data sets reached so are


class Isolated:
    """A data collator, or a data set with its transform, in which no row leaves a trace.

    Args:
        root: the collator or data set, in the state that each row finds.
        has_rows: whether it is the data set, whose rows are not copied.

    Attributes:
        data: the data sets that the collator or a transform reaches.

    Raises:
        DataError: it reaches a Trainer, or holds what cannot be copied (an open file).
    """

    def __init__(self, root: Any, has_rows: bool = False):
        self.root, self._has_rows, self._kept = root, has_rows, dict[int, Any]()
        self.data, self._generators, self._slots = list[Any](), list[Any](), list[Any]()
        self._globals, name = set[str](), getattr(root, "__qualname__", type(root).__qualname__)
        self._walk(_How(long=not has_rows, noted=not has_rows))
        try:
            states = [_get(*place) if deep else None for *place, deep in self._slots]
            self._states = copy.deepcopy(states, dict(self._kept))
        except Exception as problem:
            raise DataError(
                f"Expected {name} to be copyable, since each example gets a fresh copy, but "
                f"copying failed: {problem}. Let it hold only values, tokenizers and models; open "
                "files inside the call."
            ) from problem
        if self._globals:
            logger.warning(
                f"{name} names globals that all rows share: {', '.join(sorted(self._globals))}. If "
                "it changes them, one row reaches others, and epsilon does not cover that: make "
                "them attributes or defaults, which are fresh for each row. If not, ignore this."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Isolated, (self.root, self._has_rows)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Let one row through as if it were the first, and put back afterwards what changed.

        Seeds come from Python's global generator, which is private here.
        """
        states = copy.deepcopy(self._states, dict(self._kept))
        words = [(each, _words(each)) for each in self._kept.values() if isinstance(each, _MODEL)]
        with ExitStack() as stack:
            for generator in self._generators:
                stack.callback(seed_in_place(generator, random.getrandbits(63)))
            for (holder, name, _), state, first in zip(self._slots, states, self._states):
                before = _get(holder, name)
                state = dict(before) if state is None else state
                if name == "__dict__":
                    state.update((seed, random.getrandbits(31)) for seed in _seeds(state))
                    stack.callback(self._keep_models, before, state, first)
                stack.callback(_set, holder, name, before)
                _set(holder, name, state)
            yield
        if any(_words(each) != before for each, before in words):
            raise DataError("It adds tokens to a tokenizer, which later rows see. Add them before.")

    def _keep_models(self, before: Any, after: Any, first: Any) -> None:
        """Keep a model or tokenizer that was loaded when first needed."""
        for key, value in after.items():
            if before.get(key) is None and isinstance(value, _MODEL):
                before[key] = self._kept[id(value)] = value
                if first is not None:
                    first[key] = value

    def _walk(self, how: _How) -> None:
        seen, todo = dict[Any, Any](), deque([(self.root, how)])
        while todo:
            value, how = todo.popleft()
            if isinstance(value, _CONSTANT) or (id(value), how.fresh) in seen:
                continue
            seen[id(value), how.fresh] = value
            for part in self._parts(value, how):
                # First what a data set holds itself, then what its code holds beside that.
                (todo.append if part[1].noted else todo.appendleft)(part)

    def _parts(self, value: Any, how: _How) -> Iterator[tuple[Any, _How]]:
        """Note a value, and yield what it holds, and what its code names."""
        if isinstance(value, hf.Trainer):
            raise DataError(
                "The data collator reaches a Trainer, which would carry state from one example to "
                "the next. Make the collator a function, and pass it what it needs."
            )
        if isinstance(value, (Dataset, Table)):
            self.data += [value] if how.noted else []
            how = how._replace(long=False)
        if isinstance(value, Table) and value.format["type"] == "custom":
            yield value.format["format_kwargs"]["transform"], _How()
        if isinstance(value, GENERATORS):
            self._generators.append(value)
        seeds = _seeds(getattr(value, "__dict__", {}))
        if isinstance(value, _SHARED) or seeds and not how.fresh:
            self._slots.append((value, "__dict__", False))
        if isinstance(value, (*_SHARED, *GENERATORS, types.ModuleType)):
            self._kept[id(value)] = value
        elif isinstance(value, types.MethodType):
            yield from ((value.__self__, how), (value.__func__, how))
        elif not isinstance(value, _CONTAINER):
            yield from self._object(value, how)
        elif how.long or len(value) <= _LONG:
            for item in [*value, *value.values()] if isinstance(value, dict) else value:
                yield item, how._replace(noted=how.noted or callable(item))
        elif how.fresh:
            self._kept[id(value)] = value

    def _object(self, value: Any, how: _How) -> Iterator[tuple[Any, _How]]:
        classes = type(value).__mro__[:-1]
        places = _places(value)
        # What has a way of its own to be copied (a tensor, an image) is copied as a whole.
        whole = how.long and any(_COPIED_BY & vars(each).keys() for each in classes)
        if how.fresh and (value is self.root or not whole) and (places or not how.long):
            self._kept[id(value)] = value
            self._slots += [(*place, True) for place in places]
        yield from ((_get(*place), how) for place in places)
        if isinstance(value, types.FunctionType):
            yield from self._named([value], [value.__globals__], how)
        else:
            own = [each for each in classes if not _is_of_library(each.__module__)]
            methods = [function for each in own for function in _functions(each)]
            yield from ((method, how) for method in methods)
            yield from self._named(methods, list(map(vars, own)), how)

    def _named(self, code: list[Any], spaces: list[Any], how: _How) -> Iterator[tuple[Any, _How]]:
        """Look up the names in code: globals, class attributes, and what modules so named hold."""
        code = [each for each in code if not _is_of_library(each.__module__)]
        names = set[str]().union(*(_names(each.__code__) for each in code))
        spaces += [{name: sys.modules[name] for name in names & sys.modules.keys()}]
        for space in spaces:
            for name in names & space.keys():
                value = space[name]
                if isinstance(value, types.ModuleType):
                    known = any(vars(value) is each for each in spaces)
                    if not known and not _is_of_library(value.__name__):
                        spaces.append(vars(value))
                elif isinstance(value, (type, types.FunctionType)):
                    near = value.__module__ in {each.__module__ for each in code}
                    if near or how.fresh:
                        beyond = how._replace(fresh=how.fresh and near)
                        yield from ((each, beyond) for each in _functions(value))
                elif not hasattr(type(value), "__get__"):
                    yield value, how._replace(fresh=False, long=False)
                    rows = isinstance(value, _CONTAINER) and len(value) > _LONG and not how.long
                    if how.fresh and not rows and not isinstance(value, _HARMLESS):
                        self._globals.add(name)
        for each in dis.get_instructions(code[0]) if code and how.fresh else ():
            if each.opname == "STORE_GLOBAL":
                self._globals.add(each.argval)


def _names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _functions(value: Any) -> list[types.FunctionType]:
    """Return a function, or those of a class, also of its properties, static and class methods."""
    members = vars(value).values() if isinstance(value, type) else [value]
    found = (getattr(each, "__func__", getattr(each, "fget", each)) for each in members)
    return [each for each in found if isinstance(each, types.FunctionType)]


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _words(value: Any) -> int:
    value = getattr(value, "tokenizer", value)  # of a processor
    return len(value) if isinstance(value, hf.PreTrainedTokenizerBase) else 0


def _seeds(attributes: dict[str, Any]) -> list[str]:
    return [key for key, each in attributes.items() if key.endswith("seed") and type(each) is int]


def _places(value: Any) -> list[tuple[Any, str]]:
    """Return where the state of an object is: holders with the name of an attribute each."""
    if isinstance(value, functools.partial):
        return [(value, "")]
    if isinstance(value, types.FunctionType):
        cells = [each for each in value.__closure__ or () if each != types.CellType()]
        held = [n for n in ("__defaults__", "__kwdefaults__", "__dict__") if getattr(value, n)]
        return [(cell, "cell_contents") for cell in cells] + [(value, name) for name in held]
    slots = [name for each in type(value).__mro__ for name in vars(each).get("__slots__", ())]
    return [(value, name) for name in ("__dict__", *slots) if _is_writable(value, name)]


def _is_writable(holder: Any, name: str) -> bool:
    try:
        _set(holder, name, _get(holder, name))
    except (AttributeError, TypeError):  # not so for files
        return False
    return True


def _get(holder: Any, name: str) -> Any:
    return getattr(holder, name) if name else holder.__reduce__()[2]  # of functools.partial


def _set(holder: Any, name: str, value: Any) -> None:
    object.__setattr__(holder, name, value) if name else holder.__setstate__(value)
