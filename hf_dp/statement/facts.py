"""What the ledger does not know about a run: what weakens its claim, how it was made, and the names
of what it computes without noise.

What is lost cannot be taken back, so weaknesses only add up: over the resumes of one run and, as
:class:`EarlierRun`, over all runs on the same rows that a run names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

from hf_dp import _validate
from hf_dp._dataclasses import Kept, unless_asked
from hf_dp.accounting import EARLIER, Ledger
from hf_dp.errors import LedgerError
from hf_dp.plans.units import RELATIONS, UNITS, weakest_relation, weakest_unit
from hf_dp.statement.audited import AuditResult
from hf_dp.statement.durable import Head

PUBLIC_ROWS, OTHER_ROWS = "public_rows", "other_rows"
OTHER_TRAINING = (PUBLIC_ROWS, OTHER_ROWS)  # the latter weakens a claim more
# Which rows are looked at before the first draw (:mod:`hf_dp.batches.when_drawn`).
ALL, WHEN_DRAWN = LOOK_OVERS = ("all", "when_drawn")
ANY, FEW, ONE = SHAPES = ("any", "few", "one")  # of physical batches
FIRST, LONGEST = 10_000, "longest_row"  # of the latter, how many still are; and its argument
EVALUATION_ON_TRAINING_ROWS = "evaluation_on_training_rows"  # a name among those `released`


@dataclass(frozen=True, kw_only=True)
class Flags(Kept):
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
        experts: whether the model chooses among experts, which rounding may decide.
        public_teacher: whether losses read another model, which the user states to be public.
        public_adapter: whether an adapter's initial weights, or what trains of it, came from data
            that the user states to be public.
        observers: names of code that is not hf_dp's and saw what was not noised. No epsilon is
            established for such a run.
        refuted: whether an audit refuted what the ledger gives. No epsilon holds for the run, its
            checkpoints among it, nor for what comes after it.
        conditions: of an earlier run, what its epsilon rests on that no record shows.

    Raises: InvalidArgumentError for a value of another type.
    """

    insecure_seed: bool = False
    released: tuple[str, ...] = ()
    model_selection: bool = False
    rows_are_chunks: bool = False
    evaluation_compared: bool = True
    other_training: str | None = None
    observers: tuple[str, ...] = ()
    experts: bool = unless_asked(False)
    public_teacher: bool = unless_asked(False)
    public_adapter: bool = unless_asked(False)
    refuted: bool = unless_asked(False)
    conditions: tuple[str, ...] = unless_asked(())

    def __post_init__(self) -> None:
        for name in (
            *("insecure_seed", "model_selection", "rows_are_chunks", "evaluation_compared"),
            *("experts", "public_teacher", "public_adapter", "refuted"),
        ):
            if not isinstance(getattr(self, name), bool):
                raise _validate.invalid(name, getattr(self, name), "to be True or False")
        if self.other_training is not None:
            _validate.one_of("other_training", self.other_training, OTHER_TRAINING)
        for name in ("released", "observers", "conditions"):
            names = getattr(self, name)
            if not isinstance(names, (list, tuple)) or not all(
                isinstance(each, str) and each and each.isprintable() for each in names
            ):
                raise _validate.invalid(name, names, "to be a list of names")
            object.__setattr__(self, name, tuple(dict.fromkeys(names)))

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
            experts=self.experts or other.experts,
            public_teacher=self.public_teacher or other.public_teacher,
            public_adapter=self.public_adapter or other.public_adapter,
            refuted=self.refuted or other.refuted,
            conditions=(*self.conditions, *other.conditions),
        )

    def includes(self, other: Flags) -> bool:
        """Return whether ``other`` adds no weakness."""
        return self.merged(other) == self


@dataclass(frozen=True)
class EarlierRun(Flags):
    """What an earlier private run on the same rows claims, as far as it limits later claims; its
    unit and relation are codes of :mod:`hf_dp.plans.units`. What it released up to its ``head`` is
    counted; where that is None, nobody knows how far."""

    run_id: str
    unit: str
    relation: str
    head: Head | None = unless_asked(None)

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
        relation = weakest_relation((self.relation, other.relation))
        heads = [each for each in (self.head, other.head) if each is not None]
        head = max(heads, key=lambda each: each.lines, default=None)
        return replace(both, unit=unit, relation=relation, head=head)

    def counts(self, head: Head) -> bool:
        """Return whether all is counted that the run had released when it was that far."""
        return self.head is not None and (head.lines < self.head.lines or head == self.head)


@dataclass(frozen=True, kw_only=True)
class Weaknesses(Flags):
    """What weakens the claims of a run and of the ``earlier`` runs on the same rows, each listed
    once."""

    earlier: tuple[EarlierRun, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        runs = self.earlier
        if not isinstance(runs, Sequence) or not all(isinstance(run, EarlierRun) for run in runs):
            raise _validate.invalid("earlier", runs, "to be a list of EarlierRun")
        object.__setattr__(self, "earlier", each_once(runs))

    def merged(self, other: Flags) -> Self:
        """Return these facts, as weak as both make them."""
        both = super().merged(other)
        return replace(both, earlier=(*self.earlier, *getattr(other, "earlier", ())))

    @property
    def everywhere(self) -> tuple[Flags, ...]:
        """The run itself and its earlier runs."""
        return (self, *self.earlier)


@dataclass(frozen=True)
class RunFacts(Weaknesses):
    """What weakens the claim (:class:`Weaknesses`), and how the run was made.

    Args:
        trained: which parameters were trained, in words and numbers.
        precision: that of gradient sums and noise, for example "float32".
        noise_generator, sampling_generator: their kind and how they were seeded, never a seed.
    """

    trained: str
    precision: str
    noise_generator: str
    sampling_generator: str
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    audit: AuditResult | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, weaknesses: Weaknesses, values: object) -> RunFacts:
        """Read back what :meth:`made` wrote. Raises: LedgerError."""
        given = dict(values) if isinstance(values, Mapping) else {}
        return cls.from_dict({**given, **vars(weaknesses)})

    def made(self) -> dict[str, object]:
        """Return how the run was made, without what weakens its claim, as plain data."""
        return {name: value for name, value in self.to_dict().items() if name not in NAMES}


NAMES = tuple(item.name for item in fields(Weaknesses))


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
            "`earlier` to name these runs, got none. Use `hf_dp.statement.evidence.earlier_runs`."
        )


# -- public data that the base model may have seen ---

# Data sets that share their text: the tasks of GLUE, and where their sentences come from.
_SAME_TEXT = {
    "qqp": {"quora", "quoraduplicates", "quoraquestionpairs"},
    "qnli": {"squad", "rajpurkarsquad"},
    "mnli": {"allnli", "multinli", "nli"},
    "sst2": {"sst", "stanfordsentiment", "stanfordsentimenttreebank"},
}

_NOT_A_NAME = {"default", "private", "train"}


def seen_in_pretraining(dataset: str | None, sources: Iterable[str]) -> list[str]:
    """List the ``sources`` that seem to hold the text of ``dataset``: that name it, a collection
    that contains it, or a data set with the same text.

    Names are compared by the beginnings of their last two components, letters and digits only. A
    needless warning costs less than a missing one."""
    wanted = _names(dataset or "")
    for task, same in _SAME_TEXT.items():
        if any(_alike(name, known) for name in wanted for known in (task, *same)):
            wanted |= {task, *same}
    return [
        source for source in sources if any(_alike(a, b) for a in wanted for b in _names(source))
    ]


def _names(name: str) -> set[str]:
    parts = [re.sub(r"[^a-z0-9]", "", part) for part in re.split(r"[/:]", name.lower())]
    parts = [part for part in parts if part and part not in _NOT_A_NAME]
    return set(parts[-2:] if len(parts) > 2 else parts[-1:] if "/" in name else parts)


def _alike(one: str, other: str) -> bool:
    return min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))


# -- what a Trainer computes from training rows without noise ---

# Name in logs, trackers, trainer_state.json and metrics -> name under which a user may release it.
# Runtimes and counts reveal the sizes of draws.
UNNOISED = {
    **dict.fromkeys(("loss", "train_loss", "training_loss"), "training_loss"),
    **dict.fromkeys(("clipped_gradient_norm", "measured_signal_to_noise"), "clipped_gradient_norm"),
    **{
        name: name
        for name in "grad_norm total_flos num_input_tokens_seen train_runtime "
        "train_samples_per_second train_steps_per_second train_tokens_per_second".split()
    },
}
# The name in logs for the figure that the paper gives for DP-FP as published.
NO_EPSILON = "papers_figure_not_established"
# What else a private run logs: functions of what was released and of public numbers.
_RELEASED_ANYWAY = frozenset(
    {"learning_rate", "signal_to_noise", "epsilon", NO_EPSILON, "epoch", "step"}
)
_OF_OTHER_ROWS = ("eval_", "test_")
# What may be released at all.
TRAINING_LOSS, CLIPPED_GRADIENT_NORM = RELEASABLE = ("training_loss", "clipped_gradient_norm")


def withhold(
    logs: dict[str, float], released: Collection[str], *, gradients_are_noised: bool = True
) -> None:
    """Remove from ``logs``, in place, what the user did not ask to release; of ``grad_norm`` the
    norm of noised gradients may stay."""
    for name, quantity in UNNOISED.items():
        if quantity == "grad_norm" and gradients_are_noised:
            continue
        if quantity not in released:
            logs.pop(name, None)


def unknown_names(logs: Iterable[str], also_known: Collection[str] = ()) -> list[str]:
    """Return the names of what may be anything, an un-noised loss, too."""
    known = {*UNNOISED, *_RELEASED_ANYWAY, *also_known}
    return [name for name in logs if name not in known and not name.startswith(_OF_OTHER_ROWS)]
