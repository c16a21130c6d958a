"""What a run protects, and against which change: codes, ordered from the strongest claim to the
weakest.

A plan carries the codes; :mod:`hf_dp.statement.wording` puts them into words.
"""

from __future__ import annotations

from collections.abc import Iterable

NONE = "none"  # nothing is established

EXAMPLE = "example"  # a whole row, its label included
FEATURES = "features"  # a row without its label, which is public
UNITS = (EXAMPLE, FEATURES, NONE)

ZERO_OUT = "zero_out"  # of a row's part in sums
RECORD_ZERO_OUT = "record_zero_out"  # and of a row's released vector
RECORD_AND_LABEL_ZERO_OUT = "record_and_label_zero_out"  # and of its label, which was randomized
RELATIONS = (ZERO_OUT, RECORD_ZERO_OUT, RECORD_AND_LABEL_ZERO_OUT, NONE)

# What a user may ask for; other units and relations need samplers and accounting of their own.
PRIVACY_UNITS = (EXAMPLE,)
NEIGHBORING_RELATIONS = (ZERO_OUT,)


def weakest_unit(units: Iterable[str]) -> str:
    """Return the unit that runs on the same rows protect together."""
    return max(units, key=UNITS.index)


def weakest_relation(relations: Iterable[str], unit: str) -> str:
    """Return the relation that holds for runs on the same rows together, for their common ``unit``.

    Where labels are public in one of the runs, no label is replaced in any of them.
    """
    weakest = max(relations, key=RELATIONS.index)
    if weakest == RECORD_AND_LABEL_ZERO_OUT and unit == FEATURES:
        return RECORD_ZERO_OUT
    return weakest
