"""Plan before spending, without torch: the cost of a run, or of a range of settings."""

from hf_dp.planning.forecast import (
    LEAST_SIGNAL,
    Forecast,
    assumptions,
    forecast,
    most_signal,
    parse_sweep,
)
from hf_dp.planning.suggestion import Choice, Suggestion, suggest

__all__ = [
    "LEAST_SIGNAL",
    "Choice",
    "Forecast",
    "Suggestion",
    "assumptions",
    "forecast",
    "most_signal",
    "parse_sweep",
    "suggest",
]
