"""Privacy accounting: what ran, what it costs and how much noise a target needs; without torch."""

from hf_dp.accounting.accountants import RELATIONS as RELATIONS
from hf_dp.accounting.accountants import calibrate_noise_multiplier as calibrate_noise_multiplier
from hf_dp.accounting.accountants import calibrate_steps as calibrate_steps
from hf_dp.accounting.accountants import epsilon as epsilon
from hf_dp.accounting.accountants import register_accountant as register_accountant
from hf_dp.accounting.composition import Epsilon as Epsilon
from hf_dp.accounting.composition import round_up as round_up
from hf_dp.accounting.event import LOSS as LOSS
from hf_dp.accounting.event import SUM as SUM
from hf_dp.accounting.event import VECTORS as VECTORS
from hf_dp.accounting.event import Event as Event
from hf_dp.accounting.event import event_from_dict as event_from_dict
from hf_dp.accounting.event import register_event as register_event
from hf_dp.accounting.events import BestOfRandomRuns as BestOfRandomRuns
from hf_dp.accounting.events import Gaussian as Gaussian
from hf_dp.accounting.events import GroupedGaussian as GroupedGaussian
from hf_dp.accounting.events import PoissonSampledGaussian as PoissonSampledGaussian
from hf_dp.accounting.events import PublishedForwardNoise as PublishedForwardNoise
from hf_dp.accounting.events import RandomAllocationGaussian as RandomAllocationGaussian
from hf_dp.accounting.events import RecordRelease as RecordRelease
from hf_dp.accounting.events import SampledRecordRelease as SampledRecordRelease
from hf_dp.accounting.events import SumAndRows as SumAndRows
from hf_dp.accounting.events import (
    TruncatedPoissonSampledGaussian as TruncatedPoissonSampledGaussian,
)
from hf_dp.accounting.events import UserRowsGaussian as UserRowsGaussian
from hf_dp.accounting.knows import ACCOUNTANTS as ACCOUNTANTS
from hf_dp.accounting.knows import BOUNDS as BOUNDS
from hf_dp.accounting.ledger import EARLIER as EARLIER
from hf_dp.accounting.ledger import RELEASE as RELEASE
from hf_dp.accounting.ledger import SELECTION as SELECTION
from hf_dp.accounting.ledger import TRAINING as TRAINING
from hf_dp.accounting.ledger import Ledger as Ledger
from hf_dp.accounting.ledger import LedgerEntry as LedgerEntry
