"""The DART data set: triples of subject, predicate and object, and texts (Nan et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dp.errors import DataError


def linearized(triples: Sequence[Sequence[str]]) -> str:
    """Return triples as text: ``[[A, IS_PART_OF, B]]`` -> ``A : is part of : B``.

    Source: Li et al. (2021), appendix O, table 12.

    Raises: DataError for what is not a list of triples.
    """
    if any(len(triple) != 3 for triple in triples):
        raise DataError(
            f"Expected triples of subject, predicate and object, got {triples!r}. Correct the row, "
            "or use data_format: pairs."
        )
    return " | ".join(
        f"{subject} : {predicate.lower().replace('_', ' ')} : {value}"
        for subject, predicate, value in triples
    )
