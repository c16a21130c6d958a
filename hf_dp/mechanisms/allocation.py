"""The step of DP-SGD with random allocation: DP-SGD's own, on other logical batches."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_dp.mechanisms.base import register_mechanism
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.plans.allocation import AllocatedPlan


@register_mechanism
class AllocatedDpSgd(DpSgd):
    """DP-SGD's step; :class:`hf_dp.run.private_run.PrivateRun` records whole allocations."""

    plan_type: ClassVar[type[Any]] = AllocatedPlan
