"""Differentially private fine-tuning for Hugging Face models.

Public names, each loaded when first used, so that ``import hf_dp.accounting`` needs neither torch
nor transformers.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._version import __version__ as __version__
from hf_dp._when_imported import when_imported

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

when_imported("peft", "hf_dp.tuners.adapter")
when_imported("transformers.models.auto.configuration_auto", "hf_dp.tasks.infilling_config")

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hf_dp' has no attribute {name!r}; it offers {__all__}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
