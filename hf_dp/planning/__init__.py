"""Planning before spending: what a run would cost, over a range of settings, on another data set;
no torch."""

from hf_dp.planning.forecast import Forecast, forecast
from hf_dp.planning.sweep import parse_sweep
from hf_dp.planning.transfer import Transfer, transfer

__all__ = ["Forecast", "Transfer", "forecast", "parse_sweep", "transfer"]
