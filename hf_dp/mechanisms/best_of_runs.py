"""The step of DP-SGD in a private selection: DP-SGD's own."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_dp.mechanisms.base import register_mechanism
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.plans.best_of_runs import BestOfRunsPlan


@register_mechanism
class BestOfRunsDpSgd(DpSgd):
    """DP-SGD's step; what it is recorded as is the plan's matter."""

    plan_type: ClassVar[type[Any]] = BestOfRunsPlan
