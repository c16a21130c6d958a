"""Plan before spending: the cost of a run, over a range of settings, on other data; without
torch."""

from hf_dp.planning.forecast import Forecast, forecast
from hf_dp.planning.sweep import parse_sweep
from hf_dp.planning.transfer import Transfer, transfer

__all__ = ["Forecast", "Transfer", "forecast", "parse_sweep", "transfer"]
