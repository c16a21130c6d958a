"""Which tuner serves a configuration.

A tuner is needed where what trains is decided inside the run: by the private rows (DP-FROST,
PARAM), or entry by entry (PVAL, RGP). It is asked when the plan is made, before the first step, in
each step and when weights are saved. What it computes from private rows leaves through the run's
gate.
"""

from __future__ import annotations

import copy
from typing import Any

import hf_dp.tuners.methods  # noqa: F401 - the tuners register themselves
from hf_dp.tuners.base import TUNERS, Tuner


def tuner_for(peft_config: Any, is_private: bool) -> Tuner | None:
    """Return the tuner that a configuration needs, or None where PEFT applies it unchanged.

    The tuner gets a copy: the run writes its selection into it, and the caller may reuse the
    original.

    Raises: as the tuner's own maker (:data:`hf_dp.tuners.base.TUNERS`).
    """
    makers = (TUNERS[kind] for kind in type(peft_config).__mro__ if kind in TUNERS)
    make = next(makers, None)
    return None if make is None else make(copy.deepcopy(peft_config), is_private)
