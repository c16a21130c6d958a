"""What each accountant says about a run, and how its numbers are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

from hf_dp.accounting import BOUNDS, Epsilon, Ledger, round_up
from hf_dp.accounting.accountants import Answer, compare
from hf_dp.errors import AccountingRangeError

EPSILON_DIGITS = 3  # decimals of a printed epsilon
DELTA_DIGITS = 4  # significant digits of a printed delta


def epsilon_text(epsilon: float | None) -> str:
    """Return the text of an epsilon that is already rounded up; "none" for None."""
    if epsilon is None:
        return "none"
    return "0" if epsilon == 0 else f"{epsilon:.{EPSILON_DIGITS}f}"


def delta_text(delta: float) -> str:
    """Return delta rounded up to four significant digits.

    Rounding up keeps "(epsilon, delta)-private" true.
    """
    exact = Decimal(repr(float(delta)))
    if exact == 0:
        return "0"
    last_digit = Decimal(1).scaleb(exact.adjusted() - DELTA_DIGITS + 1)
    return f"{float(exact.quantize(last_digit, ROUND_CEILING)):g}"


def results_of(ledger: Ledger, delta: float, accountants: Sequence[str]) -> tuple[Answer, ...]:
    """Return what each accountant says about a ledger, rounded up to three decimals, or why it says
    nothing."""
    return tuple(map(_rounded, compare(ledger.events, delta, accountants)))


def _rounded(answer: Answer) -> Answer:
    found = answer.epsilon
    if found is None:
        return answer
    if not math.isfinite(found.value):
        return Answer(answer.accountant, None, "no finite epsilon")
    point = None if found.estimate is None else round_up(found.estimate, EPSILON_DIGITS)
    return replace(answer, epsilon=Epsilon(found.rounded_up(EPSILON_DIGITS), found.kind, point))


def headline(rows: tuple[Answer, ...], wanted: str) -> tuple[str, float, str]:
    """Return the accountant of the claim, its epsilon and, if it is not the one asked for, why.

    Raises: AccountingRangeError when no accountant gives an upper bound.
    """
    bounds = {
        row.accountant: row.epsilon.value
        for row in rows
        if row.epsilon is not None and row.accountant in BOUNDS
    }
    if wanted in bounds:
        return wanted, bounds[wanted], ""
    if not bounds:
        notes = " ".join(f"{row.accountant}: {row.note}" for row in rows if row.note)
        raise AccountingRangeError(
            f"No accountant gives an upper bound for this run, so nothing is claimed. {notes}"
        )
    best = min(bounds, key=bounds.__getitem__)
    why = next(
        (row.note for row in rows if row.accountant == wanted and row.note),
        "it is an estimate, not a bound.",
    )
    note = f"The headline is {best}'s bound, not that of {wanted}, the accountant asked for: {why}"
    return best, bounds[best], note


def point_estimate(found: Epsilon) -> str:
    """Return the point estimate beside a bound, in words; empty without one."""
    return "" if found.estimate is None else f" (point estimate {epsilon_text(found.estimate)})"


def line(row: Answer) -> str:
    """Return a result as one line of a terminal."""
    found = row.epsilon
    if found is None:
        return f"{row.accountant:<8} -        {row.note}"
    epsilon = epsilon_text(found.value)
    return f"{row.accountant:<8} {epsilon:<8} {found.kind}{point_estimate(found)}"
