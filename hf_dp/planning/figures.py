"""Plot Figure 3 (left) and Figure 7 of Li et al. 2022 for a plan, and its epsilon over steps.

Noise is calibrated by RDP, as in the paper. A dot marks the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dp import _plotting
from hf_dp.accounting import calibrate_noise_multiplier, epsilon
from hf_dp.accounting.comparison import compare
from hf_dp.errors import AccountingRangeError, CalibrationError
from hf_dp.plans.privacy import PrivacyPlan

STEPS = (16, 64, 256, 1024, 4096)  # those of Figure 3
_SMALLEST_RATE = 2.0**-12
Curve = tuple[list[float], list[float]]


def sample_rates(smallest: float = _SMALLEST_RATE) -> list[float]:
    """Return 1, 1/4, 1/16, ... down to ``smallest``, rising."""
    return [4.0**-power for power in range(round(-math.log2(smallest) / 2), -1, -1)]


def effective_noise(target: float, delta: float, steps: int, rates: Sequence[float]) -> Curve:
    """Return sigma / q by sample rate q, with a fixed number of steps (Figure 3, left).

    Rates without an answer are left out.
    """
    return _curve(rates, lambda q: calibrate_noise_multiplier(target, delta, q, steps, "rdp") / q)


def noise_by_rate(target: float, delta: float, epochs: float, rates: Sequence[float]) -> Curve:
    """Return sigma by sample rate q, with a fixed number of epochs (Figure 7).

    There are epochs / q steps.
    """
    return _curve(
        rates, lambda q: calibrate_noise_multiplier(target, delta, q, math.ceil(epochs / q), "rdp")
    )


def epsilon_over_steps(plan: PrivacyPlan, accountant: str, points: int = 12) -> Curve:
    """Return epsilon after 1 to all steps of the plan.

    Steps for which the accountant has no answer are left out.
    """
    counts = sorted({max(1, round(plan.steps ** (i / (points - 1)))) for i in range(points)})
    found = [(n, compare(plan.events(n), plan.delta, [accountant])[0].epsilon) for n in counts]
    return [float(n) for n, value in found if value is not None], [
        value.value for _, value in found if value is not None
    ]


def plot_plan(plan: PrivacyPlan, path: str | Path) -> None:
    """Write the three panels; the ending of the file name selects the format.

    Raises: InvalidArgumentError without matplotlib.
    """
    _plotting.require_matplotlib(str(path))
    # If the noise is given, the target is the epsilon of that noise.
    target = plan.target_epsilon or epsilon(plan.events(), plan.delta, "rdp").value
    figure, (left, middle, right) = _plotting.panels(3)
    _plot_effective_noise(left, plan, target)
    _plot_noise(middle, plan, target)
    for name in ("pld", "rdp", "gdp_clt"):
        kind = " (an estimate)" if name == "gdp_clt" else ""
        right.plot(*epsilon_over_steps(plan, name), marker=".", label=name + kind)
    _label(right, "steps", f"epsilon at delta {plan.delta:.3g}")
    figure.suptitle(f"(epsilon {target:.4g}, delta {plan.delta:.3g}); noise calibrated by RDP")
    figure.savefig(path, dpi=150)


def _plot_effective_noise(axes: Any, plan: PrivacyPlan, target: float) -> None:
    rates = sample_rates()
    for steps in STEPS:
        axes.plot(
            *effective_noise(target, plan.delta, steps, rates), marker=".", label=f"{steps} steps"
        )
    axes.plot(
        plan.sample_rate,
        plan.noise_multiplier / plan.sample_rate,
        "ko",
        label=f"this plan, {plan.steps} steps",
    )
    _label(axes, "sample rate q", "effective noise multiplier")


def _plot_noise(axes: Any, plan: PrivacyPlan, target: float) -> None:
    rates, epochs = sample_rates(), plan.steps * plan.sample_rate
    actual = noise_by_rate(target, plan.delta, epochs, rates)
    axes.plot(*actual, marker=".", label=f"{epochs:.3g} epochs")
    if actual[0]:
        # A square root through the largest rate, as where the central limit theorem holds.
        factor = actual[1][-1] / math.sqrt(actual[0][-1])
        axes.plot(
            rates, [factor * math.sqrt(q) for q in rates], "--", label=f"{factor:.4g} sqrt(q)"
        )
    axes.plot(plan.sample_rate, plan.noise_multiplier, "ko", label="this plan")
    _label(axes, "sample rate q", "noise multiplier")


def _label(axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.legend(fontsize=7)


def _curve(rates: Sequence[float], value: Any) -> Curve:
    points: Curve = ([], [])
    for rate in rates:
        try:
            found = value(rate)
        except (AccountingRangeError, CalibrationError):
            continue
        points[0].append(rate)
        points[1].append(found)
    return points
