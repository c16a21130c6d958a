"""Differentially private fine-tuning for Hugging Face models.

Public names, each loaded when first used, so that ``import hf_dp.accounting`` needs neither torch
nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_dp._version import __version__ as __version__

if TYPE_CHECKING:
    from hf_dp.accounting import Ledger as Ledger
    from hf_dp.clipping import ClippingEngine as ClippingEngine
    from hf_dp.mechanisms import mechanism_for as mechanism_for
    from hf_dp.plans import DpSgdPlan as DpSgdPlan
    from hf_dp.plans import FrozenPlan as FrozenPlan
    from hf_dp.plans import PrivacyPlan as PrivacyPlan
    from hf_dp.plans import PrivateEncoderPlan as PrivateEncoderPlan
    from hf_dp.plans import PublishedPlan as PublishedPlan
    from hf_dp.plans.dp_sgd import NoisedLoss as NoisedLoss
    from hf_dp.publishing.hub import publish as publish
    from hf_dp.run.private_run import PrivateRun as PrivateRun
    from hf_dp.statement.statement import PrivacyStatement as PrivacyStatement
    from hf_dp.streams.shards import shard as shard
    from hf_dp.trainer.arguments import DPTrainingArguments as DPTrainingArguments
    from hf_dp.trainer.publishing import save_run as save_run
    from hf_dp.trainer.seq2seq import DPSeq2SeqTrainer as DPSeq2SeqTrainer
    from hf_dp.trainer.seq2seq import DPSeq2SeqTrainingArguments as DPSeq2SeqTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer as DPTrainer
    from hf_dp.tuners.methods import AdapterConfig as AdapterConfig
    from hf_dp.tuners.methods import BitFitConfig as BitFitConfig
    from hf_dp.tuners.methods import FrostConfig as FrostConfig
    from hf_dp.tuners.methods import HeadConfig as HeadConfig
    from hf_dp.tuners.methods import ParamConfig as ParamConfig
    from hf_dp.tuners.methods import PvalConfig as PvalConfig
    from hf_dp.tuners.methods import RandomConfig as RandomConfig
    from hf_dp.tuners.methods import RgpConfig as RgpConfig
    from hf_dp.tuners.methods import TopBlocksConfig as TopBlocksConfig

# The lines above are the only list of public names.
_LINES = re.findall(
    r"^    from (\S+) import \w+ as (\w+)$",
    Path(__file__).read_text(encoding="utf-8"),
    re.MULTILINE,
)
_HOMES = {name: module for module, name in _LINES}


def _when_imported(module: str, then: str) -> None:
    """Import ``then`` now if ``module`` is imported already, else right after it is."""
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


# So that PEFT knows hf_dp's adapters after ``import hf_dp``, which does not load it.
_when_imported("peft", "hf_dp.tuners.adapter")

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hf_dp' has no attribute {name!r}; it offers {__all__}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
