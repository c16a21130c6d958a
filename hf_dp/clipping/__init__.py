"""Exact per-example gradient clipping for PyTorch models, usable in any training loop."""

from hf_dp.clipping.coupling import refuse_coupling as refuse_coupling
from hf_dp.clipping.engine import ClippingEngine as ClippingEngine
from hf_dp.clipping.gradients import Lookups as Lookups
from hf_dp.clipping.gradients import OuterProducts as OuterProducts
from hf_dp.clipping.rules import register_rule as register_rule
from hf_dp.clipping.self_check import per_example_gradients as per_example_gradients
from hf_dp.clipping.self_check import self_check as self_check
