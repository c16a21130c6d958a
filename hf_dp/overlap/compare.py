"""A check of whether an evaluation set holds rows of the training set.

It asks two questions about rows, not about objects. *Provenance*: do both sets read the same row of
the same memory, or the same index of the same object? *Content*: how many rows have inputs that all
equal those of some training row? Rows are compared by keyed hashes, with a key drawn for each
:class:`TrainingRows`; neither leaves the process.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from transformers.utils import logging

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap.encoding import is_picture
from hf_dp.overlap.hashes import Columns, hash_rows, is_repeatable
from hf_dp.overlap.origin import Part, parts_of, share_memory

logger = logging.get_logger(__name__)

# If a larger share of an evaluation set equals training rows, it is no coincidence.
LARGEST_SHARE = 0.1
IDS, ID_ENDINGS = ("id", "idx", "index", "guid", "uid"), ("_id", "_idx", "_index", "_guid", "_uid")


@dataclass(frozen=True)
class Overlap:
    """What an evaluation set shares with the training set.

    Attributes:
        derived: whether, by provenance, at least one row is a row of the training set.
        equal: how many rows equal some training row; 0, uncounted, if derived.
        rows: how many rows there are.
        comparable: False without a common column to compare.
    """

    derived: bool
    equal: int = field(repr=False)
    rows: int
    comparable: bool

    @property
    def refused(self) -> bool:
        """Whether the evaluation set counts as training data."""
        return self.derived or self.equal > self.rows * LARGEST_SHARE


class TrainingRows:
    """The rows of a training set, to compare evaluation sets with; hashed when first needed.

    Args:
        dataset: the training set.
        read: the names of the arguments of the model's forward; None if unknown.
        labels: the names of label columns.
    """

    def __init__(
        self,
        dataset: Any,
        read: Collection[str] | None,
        labels: Collection[str] = ("label", "labels", "label_ids"),
    ) -> None:
        self.dataset, self.parts = dataset, list(parts_of(dataset))
        self.read, self.labels = read, frozenset(labels)
        self._key = os.urandom(32)
        self._hashes: dict[Columns, np.ndarray] = {}
        self._verdicts: dict[int, tuple[Any, Overlap]] = {}  # keeps the object, and so its id

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: hashes of private rows stay in this process."""
        raise TypeError(
            "TrainingRows holds hashes of private rows and cannot be pickled or copied."
        )

    def has_compared(self, evaluation: Any) -> bool:
        """Return whether this object has been compared before."""
        return id(evaluation) in self._verdicts

    def compare(self, evaluation: Any) -> Overlap:
        """Return what one evaluation set shares with the training set.

        Each object that cannot grow is compared once.
        """
        if not self.has_compared(evaluation) or isinstance(evaluation, list):
            self._verdicts[id(evaluation)] = (evaluation, self._compare(list(parts_of(evaluation))))
        return self._verdicts[id(evaluation)][1]

    def _compare(self, parts: list[Part]) -> Overlap:
        rows = sum(part.length for part in parts)
        if not rows or share_memory(
            self.parts, parts, lambda name: name in self.labels or is_id(name)
        ):
            return Overlap(derived=rows > 0, equal=0, rows=rows, comparable=True)
        for served in (False, True):
            columns = self._common_columns(parts, served)
            if columns is not None and not all(
                is_repeatable(part, columns) for part in (*self.parts, *parts)
            ):
                break  # rows that differ on each reading may be equal although they look different
            if columns is not None:
                if columns not in self._hashes:
                    self._hashes[columns] = hash_rows(self.parts, columns, self._key)
                hashes = hash_rows(parts, columns, self._key)
                equal = int(np.isin(hashes, self._hashes[columns]).sum())
                return Overlap(derived=False, equal=equal, rows=len(hashes), comparable=True)
        return Overlap(derived=False, equal=0, rows=rows, comparable=False)

    def _common_columns(self, parts: list[Part], served: bool) -> Columns | None:
        """Return the inputs that all parts of both sets have; None if there are none."""
        examples = [part.fields(served) for part in [*self.parts, *parts] if part.length]
        common = set.intersection(*map(set, examples)) - self.labels
        inputs = common & set(self.read or ()) or {name for name in common if not is_id(name)}
        pictures = {
            name for name in inputs if any(is_picture(example[name]) for example in examples)
        }
        return Columns(tuple(sorted(inputs)), frozenset(pictures), served) if inputs else None


def refuse_training_rows(evaluation: Any, training: TrainingRows) -> bool:
    """Refuse evaluation sets that hold training rows; warn once about a set with a few equal rows.

    Args:
        evaluation: one evaluation set, a mapping of names to sets, each judged by itself, or None.
        training: the training rows.

    Returns:
        whether every set could be compared.

    Raises:
        UnsupportedArgumentError: names the set that holds training rows, if it has a name.
    """
    verdicts = [_judge(name, each, training) for name, each in each_named(evaluation)]
    return all(verdicts)


def each_named(evaluation: Any) -> list[tuple[Any, Any]]:
    """Return the evaluation sets with their names; None names the only one."""
    named = evaluation if isinstance(evaluation, Mapping) else {None: evaluation}
    return [(name, each) for name, each in named.items() if each is not None]


def in_words(name: Any) -> str:
    """Return how errors call an evaluation set."""
    return "evaluation set" if name is None else f"evaluation set {name!r}"


def _judge(name: Any, evaluation: Any, training: TrainingRows) -> bool:
    seen = training.has_compared(evaluation)
    overlap = training.compare(evaluation)
    which = in_words(name)
    if overlap.refused:
        found = (
            "is made from rows of the training set"
            if overlap.derived
            else "holds rows equal to training rows"
        )
        raise UnsupportedArgumentError(
            f"Expected an evaluation set other than the training set, but the {which} {found}: "
            "metrics on training rows are computed from private data without noise, and epsilon "
            "would not cover them. Pass a held-out set, or set evaluate_on_training_rows=True: the "
            "metrics are then a release that the card names."
        )
    if overlap.equal and not seen:
        logger.warning(
            f"Some rows of the {which} equal training rows. Metrics are computed from them without "
            "noise, and epsilon does not cover that."
        )
    return overlap.comparable


def is_id(name: str) -> bool:
    """Return whether a column holds row ids, by its name."""
    return name.lower() in IDS or name.lower().endswith(ID_ENDINGS)
