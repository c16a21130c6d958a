"""Built-in synthetic tables with a sentence about each, in the columns of E2E; no download.

Rows are made by rule and hold nobody's data. They show that a recipe runs, not how good a model is.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

_FIRST = ("Golden", "Silver", "Quiet", "Green", "Old", "Little", "Blue", "Merry", "Lucky", "Stone")
_SECOND = ("Fern", "Harbor", "Lantern", "Kettle", "Orchard", "Garden", "Bridge", "Clock", "Anchor")
_VALUES = {
    "eatType": ("restaurant", "pub", "coffee shop"),
    "food": ("Italian", "Indian", "Chinese", "French", "Greek"),
    "priceRange": ("cheap", "moderate", "high"),
    "area": ("riverside", "city center"),
    "familyFriendly": ("yes", "no"),
}
_SENTENCES = (
    "{name} is a {priceRange} {eatType} in the {area} that serves {food} food.{family}",
    "In the {area} there is a {eatType} called {name}, with {food} food at {priceRange} prices."
    "{family}",
    "{name} serves {food} food. It is a {priceRange} {eatType} in the {area}.{family}",
)
_FAMILY = {"yes": " Families are welcome.", "no": " It is not for families."}


def demo_tables(num_train: int = 2_000, num_validation: int = 100) -> DatasetDict:
    """Return rows of ``meaning_representation`` and ``human_reference``: ``train``, ``validation``.

    The two share no name, so no row of one is in the other.
    """
    from datasets import Dataset, DatasetDict

    half = len(_SECOND) // 2
    return DatasetDict(
        {
            split: Dataset.from_list(_rows(split, count, names))
            for split, count, names in (
                ("train", num_train, _SECOND[half:]),
                ("validation", num_validation, _SECOND[:half]),
            )
        }
    )


def _rows(split: str, count: int, names: tuple[str, ...]) -> list[dict[str, str]]:
    chosen = random.Random(split)
    rows = []
    for _ in range(count):
        name = f"The {chosen.choice(_FIRST)} {chosen.choice(names)}"
        cells = {key: chosen.choice(values) for key, values in _VALUES.items()}
        table = ", ".join(f"{key}[{value}]" for key, value in {"name": name, **cells}.items())
        sentence = chosen.choice(_SENTENCES).format(
            name=name, family=_FAMILY[cells["familyFriendly"]], **cells
        )
        rows.append({"meaning_representation": table, "human_reference": sentence})
    return rows
