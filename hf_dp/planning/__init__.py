"""Plan before spending, without torch: the cost of a run, of a range of settings, on other data."""

from hf_dp.planning.forecast import Forecast, forecast
from hf_dp.planning.sweep import parse_sweep
from hf_dp.planning.transfer import Transfer, transfer

__all__ = ["Forecast", "Transfer", "forecast", "parse_sweep", "transfer"]
