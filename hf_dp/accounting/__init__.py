"""Privacy accounting: what ran, what it costs and how much noise a target needs; without torch."""

from hf_dp.accounting.accountants import RELATIONS, epsilon, register_accountant
from hf_dp.accounting.calibration import calibrate_noise_multiplier, calibrate_steps
from hf_dp.accounting.event import LOSS, SUM, VECTORS, Event, event_from_dict, register_event
from hf_dp.accounting.events import (
    BestOfRandomRuns,
    Gaussian,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RandomAllocationGaussian,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.accounting.knows import ACCOUNTANTS, BOUNDS
from hf_dp.accounting.ledger import EARLIER, RELEASE, SELECTION, TRAINING, Ledger, LedgerEntry
from hf_dp.accounting.value import Epsilon, round_up

__all__ = [
    "ACCOUNTANTS",
    "BOUNDS",
    "EARLIER",
    "LOSS",
    "RELATIONS",
    "RELEASE",
    "SELECTION",
    "SUM",
    "TRAINING",
    "VECTORS",
    "BestOfRandomRuns",
    "Epsilon",
    "Event",
    "Gaussian",
    "Ledger",
    "LedgerEntry",
    "PoissonSampledGaussian",
    "PublishedForwardNoise",
    "RandomAllocationGaussian",
    "RandomizedResponse",
    "RecordRelease",
    "SampledRecordRelease",
    "SumAndRows",
    "TruncatedPoissonSampledGaussian",
    "UserRowsGaussian",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "epsilon",
    "event_from_dict",
    "register_accountant",
    "register_event",
    "round_up",
]
