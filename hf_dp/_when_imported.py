"""Run something right after a module is imported, without importing it.

``import hf_dp.accounting`` must load neither torch nor transformers, yet after ``import hf_dp`` the
Auto classes of transformers must know hf_dp's models.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def when_imported(module: str, function: str) -> None:
    """Call ``function`` now if ``module`` is imported already, else right after it is.

    Args:
        function: "module:name".
    """
    if module in sys.modules:
        _call(function)
    else:
        sys.meta_path.insert(0, _Waiting(module, function))


def _call(function: str) -> None:
    home, _, name = function.partition(":")
    getattr(importlib.import_module(home), name)()


class _Waiting(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, function: str):
        self.module, self.function = module, function
        self.looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module or self.looking:
            return None
        self.looking = True  # lets the other finders find the real module
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self)
        return spec


class _Then(importlib.abc.Loader):
    def __init__(self, loader: Any, waiting: _Waiting):
        self.loader, self.waiting = loader, waiting

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        sys.meta_path.remove(self.waiting)
        _call(self.waiting.function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # get_source, get_data: for tracebacks and inspect
