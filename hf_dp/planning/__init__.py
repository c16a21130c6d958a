"""Plan before spending, without torch: the cost of a run, of a range of settings, on other data."""

from hf_dp.planning.forecast import LEAST_SIGNAL, Forecast, forecast, most_signal
from hf_dp.planning.suggestion import Choice, Suggestion, suggest
from hf_dp.planning.sweep import parse_sweep
from hf_dp.planning.transfer import Transfer, transfer

__all__ = [
    "LEAST_SIGNAL",
    "Choice",
    "Forecast",
    "Suggestion",
    "Transfer",
    "forecast",
    "most_signal",
    "parse_sweep",
    "suggest",
    "transfer",
]
