"""Which tuner serves a configuration.

A tuner is needed where what trains is decided inside the run: by the private rows (DP-FROST,
PARAM), or entry by entry (PVAL, RGP). It is asked when the plan is made, before the first step, in
each step and when weights are saved. What it computes from private rows leaves through the run's
gate.
"""

from __future__ import annotations

import copy
from typing import Any

from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.tuners.base import Tuner
from hf_dp.tuners.frost.config import FrostConfig
from hf_dp.tuners.frost.tuner import Reselect, SelectOnce
from hf_dp.tuners.rgp.config import RgpConfig
from hf_dp.tuners.rgp.tuner import Rgp
from hf_dp.tuners.single_entries.config import MaskConfig
from hf_dp.tuners.single_entries.tuner import Masks


def tuner_for(peft_config: Any, is_private: bool) -> Tuner | None:
    """Return the tuner that a configuration needs, or None where PEFT applies it unchanged.

    Raises:
        UnsupportedArgumentError: repeated selections in ``non_private`` mode.
        ConfigError: the configuration holds a selection that another run made.
    """
    if not isinstance(peft_config, (FrostConfig, MaskConfig, RgpConfig)):
        return None
    # A copy: the run writes its selection into it, and the caller may reuse the original.
    config = copy.deepcopy(peft_config)
    if isinstance(config, FrostConfig) and (config.parameters is not None or config.made):
        if not is_private and config.parameters is not None:
            return None  # an adapter like any other
        raise ConfigError(
            "This FrostConfig holds a selection that another run made from private rows. The "
            "ledger of this run would not count it. Pass a new FrostConfig, or resume that run. If "
            "the rows were public, pass model=get_peft_model(model, config) without peft_config, "
            "and set adapter_init_data_is_public=True."
        )
    if not is_private and isinstance(config, FrostConfig) and config.num_selections > 1:
        raise invalid(
            "num_selections",
            config.num_selections,
            "to be 1 with privacy_mode='non_private'",
            "There the partitions are chosen once. Set it to 1.",
            UnsupportedArgumentError,
        )
    if isinstance(config, MaskConfig):
        return Masks(config)
    if isinstance(config, RgpConfig):
        return Rgp(config)
    return Reselect(config) if config.num_selections > 1 else SelectOnce(config)
