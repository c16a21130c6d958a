"""All of hf_dp's ways to choose what trains; importing this registers them and their tuners."""

from __future__ import annotations

import copy

from peft import PeftConfig

from hf_dp.tuners.adapter import AdapterConfig as AdapterConfig
from hf_dp.tuners.base import TUNERS, Tuner
from hf_dp.tuners.frost.tuner import FrostConfig as FrostConfig
from hf_dp.tuners.public_choice import BitFitConfig as BitFitConfig
from hf_dp.tuners.public_choice import HeadConfig as HeadConfig
from hf_dp.tuners.public_choice import RandomConfig as RandomConfig
from hf_dp.tuners.public_choice import TopBlocksConfig as TopBlocksConfig
from hf_dp.tuners.rgp import RgpConfig as RgpConfig
from hf_dp.tuners.single_entries import ParamConfig as ParamConfig
from hf_dp.tuners.single_entries import PvalConfig as PvalConfig


def tuner_for(peft_config: PeftConfig | None, is_private: bool) -> Tuner | None:
    """Return the tuner that a configuration needs, or None where PEFT applies it unchanged.

    A tuner is needed where what trains is decided inside the run: by the private rows (DP-FROST,
    PARAM), or entry by entry (PVAL, RGP). It gets a copy: the run writes its selection into it,
    and the caller may reuse the original.
    """
    makers = (TUNERS[kind] for kind in type(peft_config).__mro__ if kind in TUNERS)
    make = next(makers, None)
    return None if make is None else make(copy.deepcopy(peft_config), is_private)
