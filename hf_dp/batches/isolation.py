"""Call a function each time as if it had never been called before.

A data collator is the user's code. If one call can leave something behind for the next (a counter,
a cache, the state of a generator), one example reaches another without any clipping. So each call
runs on a fresh copy of all mutable state that the function can reach: its attributes, its closure,
its defaults, and the globals and class attributes that code outside installed packages reads.
Generators in that state are replaced by secretly seeded ones.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import importlib
import logging
import random
import re
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    FeatureExtractionMixin,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils.logging import get_logger

from hf_dp.errors import DataError

logger = get_logger(__name__)

_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    enum.Enum,
    re.Pattern,
    PurePath,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.GenericAlias,
    np.dtype,
    np.generic,
    torch.dtype,
    torch.device,
)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Large objects that all calls share, if a library defines their class; the user's are copied.
_SHARED_IF_INSTALLED = (
    nn.Module,
    PreTrainedTokenizerBase,
    Tokenizer,
    ProcessorMixin,
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PretrainedConfig,
    TrainingArguments,
    logging.Logger,
    Dataset,
    datasets.Dataset,
    datasets.DatasetDict,
)
_DATA = (Dataset, datasets.Dataset, datasets.DatasetDict)
_CACHED = type(functools.lru_cache(lambda: None))
_SLOW = 5e-3  # a copy that takes more seconds is warned about


class _Empty(enum.Enum):
    """What an unassigned place holds."""

    EMPTY = enum.auto()


class _Slot(NamedTuple):
    """A place outside the function's own attributes that can hold state.

    It is an attribute or an item of ``holder``.
    """

    holder: Any
    key: str
    is_item: bool = False

    def get(self) -> Any:
        try:
            return self.holder[self.key] if self.is_item else getattr(self.holder, self.key)
        except (KeyError, ValueError, AttributeError):
            return _Empty.EMPTY

    def set(self, value: Any) -> None:
        if value is not _Empty.EMPTY:
            if self.is_item:
                self.holder[self.key] = value
            else:
                setattr(self.holder, self.key, value)
        elif self.get() is not _Empty.EMPTY:
            if self.is_item:
                del self.holder[self.key]
            else:
                delattr(self.holder, self.key)


class Isolated:
    """A callable whose calls share no state.

    All calls share what is too large to copy: models, stock tokenizers and processors, data sets.
    Attributes that a call sets on them are undone. State that compiled code, installed packages or
    files keep is out of reach; the privacy statement says so.

    Args:
        function: any callable. Its state is copied now, so later changes have no effect.

    Attributes:
        data: the data sets that it reaches.

    Raises:
        DataError: state cannot be copied (an open file, a running generator), or, from a call, the
            call changed the vocabulary of a tokenizer.
    """

    def __init__(self, function: Callable[..., Any]):
        self._original = function
        reach = _Reach()
        reach.visit(function)
        self.data = tuple(reach.data)
        self._slots = tuple(reach.slots)
        try:
            self._state = copy.deepcopy(
                (function, [slot.get() for slot in self._slots]), _memo(reach)
            )
        except Exception as problem:
            raise DataError(
                f"Expected the data collator {_name(function)} to be copyable, since each example "
                f"gets a fresh copy, but copying failed: {problem}. Let it hold only values, "
                "tokenizers and models; open files and start generators inside the call."
            ) from problem
        self._reach = _Reach()
        for value in (self._state[0], *self._state[1]):
            self._reach.visit(value)
        start = time.perf_counter()
        copy.deepcopy(self._state, _memo(self._reach))
        if (seconds := time.perf_counter() - start) > _SLOW:
            logger.warning(
                "Copying the state of %s takes %.0f ms, and each example gets a copy. Reduce it: "
                "keep tables as tensors or strings, or do the work in the data set beforehand.",
                _name(function),
                1000 * seconds,
            )

    def __call__(self, *args: Any) -> Any:
        memo = _memo(self._reach)
        function, values = copy.deepcopy(self._state, memo)
        # A collator with a seed of its own would make a public generator from it.
        for holder in self._reach.seeded:
            object.__setattr__(memo.get(id(holder), holder), "seed", random.getrandbits(31))
        with (
            _swapped(self._slots, values),
            _without_new_attributes(self._reach.classes),
            _as_it_was(self._reach.shared),
        ):
            return function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Isolated, (self._original,)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


@contextmanager
def _swapped(slots: tuple[_Slot, ...], values: list[Any]) -> Iterator[None]:
    originals = [slot.get() for slot in slots]
    try:
        for slot, value in zip(slots, values, strict=True):
            slot.set(value)
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.set(original)


@contextmanager
def _without_new_attributes(classes: dict[type, frozenset[str]]) -> Iterator[None]:
    """Remove, afterwards, attributes that the classes did not have."""
    try:
        yield
    finally:
        for cls, names in classes.items():
            for name in vars(cls).keys() - names:
                delattr(cls, name)


@contextmanager
def _as_it_was(shared: list[Any]) -> Iterator[None]:
    """Undo, afterwards, what was assigned to attributes of shared objects.

    Raises: DataError when the vocabulary of a tokenizer grew, which cannot be undone.
    """
    attributes = [(each, dict(vars(each))) for each in shared if hasattr(each, "__dict__")]
    sizes = [(each, len(each)) for each in shared if isinstance(each, PreTrainedTokenizerBase)]
    try:
        yield
    finally:
        for each, before in attributes:
            if _rebound(vars(each), before):
                vars(each).clear()
                vars(each).update(before)
        if any(len(each) != size for each, size in sizes):
            raise DataError(
                "the data collator adds tokens to the tokenizer, which later rows would see. Add "
                "them before training."
            )


def _rebound(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) != len(before) or any(
        now.get(name, now) is not value for name, value in before.items()
    )


def _memo(reach: _Reach) -> dict[int, Any]:
    """Return deepcopy's memo of what is not copied: shared objects stay, generators are new."""
    memo = {id(value): value for value in (*reach.shared, *reach.modules)}
    memo.update({id(cached): _without_results(cached) for cached in reach.cached})
    memo.update({id(generator): _reseeded(generator) for generator in reach.generators})
    return memo


def _without_results(cached: Any) -> Any:
    """Return an empty cache around the same function."""
    return functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)


def _reseeded(generator: Any) -> Any:
    """Return a generator of the same kind with a fresh, secret seed.

    The seed comes from Python's global generator, which is private here.
    """
    seed = random.getrandbits(63)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)(seed))
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed)
    return type(generator)(seed)


class _Reach:
    """What a callable reaches: shared objects, generators, seeded objects and slots with state."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        self.data: list[Any] = []
        self.modules: list[Any] = []
        self.cached: list[Any] = []
        self.generators: list[Any] = []
        self.seeded: list[Any] = []
        self.slots: list[_Slot] = []
        self.classes: dict[type, frozenset[str]] = {}
        self._seen: dict[int, Any] = {}
        self._modules_seen: set[tuple[int, int]] = set()

    def visit(self, value: Any) -> None:
        if isinstance(value, type):
            self._classes_of(value)
        # A module that an attribute or a closure holds is not copied.
        if isinstance(value, types.ModuleType):
            self.modules.append(value)
        if id(value) in self._seen or isinstance(value, _IMMUTABLE):
            return
        if isinstance(value, Trainer):
            raise DataError(
                "The data collator reaches a Trainer, which cannot be copied for each example and "
                "so would carry state from one to the next. Make the collator a function, and pass "
                "it what it needs."
            )
        self._seen[id(value)] = value
        if isinstance(value, _DATA):
            self.data.append(value)
        if isinstance(value, _CACHED):
            self.cached.append(value)
            self.visit(value.__wrapped__)
        elif isinstance(value, _GENERATORS):
            self.generators.append(value)
        elif _is_shared(value):
            self.shared.append(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__)
            self.visit(value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(part)
        else:
            self._object(value)

    def _function(self, function: types.FunctionType) -> None:
        """Visit what a function reads beside its arguments.

        Functions themselves are not copied, so these places are slots.
        """
        # `nonlocal` can assign to a cell, so it holds state whatever is in it.
        for cell in function.__closure__ or ():
            self._slot(_Slot(cell, "cell_contents"), assigned=True)
        for name in ("__defaults__", "__kwdefaults__"):
            self._slot(_Slot(function, name))
        if not _is_installed(function.__module__):
            self._slot(_Slot(function, "__dict__"), assigned=True)
            for name, assigned in sorted(_globals_used(function.__code__).items()):
                self._slot(_Slot(function.__globals__, name, is_item=True), assigned)
                self._module(function.__globals__.get(name), function.__code__)
            # Modules that an import statement inside the function loads.
            for name in sorted(_imported(function.__code__)):
                self._module(_module_named(name), function.__code__)

    def _object(self, value: Any) -> None:
        if isinstance(value, Mapping):
            for item in (*value.keys(), *value.values()):
                self.visit(item)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                self.visit(item)
        attributes = getattr(value, "__dict__", {})
        if isinstance(attributes.get("seed"), int) and not isinstance(attributes["seed"], bool):
            self.seeded.append(value)
        for item in attributes.values():
            self.visit(item)
        for cls in type(value).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if hasattr(value, name):
                    self.visit(getattr(value, name))
        self._classes_of(type(value))

    def _module(self, module: Any, code: types.CodeType) -> None:
        """Visit the globals that code may reach through one of the user's modules."""
        if not isinstance(module, types.ModuleType) or _is_installed(module.__name__):
            return
        if (id(module), id(code)) in self._modules_seen:
            return
        self._modules_seen.add((id(module), id(code)))
        for name in sorted(_names(code) & vars(module).keys()):
            self._slot(_Slot(module, name), assigned=True)
            self._module(getattr(module, name), code)  # package.module.name

    def _classes_of(self, cls: type) -> None:
        for each in cls.__mro__:
            if not _is_installed(each.__module__):
                self._class(each)

    def _class(self, cls: type) -> None:
        """Visit the methods and attributes of one of the user's classes."""
        if cls in self.classes:
            return
        self.classes[cls] = frozenset(vars(cls))
        for name, member in list(vars(cls).items()):
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(function, types.FunctionType):
                self.visit(function)
            elif isinstance(function, _CACHED):
                self._slot(_Slot(cls, name))
            elif not name.startswith(("__", "_abc_")) and not hasattr(type(member), "__get__"):
                self._slot(_Slot(cls, name), assigned=True)

    def _slot(self, slot: _Slot, assigned: bool = False) -> None:
        """Note a place whose value holds state, or to which code may assign another."""
        value = slot.get()
        if assigned or _holds_state(value):
            self.slots.append(slot)
        self.visit(value)


def _holds_state(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(_holds_state(item) for item in value)
    return not (isinstance(value, (*_IMMUTABLE, types.FunctionType)) or _is_shared(value))


def _is_shared(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return all(_is_installed(type(module).__module__) for module in value.modules())
    return isinstance(value, _SHARED_IF_INSTALLED) and _is_installed(type(value).__module__)


@functools.cache
def _globals_used(code: types.CodeType) -> dict[str, bool]:
    """Return, for each global that code uses, whether the code assigns to it.

    Functions defined inside it are included, here and below.
    """
    names: dict[str, bool] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            names[each.argval] = names.get(each.argval, False) or not each.opname.startswith("LOAD")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, assigned in _globals_used(constant).items():
                names[name] = names.get(name, False) or assigned
    return names


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.cache
def _imported(code: types.CodeType) -> frozenset[str]:
    """Return the modules that code imports when it runs."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    names = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname == "IMPORT_NAME" and each.argval
    }
    return frozenset(names).union(*map(_imported, inner))


def _module_named(name: str) -> Any:
    """Return one of the user's modules, imported now if necessary.

    Return None if it belongs to a library, or if the import fails, as it then will in the call.
    """
    try:
        module = importlib.import_module(name)  # first: its file tells whose it is
    except ImportError:
        return None
    return None if _is_installed(name) else module


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, an installed package or hf_dp, not to the user."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__" or root in ("builtins", "hf_dp"):
        return True
    found = sys.modules.get(root)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), "")
    return any(
        Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")
    )
