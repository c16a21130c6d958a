"""PEFT's tables of methods.

``peft.utils.register_peft_method`` takes only methods that are members of PEFT's own enum.
"""

from __future__ import annotations

from typing import Any

from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner


def register_method(name: str, config: type[PeftConfig], tuner: type[BaseTuner]) -> None:
    """Let ``get_peft_model`` build ``tuner`` for such a configuration, whose peft_type is
    ``name``."""
    key: Any = name
    PEFT_TYPE_TO_CONFIG_MAPPING[key] = config
    PEFT_TYPE_TO_TUNER_MAPPING[key] = tuner
    PEFT_TYPE_TO_PREFIX_MAPPING[key] = tuner.prefix
