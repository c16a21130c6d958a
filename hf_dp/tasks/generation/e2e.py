"""The E2E data set: restaurants as tables, and a sentence about each (Novikova et al., 2017)."""

from __future__ import annotations

import re

from hf_dp.errors import DataError

_CELL = re.compile(r"\s*([^\[\],]+?)\s*\[([^\]]*)\]\s*(?:,|$)")

# The words for a key, as the tables of Li et al. (2021), appendix O, table 11, show them.
_WORDS = {
    "eatType": "Type",
    "priceRange": "price",
    "familyFriendly": "family friendly",
}


def linearized(meaning: str) -> str:
    """Return a table as text: ``name[Aromi], eatType[pub]`` -> ``name : Aromi | Type : pub``.

    Source: Li et al. (2021), appendices M and O; a table of theirs has the columns of the Hub's
    ``e2e_nlg`` in their order.

    Raises: DataError for a text that is not of the form ``key[value], key[value]``.
    """
    cells, at = [], 0
    while at < len(meaning):
        found = _CELL.match(meaning, at)
        if found is None:
            raise DataError(
                f"Expected a meaning representation like 'name[Aromi], eatType[pub]', got "
                f"{meaning!r}, which ends to be one at {meaning[at : at + 20]!r}. Correct the row, "
                "or use data_format: pairs."
            )
        key, value = found.groups()
        cells.append(f"{_WORDS.get(key, key)} : {value.strip()}")
        at = found.end()
    return " | ".join(cells)
