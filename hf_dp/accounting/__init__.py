"""Privacy accounting: what ran, what it costs, how much noise a target needs. Pure maths, no torch."""

from hf_dp.accounting.accountants import ACCOUNTANTS, BOUNDS, epsilon
from hf_dp.accounting.calibration import calibrate_noise_multiplier, calibrate_steps
from hf_dp.accounting.events import Event, Gaussian, PoissonSampledGaussian, event_from_dict
from hf_dp.accounting.ledger import Ledger, LedgerEntry
from hf_dp.accounting.value import Epsilon, round_up

__all__ = [
    "ACCOUNTANTS",
    "BOUNDS",
    "Epsilon",
    "Event",
    "Gaussian",
    "Ledger",
    "LedgerEntry",
    "PoissonSampledGaussian",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "epsilon",
    "event_from_dict",
    "round_up",
]
