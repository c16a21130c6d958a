"""Privacy accounting: what ran, what it costs and how much noise a target needs; without torch."""

from hf_dp.accounting.accountants import ACCOUNTANTS, BOUNDS, RELATIONS, epsilon
from hf_dp.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_sample_rate,
    calibrate_steps,
)
from hf_dp.accounting.described import LOSS as LOSS
from hf_dp.accounting.described import SUM as SUM
from hf_dp.accounting.described import VECTORS as VECTORS
from hf_dp.accounting.events import (
    BestOfRandomRuns,
    Event,
    Gaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SumAndLoss,
    TruncatedPoissonSampledGaussian,
    TruncatedSumAndLoss,
    UserRowsGaussian,
    event_from_dict,
)
from hf_dp.accounting.ledger import EARLIER, RELEASE, SELECTION, TRAINING, Ledger, LedgerEntry
from hf_dp.accounting.record_events import (
    PublishedForwardNoise,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
)
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
    "SumAndLoss",
    "SumAndRows",
    "TruncatedPoissonSampledGaussian",
    "TruncatedSumAndLoss",
    "UserRowsGaussian",
    "calibrate_noise_multiplier",
    "calibrate_sample_rate",
    "calibrate_steps",
    "epsilon",
    "event_from_dict",
    "round_up",
]
