"""Write accountants' answers as JSON rows and as a table; epsilon is rounded up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_dp.accounting.value import doubt_of_delta

if TYPE_CHECKING:
    from hf_dp.accounting.accountants import Answer


def json_row(answer: Answer) -> dict[str, str | float | None]:
    """Return an answer for JSON. An infinite epsilon is the string "inf"."""
    row: dict[str, str | float | None] = {"accountant": answer.accountant}
    if answer.epsilon is None:
        return row | {"kind": None, "epsilon": None, "error": answer.note}
    value = answer.epsilon.rounded_up(3)
    row |= {"kind": answer.epsilon.kind, "epsilon": value if math.isfinite(value) else "inf"}
    return row if answer.epsilon.estimate is None else row | {"estimate": answer.epsilon.estimate}


def table(answers: Iterable[Answer], delta: float) -> str:
    """Return a line for each accountant under a heading, and a warning of a large delta."""
    lines = [f"{'accountant':<11}{'kind':<10}epsilon at delta {delta:g}"]
    for answer in answers:
        found = answer.epsilon
        if found is None:
            lines.append(f"{answer.accountant:<11}{'-':<10}not computed: {answer.note}")
            continue
        point = "" if found.estimate is None else f"  (point estimate {found.estimate:.3f})"
        lines.append(f"{answer.accountant:<11}{found.kind:<10}{found.rounded_up(3):.3f}{point}")
    if doubt := doubt_of_delta(delta):
        lines.append(f"Warning: {doubt}")
    return "\n".join(lines)
