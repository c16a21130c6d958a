"""What a run may do besides its steps; a Feature is added by the decorator :func:`register`."""

# A run asks features in the order in which they are registered: by name.
from hf_dp.features import adam_bc as adam_bc
from hf_dp.features import always as always
from hf_dp.features import canaries as canaries
from hf_dp.features import signals as signals
from hf_dp.features.base import Feature as Feature
from hf_dp.features.base import Inside as Inside
from hf_dp.features.base import Seen as Seen
from hf_dp.features.base import features_of as features_of
from hf_dp.features.base import problems_of as problems_of
from hf_dp.features.base import register as register
