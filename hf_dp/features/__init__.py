"""What a run may do besides its steps, one file a feature. Importing it registers those of hf_dp.

To add one, subclass :class:`Feature` and decorate it with :func:`register`.
"""

from hf_dp.features.adam_bc import AdamBC as AdamBC
from hf_dp.features.base import Feature as Feature
from hf_dp.features.base import Inside as Inside
from hf_dp.features.base import Seen as Seen
from hf_dp.features.base import features_of as features_of
from hf_dp.features.base import problems_of as problems_of
from hf_dp.features.base import register as register
from hf_dp.features.canaries import Canaries as Canaries
from hf_dp.features.guards import Guards as Guards
from hf_dp.features.logged import NoisedNumbers as NoisedNumbers
from hf_dp.features.logged import SignalToNoise as SignalToNoise
from hf_dp.features.model_selection import ModelSelection as ModelSelection
from hf_dp.features.outlook import Outlook as Outlook
from hf_dp.features.physical_batch import PhysicalBatch as PhysicalBatch
from hf_dp.features.progress import Progress as Progress
from hf_dp.features.signals import Signals as Signals
from hf_dp.features.unnoised import Unnoised as Unnoised
