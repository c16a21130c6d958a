"""What trains, where that is decided inside the run: by the private rows (DP-FROST, PARAM), or
entry by entry (PVAL, RGP).

A :class:`Choice` is asked when the plan is made, before the first step, in each step and when
weights are saved. What it reads of the private rows goes through noise and into the ledger, in
:mod:`hf_dp.trainer.private_selection`.
"""

from __future__ import annotations

import copy
from typing import Any

from hf_dp._validate import invalid
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.trainer.choice.base import Choice as Choice
from hf_dp.trainer.choice.frost import Once, Repeated
from hf_dp.trainer.choice.masks import Masks
from hf_dp.trainer.choice.rgp import Rgp
from hf_dp.tuners.frost.config import FrostConfig
from hf_dp.tuners.masks import MaskConfig
from hf_dp.tuners.rgp import RgpConfig


def choice_of(peft_config: Any, is_private: bool) -> Choice | None:
    """The choice that a configuration asks for; None for a configuration that PEFT applies as it
    is.

    Raises: UnsupportedArgumentError in ``non_private`` mode; ConfigError for a selection that
        another run made.
    """
    if not isinstance(peft_config, (FrostConfig, MaskConfig, RgpConfig)):
        return None
    config = copy.deepcopy(
        peft_config
    )  # what is chosen is written into it, and the caller's may serve another run
    if isinstance(config, FrostConfig) and (config.parameters is not None or config.made):
        if not is_private and config.parameters is not None:
            return None  # an adapter like any other
        raise ConfigError(
            "This FrostConfig holds a selection that another run made from private rows, and this "
            "run's ledger would not know it. Pass a new FrostConfig, or resume that run."
        )
    if not is_private:
        raise invalid(
            "peft_config",
            type(config).__name__,
            "to be used in private modes",
            "Without privacy use RandomConfig, TopBlocksConfig or a selection that a private run "
            "made.",
            UnsupportedArgumentError,
        )
    if isinstance(config, MaskConfig):
        return Masks(config)
    if isinstance(config, RgpConfig):
        return Rgp(config)
    return Repeated(config) if config.num_selections > 1 else Once(config)
