"""What weakens the claim of a run, apart from its noise.

What is lost cannot be taken back, so weaknesses only add up: over the resumes of one run and, as
:class:`EarlierRun`, over all runs on the same rows that a run names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
from hf_dp.accounting import EARLIER, Ledger
from hf_dp.errors import InvalidArgumentError, LedgerError
from hf_dp.plans.units import (
    RELATIONS,
    UNITS,
    weakest_relation,
    weakest_unit,
)

PUBLIC_ROWS, OTHER_ROWS = "public_rows", "other_rows"
OTHER_TRAINING = (PUBLIC_ROWS, OTHER_ROWS)  # the latter weakens a claim more
_WHERE_GIVEN: dict[str, Any] = {"other_training": None, "observers": []}  # written if they are set


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What weakens the claim of one run.

    Args:
        insecure_seed: whether noise or sampling can be reproduced from a known seed. Such a run is
            not private.
        released: names of un-noised quantities that the user released, for example "training_loss".
        model_selection: whether a checkpoint was chosen by evaluation (load_best_model_at_end,
            early stopping).
        rows_are_chunks: whether each row is a chunk of a longer text, as the user declared.
        evaluation_compared: whether every evaluation set was compared with the training rows. A set
            that has no column in common with them is not.
        other_training: what rows other training of these weights was on, as the user declared: one
            of :data:`OTHER_TRAINING`; None where there was none beside the runs that count.
        observers: names of code that is not hf_dp's and saw what was not noised. No epsilon is
            established for such a run.

    Raises: InvalidArgumentError for a value of another type.
    """

    insecure_seed: bool = False
    released: tuple[str, ...] = ()
    model_selection: bool = False
    rows_are_chunks: bool = False
    evaluation_compared: bool = True
    other_training: str | None = None
    observers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("insecure_seed", "model_selection", "rows_are_chunks", "evaluation_compared"):
            if not isinstance(getattr(self, name), bool):
                raise _validate.invalid(name, getattr(self, name), "to be True or False")
        if self.other_training is not None:
            _validate.one_of("other_training", self.other_training, OTHER_TRAINING)
        for field_name in ("released", "observers"):
            names = getattr(self, field_name)
            if isinstance(names, str) or not _is_list_of(str, names) or not all(names):
                raise _validate.invalid(field_name, names, "to be a list of names")
            object.__setattr__(self, field_name, tuple(dict.fromkeys(names)))

    def merged(self, other: Flags) -> Self:
        """Return these facts, as weak as both make them."""
        return replace(
            self,
            insecure_seed=self.insecure_seed or other.insecure_seed,
            released=(*self.released, *other.released),
            model_selection=self.model_selection or other.model_selection,
            rows_are_chunks=self.rows_are_chunks or other.rows_are_chunks,
            evaluation_compared=self.evaluation_compared and other.evaluation_compared,
            other_training=max(
                self.other_training, other.other_training, key=(None, *OTHER_TRAINING).index
            ),
            observers=(*self.observers, *other.observers),
        )

    def includes(self, other: Flags) -> bool:
        """Return whether ``other`` adds no weakness."""
        return self.merged(other) == self

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        values = plain(asdict(self))
        for each in (values, *values.get("earlier", ())):
            for name in _WHERE_GIVEN:
                if not each[name]:
                    del each[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        try:
            return cls(**checked_fields(cls, _with_all(values), LedgerError))
        except (InvalidArgumentError, TypeError, ValueError) as error:
            raise LedgerError(f"{cls.__name__} cannot be read: {error}") from error


@dataclass(frozen=True)
class EarlierRun(Flags):
    """What an earlier private run on the same rows claims, as far as it limits later claims.

    Args:
        run_id: which run it is.
        unit, relation: codes of :mod:`hf_dp.plans.units`.

    Raises: InvalidArgumentError for an unknown code.
    """

    run_id: str
    unit: str
    relation: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.run_id, str) or not self.run_id:
            raise _validate.invalid("run_id", self.run_id, "to be a name")
        _validate.one_of("unit", self.unit, UNITS)
        _validate.one_of("relation", self.relation, RELATIONS)

    @property
    def name(self) -> str:
        """The name of the run in cards."""
        return f"the earlier run {self.run_id[:8]}"

    def merged(self, other: Flags) -> Self:
        """Return what two accounts of one run, from different times, know together."""
        both = super().merged(other)
        if not isinstance(other, EarlierRun):
            return both
        unit = weakest_unit((self.unit, other.unit))
        relation = weakest_relation((self.relation, other.relation), unit)
        return replace(both, unit=unit, relation=relation)


@dataclass(frozen=True, kw_only=True)
class Weaknesses(Flags):
    """What weakens the claims of a run and of the ``earlier`` runs on the same rows.

    Each earlier run is listed once.
    """

    earlier: tuple[EarlierRun, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_list_of(EarlierRun, self.earlier):
            raise _validate.invalid("earlier", self.earlier, "to be a list of EarlierRun")
        object.__setattr__(self, "earlier", each_once(self.earlier))

    def merged(self, other: Flags) -> Self:
        """Return these facts, as weak as both make them."""
        both = super().merged(other)
        return replace(both, earlier=(*self.earlier, *getattr(other, "earlier", ())))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        given = checked_fields(cls, _with_all(values), LedgerError)
        if not isinstance(given["earlier"], list):
            raise LedgerError(f"{cls.__name__} cannot be read: expected `earlier` to be a list.")
        given["earlier"] = tuple(EarlierRun.from_dict(run) for run in given["earlier"])
        return super().from_dict(given)

    @property
    def everywhere(self) -> tuple[Flags, ...]:
        """The run itself and its earlier runs."""
        return (self, *self.earlier)


NAMES = tuple(item.name for item in fields(Weaknesses))


def _with_all(values: Any) -> Any:
    return {**_WHERE_GIVEN, **values} if isinstance(values, Mapping) else values


def each_once(runs: Iterable[EarlierRun]) -> tuple[EarlierRun, ...]:
    """Merge the accounts of each run, in the order in which the runs first appear."""
    found: dict[str, EarlierRun] = {}
    for run in runs:
        found[run.run_id] = found[run.run_id].merged(run) if run.run_id in found else run
    return tuple(found.values())


def refuse_unnamed(ledger: Ledger, earlier: tuple[EarlierRun, ...]) -> None:
    """Raise LedgerError when a ledger counts releases of earlier runs, but none is named."""
    if ledger.steps(EARLIER) and not earlier:
        raise LedgerError(
            f"The ledger counts {ledger.steps(EARLIER)} releases of earlier runs; expected "
            "`earlier` to name these runs, got none. What they left unprotected is not known. "
            "Make `earlier` with `hf_dp.trainer.from_arguments.earlier_claims`."
        )


def plain(value: Any) -> Any:
    """Turn tuples into lists and mappings into dicts, as JSON and YAML give them back."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _is_list_of(kind: type[Any], values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)
