"""How privacy is obtained: one class for each ``privacy_mode``, of DP-FP for each variant."""

from __future__ import annotations

from hf_dp.forward_plan import FROZEN, PRIVATE_ENCODER, PUBLISHED
from hf_dp.plan import PrivacyPlan
from hf_dp.trainer.modes.base import Mode as Mode
from hf_dp.trainer.modes.dp_fp_frozen import FrozenEncoder
from hf_dp.trainer.modes.dp_fp_private_encoder import PrivateEncoder
from hf_dp.trainer.modes.dp_fp_published import PublishedForward
from hf_dp.trainer.modes.dp_sgd import DpSgd

_FORWARD: dict[str, type[Mode]] = {
    PUBLISHED: PublishedForward,
    FROZEN: FrozenEncoder,
    PRIVATE_ENCODER: PrivateEncoder,
}


def mode_of(plan: PrivacyPlan | None) -> Mode:
    """The mode that runs this plan."""
    if plan is None or plan.forward is None:
        return DpSgd()
    return _FORWARD[plan.forward.variant]()
