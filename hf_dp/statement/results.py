"""What each accountant says about a run, and how its numbers are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from hf_dp.accounting import BOUNDS, Ledger, round_up
from hf_dp.accounting.accountants import Answer, compare
from hf_dp.errors import AccountingRangeError

EPSILON_DIGITS = 3  # decimals of a printed epsilon
DELTA_DIGITS = 4  # significant digits of a printed delta


@dataclass(frozen=True)
class AccountantResult:
    """What one accountant says about the run.

    Args:
        accountant: "pld", "rdp", "prv" or "gdp_clt".
        epsilon: rounded up to three decimals, or None; ``note`` then says why.
        kind: "bound" or "estimate" (which may be below the true epsilon); None without an epsilon.
        estimate: a point estimate beside the bound (prv), rounded up to three decimals, else None.
        note: why there is no epsilon, else empty.
    """

    accountant: str
    epsilon: float | None
    kind: str | None
    estimate: float | None = None
    note: str = ""


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


def results_of(
    ledger: Ledger, delta: float, accountants: Sequence[str]
) -> tuple[AccountantResult, ...]:
    """Return what each accountant says about a ledger, or why it says nothing."""
    return tuple(map(_result, compare(ledger.events, delta, accountants)))


def _result(answer: Answer) -> AccountantResult:
    accountant, value = answer.accountant, answer.epsilon
    if value is None:
        # The figure for DP-FP stands in the note as well, so that no number here can be mistaken
        # for an epsilon.
        return AccountantResult(accountant, None, None, note=answer.note)
    if not math.isfinite(value.value):
        return AccountantResult(accountant, None, None, note="no finite epsilon")
    point = None if value.estimate is None else round_up(value.estimate, EPSILON_DIGITS)
    return AccountantResult(accountant, value.rounded_up(EPSILON_DIGITS), value.kind, point)


def headline(rows: tuple[AccountantResult, ...], wanted: str) -> tuple[AccountantResult, str]:
    """Return the result for the claim and, if it is not the one asked for, why.

    Raises: AccountingRangeError when no accountant gives an upper bound.
    """
    bounds = {
        row.accountant: row for row in rows if row.epsilon is not None and row.accountant in BOUNDS
    }
    if wanted in bounds:
        return bounds[wanted], ""
    if not bounds:
        notes = " ".join(f"{row.accountant}: {row.note}" for row in rows if row.note)
        raise AccountingRangeError(
            f"No accountant gives an upper bound for this run, so nothing is claimed. {notes}"
        )
    best = min(bounds.values(), key=lambda row: row.epsilon or 0.0)
    why = next(
        (row.note for row in rows if row.accountant == wanted and row.note),
        "it is an estimate, not a bound.",
    )
    return (
        best,
        f"The headline is {best.accountant}'s bound, not that of {wanted}, the accountant asked "
        f"for: {why}",
    )


def line(row: AccountantResult) -> str:
    """Return a result as one line of a terminal."""
    if row.epsilon is None:
        return f"{row.accountant:<8} -        {row.note}"
    point = "" if row.estimate is None else f" (point estimate {epsilon_text(row.estimate)})"
    return f"{row.accountant:<8} {epsilon_text(row.epsilon):<8} {row.kind}{point}"
