"""Write accountants' answers as JSON rows and as a table; epsilon is rounded up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hf_dp.accounting.value import doubt_of_delta


def json_row(answer: Any) -> dict[str, Any]:
    """Return a :class:`hf_dp.accounting.accountants.Answer` for JSON.

    An infinite epsilon is the string "inf".
    """
    if answer.epsilon is None:
        return {
            "accountant": answer.accountant,
            "kind": None,
            "epsilon": None,
            "error": answer.note,
        }
    value = answer.epsilon.rounded_up(3)
    row = {
        "accountant": answer.accountant,
        "kind": answer.epsilon.kind,
        "epsilon": value if math.isfinite(value) else "inf",
    }
    return row if answer.epsilon.estimate is None else {**row, "estimate": answer.epsilon.estimate}


def table(answers: Iterable[Any], delta: float) -> str:
    """Return a line for each accountant under a heading, and a warning of a large delta."""
    lines = [f"{'accountant':<11}{'kind':<10}epsilon at delta {delta:g}"]
    for row in map(json_row, answers):
        if row["epsilon"] is None:
            lines.append(f"{row['accountant']:<11}{'-':<10}not computed: {row['error']}")
            continue
        text = row["epsilon"] if isinstance(row["epsilon"], str) else f"{row['epsilon']:.3f}"
        point = f"  (point estimate {row['estimate']:.3f})" if "estimate" in row else ""
        lines.append(f"{row['accountant']:<11}{row['kind']:<10}{text}{point}")
    if doubt := doubt_of_delta(delta):
        lines.append(f"Warning: {doubt}")
    return "\n".join(lines)
