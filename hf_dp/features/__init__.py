"""What a run may do besides its steps, one file a feature. Importing it registers those of hf_dp.

To add one, subclass :class:`Feature` and decorate it with :func:`register`.
"""

from hf_dp.features.base import Feature as Feature
from hf_dp.features.base import Inside as Inside
from hf_dp.features.base import Seen as Seen
from hf_dp.features.base import features_of as features_of
from hf_dp.features.base import problems_of as problems_of
from hf_dp.features.base import register as register

# isort: split
# The order is that in which a run asks them.
from hf_dp.features import progress, guards, signals, adam_bc, outlook, logged, canaries, unnoised  # noqa: F401, I001
