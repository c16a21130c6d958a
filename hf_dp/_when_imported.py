"""Import something right after a module is imported, without importing it.

``import hf_dp.accounting`` must load neither torch nor transformers, yet after ``import hf_dp`` the
Auto classes of transformers must know hf_dp's models.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(module: str, then: str) -> None:
    """Import the module ``then`` now if ``module`` is imported already, else right after it is.

    If the import of ``then`` is already under way, nothing more happens.
    """
    if module in sys.modules:
        importlib.import_module(then)
    else:
        sys.meta_path.insert(0, _Waiting(module, then))


class _Waiting(MetaPathFinder):
    def __init__(self, module: str, then: str):
        self.module, self.then = module, then
        self.looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self.looking:
            return None
        self.looking = True  # lets the other finders find the real module
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def and_then(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            importlib.import_module(self.then)

        spec.loader.exec_module = and_then  # type: ignore[method-assign]
        return spec
