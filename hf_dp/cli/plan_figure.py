"""The figure of ``hf-dp plan --sweep``: noise and epsilon over the swept setting."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp._plotting import far_apart, number_axis, panels
from hf_dp.cli.points import Points, draw_points

if TYPE_CHECKING:
    from hf_dp.accounting.comparison import Answer
    from hf_dp.planning import Forecast

EFFECTIVE = "effective noise multiplier\n(noise multiplier / sample rate)"
NOISE = "noise multiplier\n(noise standard deviation / clipping norm)"
EPSILON = "epsilon"
# A name in the legend -> its value for each forecast; None: there is none.
Curves = dict[str, list[float | None]]


def plot_forecasts(
    key: str,
    values: Sequence[float],
    rows: Sequence[Forecast],
    path: str,
    beside: Points | None = None,
) -> None:
    """Plot effective noise (Li et al., figure 3, left), noise (figure 7) and epsilon.

    What was given is left out: a noise multiplier, or a target epsilon by one accountant.

    Args:
        values: of the setting ``key``, one for each forecast.
        beside: noise multipliers to show beside those of the forecasts.
    """
    drawn = _drawn(rows, beside is not None)
    figure, all_axes = panels(len(drawn), width=5.5, height=4.2)
    for axes, (name, curves) in zip(all_axes, drawn.items(), strict=True):
        for label, numbers in curves.items():
            _line(axes, values, numbers, label)
        places = set(values)
        if name == NOISE and beside is not None:
            draw_points(axes, beside, list(curves))
            places |= beside.places
        if name == EPSILON or len(axes.lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        _horizontal(axes, key, rows[0], places)
        axes.set_ylabel(name)
        _vertical(axes, [height for line in axes.lines for height in line.get_ydata()])
    figure.suptitle(_in_words(key, rows), fontsize=10)
    figure.savefig(path, dpi=150)


def _drawn(rows: Sequence[Forecast], with_noise: bool) -> dict[str, Curves]:
    """Return the curves of each panel by the name of its vertical axis."""
    given = rows[0].plan.target_epsilon is None
    drawn: dict[str, Curves] = {
        EFFECTIVE: {"hf-dp plan": [row.effective_noise_multiplier for row in rows]}
    }
    if with_noise or not given:
        drawn[NOISE] = {"hf-dp plan": [row.plan.noise_multiplier for row in rows]}
    if given or len(rows[0].answers) > 1:
        by_accountant = zip(*(row.answers for row in rows), strict=True)
        drawn[EPSILON] = dict(map(_epsilons, by_accountant))
    return drawn


def _epsilons(answers: Sequence[Answer]) -> tuple[str, list[float | None]]:
    """Return an accountant in words, with what it does not answer, and its epsilons."""
    found = [None if each.epsilon is None else each.epsilon.value for each in answers]
    said: list[str] = sorted({each.epsilon.kind for each in answers if each.epsilon is not None})
    if None in found:
        said.append(f"no answer at {found.count(None)} of {len(found)}")
    return f"{answers[0].accountant} ({', '.join(said)})", found


def _line(axes: Any, values: Sequence[float], numbers: Sequence[float | None], label: str) -> None:
    points = zip(values, numbers, strict=True)
    known = sorted((value, number) for value, number in points if number is not None)
    axes.plot([x for x, _ in known], [y for _, y in known], marker="o", label=label)


def _horizontal(axes: Any, key: str, row: Forecast, places: set[float]) -> None:
    """Mark the values. Above batch sizes are the sample rates, which papers show."""
    count, things = row.plan.drawn_from, f"{row.plan.schedule.one}s"
    words = {"batch_size": f"expected batch size ({things})", "num_examples": f"training {things}"}
    axes.set_xlabel(words.get(key, key.replace("_", " ")))
    number_axis(axes, sorted(places))
    if key == "batch_size":
        to_rate_and_back = (lambda size: size / count, lambda rate: rate * count)
        axes.secondary_xaxis("top", functions=to_rate_and_back).set_xlabel("sample rate")


def _vertical(axes: Any, heights: Collection[float]) -> None:
    """Mark 1, 2 and 5 times powers of ten where the values are far apart."""
    from matplotlib.ticker import LogLocator

    if heights and far_apart(heights):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def _in_words(key: str, rows: Sequence[Forecast]) -> str:
    """Return the settings other than the swept one: a value, or from the least to the most."""
    plans = [row.plan for row in rows]
    first = plans[0]
    words = {
        "num_examples": f"{_span([plan.drawn_from for plan in plans], ',')} {first.schedule.one}s",
        "batch_size": f"batch size {_span([plan.expected_batch_size for plan in plans], ',g')}",
        "epochs": f"{_span([row.epochs for row in rows], ',.4g')} epochs",
        "steps": f"{_span([plan.steps for plan in plans], ',')} steps",
        "delta": f"delta {_span([plan.delta for plan in plans], '.3g')}",
    }
    targets = [plan.target_epsilon for plan in plans if plan.target_epsilon is not None]
    if targets:
        words["target_epsilon"] = f"epsilon {_span(targets, 'g')} by {first.accountant}"
    else:
        noise = [plan.noise_multiplier for plan in plans]
        words["noise_multiplier"] = f"noise multiplier {_span(noise, '.6g')}"
    words.pop(key, None)
    return ", ".join([*words.values(), first.words.drawn])


def _span(numbers: Sequence[float], form: str) -> str:
    least, most = format(min(numbers), form), format(max(numbers), form)
    return least if least == most else f"{least} to {most}"
