"""DP-FP's variants (Du and Mi 2021): noise on the representation that enters the last layer.

``published``: everything trains; no epsilon is established. ``frozen``: only the last layer trains,
from released vectors. ``private_encoder``: DP-SGD below the noise, released vectors above it.
"""

from hf_dp.plans.dp_fp.base import DP_FP as DP_FP
from hf_dp.plans.dp_fp.base import FROZEN as FROZEN
from hf_dp.plans.dp_fp.base import PRIVATE_ENCODER as PRIVATE_ENCODER
from hf_dp.plans.dp_fp.base import PUBLISHED as PUBLISHED
from hf_dp.plans.dp_fp.base import VARIANTS as VARIANTS
from hf_dp.plans.dp_fp.base import ForwardPlan as ForwardPlan
from hf_dp.plans.dp_fp.frozen import FRESH as FRESH
from hf_dp.plans.dp_fp.frozen import ONCE as ONCE
from hf_dp.plans.dp_fp.frozen import REUSES as REUSES
from hf_dp.plans.dp_fp.frozen import FrozenPlan as FrozenPlan
from hf_dp.plans.dp_fp.private_encoder import DRAWS as DRAWS
from hf_dp.plans.dp_fp.private_encoder import SEPARATE as SEPARATE
from hf_dp.plans.dp_fp.private_encoder import SHARED as SHARED
from hf_dp.plans.dp_fp.private_encoder import PrivateEncoderPlan as PrivateEncoderPlan
from hf_dp.plans.dp_fp.published import PublishedPlan as PublishedPlan
