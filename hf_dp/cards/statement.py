"""The privacy statement: what a run may claim, computed from what ran and printed everywhere the
same.

The numbers come from the ledger, never from the plan's intentions; epsilon is a bound, rounded up;
what it does not cover is part of the statement. What must be said follows Ponomareva et al. 2023
(arXiv 2303.00654), "How to report".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import Any

from hf_dp import _validate
from hf_dp.accounting import (
    ACCOUNTANTS,
    BOUNDS,
    EARLIER,
    RELEASE,
    SELECTION,
    TRAINING,
    BestOfRandomRuns,
    Event,
    Ledger,
    RandomizedResponse,
    round_up,
)
from hf_dp.accounting.comparison import compare
from hf_dp.accounting.composition import compose
from hf_dp.cards.forward_wording import NOT_ESTABLISHED_REASONS
from hf_dp.cards.units import EXAMPLE, NONE, relation_of, unit_of, weakest_relation, weakest_unit
from hf_dp.cards.weaknesses import Weaknesses, checked_fields, plain, refuse_unnamed
from hf_dp.cards.wording import (
    COVERED,
    mechanism_of,
    not_covered,
    relation_in_words,
    released_in_words,
    sampling_of,
    unit_in_words,
)
from hf_dp.errors import AccountingRangeError, LedgerError
from hf_dp.forward_plan import PUBLISHED
from hf_dp.plan import PrivacyPlan

PROVEN = "proven"
PROVEN_WEIGHTS_ONLY = "proven for the weights only"
NOT_PRIVATE = "not private"
NOT_ESTABLISHED = "as published, not established"

EPSILON_DIGITS = 3  # decimals of a printed epsilon
DELTA_DIGITS = 4  # significant digits of a printed delta


@dataclass(frozen=True)
class RunFacts(Weaknesses):
    """What the ledger does not know: what weakens the claim (:class:`Weaknesses`), and how the run
    was made.

    Args:
        privacy_mode: how privacy was obtained; "dp_sgd" (any optimizer) or "dp_fp".
        trained: which parameters were trained, in words and numbers.
        precision: of gradient sums and noise, for example "float32".
        noise_generator, sampling_generator: their kind and how they were seeded; never a seed.
        versions: library -> version.

    Raises: InvalidArgumentError for a privacy mode whose statement is not known.
    """

    privacy_mode: str
    trained: str
    precision: str
    noise_generator: str
    sampling_generator: str
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of(
            "privacy_mode",
            self.privacy_mode,
            ("dp_sgd", "dp_fp"),
            "Only such a run has a privacy statement.",
        )
        object.__setattr__(self, "versions", dict(self.versions))


@dataclass(frozen=True)
class AccountantResult:
    """What one accountant says about the run.

    Args:
        accountant: "pld", "rdp", "prv" or "gdp_clt".
        epsilon: rounded up to three decimals, or None if there is none to give; ``note`` then says
            why.
        kind: "bound" or "estimate" (may be below the true epsilon); None without an epsilon.
        estimate: point estimate beside the bound (prv), rounded up to three decimals, otherwise
            None.
        note: why there is no epsilon, else empty.
    """

    accountant: str
    epsilon: float | None
    kind: str | None
    estimate: float | None = None
    note: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AccountantResult:
        """Read back what a statement's ``to_dict`` wrote. Raises: LedgerError for unknown or
        missing fields."""
        return cls(**checked_fields(cls, values))


@dataclass(frozen=True)
class PrivacyStatement:
    """What the run may claim. Made by :meth:`from_ledger`; nothing else computes these values.

    Attributes:
        status: PROVEN, PROVEN_WEIGHTS_ONLY (the user released un-noised quantities), NOT_PRIVATE or
            NOT_ESTABLISHED (DP-FP as published: no bound is known for what ran). As weak as that of
            the weakest run that is named as earlier.
        status_reason: in words.
        epsilon: the headline, an upper bound rounded up to three decimals; None when the run is not
            private.
        delta: as in the plan, not rounded (:attr:`delta_text` is rounded up).
        accountant: whose bound the headline is; ``accountant_note`` says why, if not the one asked
            for.
        epsilons: one result for each of :data:`hf_dp.accounting.ACCOUNTANTS`.
        target_epsilon: what the noise was calibrated to, or None when the noise was given.
        unit, neighboring_relation: in words; the weakest of this run's and of all earlier runs'.
            ``unit_code``: one of :data:`hf_dp.cards.units.UNITS`.
        noise_multipliers, sample_rates: of the mechanisms that ran (the plan's when nothing ran),
            in order.
        noise standard deviations are noise_multiplier x the sensitivity (clipping_norm and its
        rounding margin), on the sum.
        steps: that ran, by the ledger; steps_planned: by the plan.
        expected_batch_size: the public divisor of the noisy sum.
        num_examples: N, stated as public.
        mechanisms: the ledger's rows.
        covered, not_covered: in words.
        facts: what the trainer said about the run.
    """

    status: str
    status_reason: str
    epsilon: float | None
    delta: float
    accountant: str
    accountant_note: str
    epsilons: tuple[AccountantResult, ...]
    target_epsilon: float | None
    unit: str
    unit_code: str
    neighboring_relation: str
    sampling: str
    mechanism: str
    noise_multipliers: tuple[float, ...]
    clipping_norm: float
    clipping: str
    sample_rates: tuple[float, ...]
    expected_batch_size: float
    steps: int
    steps_planned: int
    num_examples: int
    mechanisms: tuple[Mapping[str, Any], ...]
    covered: str
    not_covered: tuple[str, ...]
    facts: RunFacts

    @classmethod
    def from_ledger(cls, plan: PrivacyPlan, ledger: Ledger, facts: RunFacts) -> PrivacyStatement:
        """The statement of a run; pure, about a second (four accountants).

        An accountant outside its range is listed without epsilon. Where the plan's accountant is
        out of range, or is no bound, the headline is the smallest bound that there is, and
        ``accountant_note`` says so.

        Raises:
            AccountingRangeError: no accountant gives a finite bound.
            InvalidArgumentError: a unit or relation for which no statement is known.
            LedgerError: the ledger counts earlier runs, and ``facts`` name none.
        """
        _validate.one_of("privacy_unit", plan.privacy_unit, ("example",))
        _validate.one_of("neighboring_relation", plan.neighboring_relation, ("zero_out",))
        refuse_unnamed(ledger, facts.earlier)
        unit = weakest_unit((unit_of(plan), *(run.unit for run in facts.earlier)))
        relation = weakest_relation(
            (relation_of(plan), *(run.relation for run in facts.earlier)), unit
        )
        reason = _why_not_private(ledger, facts)
        if reason:
            note = "not computed: the run is not private"
            epsilons = tuple(AccountantResult(name, None, None, note=note) for name in ACCOUNTANTS)
            epsilon, accountant, accountant_note = None, plan.accountant, note
            status = NOT_PRIVATE
        elif not_established(plan, ledger):
            none = "no bound is known for what ran"
            epsilons = tuple(
                AccountantResult(name, None, None, note=none)
                if name in BOUNDS
                else _result(ledger, plan.delta, name)
                for name in ACCOUNTANTS
            )
            epsilon, accountant = None, plan.accountant
            accountant_note = none
            unit = relation = NONE
            status, reason = (
                NOT_ESTABLISHED,
                f"{'; '.join(NOT_ESTABLISHED_REASONS)} (Du and Mi 2021 claim otherwise)",
            )
        else:
            epsilons = tuple(_result(ledger, plan.delta, name) for name in ACCOUNTANTS)
            chosen, accountant_note = _headline(epsilons, plan.accountant)
            epsilon, accountant = chosen.epsilon, chosen.accountant
            status, reason = _proven(facts)
        rates = [pair for event in ledger.events for pair in _rates(event)]
        ran = rates or [(plan.noise_multiplier, plan.sample_rate)]
        return cls(
            status=status,
            status_reason=reason,
            epsilon=epsilon,
            delta=plan.delta,
            accountant=accountant,
            accountant_note=accountant_note,
            epsilons=epsilons,
            target_epsilon=None if status == NOT_ESTABLISHED else plan.target_epsilon,
            unit=unit_in_words(unit, facts),
            unit_code=unit,
            neighboring_relation=relation_in_words(relation),
            sampling=sampling_of(plan),
            mechanism=mechanism_of(plan),
            noise_multipliers=tuple(dict.fromkeys(sigma for sigma, _ in ran)),
            clipping_norm=plan.clipping_norm,
            clipping=plan.clipping,
            sample_rates=tuple(dict.fromkeys(rate for _, rate in ran)),
            expected_batch_size=plan.expected_batch_size,
            steps=ledger.steps(TRAINING),
            steps_planned=plan.steps,
            num_examples=plan.num_examples,
            mechanisms=tuple(ledger.to_list()),
            covered=COVERED,
            not_covered=not_covered(facts, plan),
            facts=facts,
        )

    @property
    def proven(self) -> bool:
        """The headline holds: for all that left the run, or (un-noised releases) for the
        weights."""
        return self.status in (PROVEN, PROVEN_WEIGHTS_ONLY)

    @property
    def epsilon_text(self) -> str:
        """The headline as it is printed, or "none"."""
        return epsilon_text(self.epsilon)

    @property
    def delta_text(self) -> str:
        """Delta with four significant digits, rounded up."""
        return delta_text(self.delta)

    def sentence(self) -> str:
        """The claim in one sentence; when there is none to make, that."""
        if self.status == NOT_ESTABLISHED:
            return (
                "NO differential privacy guarantee is established for this run: "
                f"{self._published()} was trained by DP-FP as published, whose encoder is trained "
                "by gradients that were not noised. No epsilon is claimed."
            )
        if not self.proven:
            return f"This run is NOT private: {self.status_reason}. No epsilon is claimed."
        what = "The released weights"
        row = "one row (a chunk of a longer text)" if self.rows_are_chunks else "one row"
        unit = row if self.unit_code == EXAMPLE else f"the text of {row}, labels being public,"
        claim = (
            f"are ({self.epsilon_text}, {self.delta_text})-differentially private with respect to "
            "zero-out of"
        )
        of = (
            f"{unit} of the training set of {self.num_examples:,} rows ({self.accountant} upper "
            "bound"
        )
        ran = f"{self._what_ran()})"
        chosen = sum(row["steps"] for row in self.mechanisms if row["purpose"] == SELECTION)
        if chosen:
            ran = f"{chosen} noisy release{'s' * (chosen > 1)} to choose what trains, {ran}"
        if any(row["purpose"] == EARLIER for row in self.mechanisms):
            ran = f"what earlier runs released of the same rows, {ran}"
        end = ""
        if self.status == PROVEN_WEIGHTS_ONLY:
            what = "The released weights alone"
            end = (
                f"; this does not cover {', '.join(released_in_words(self.facts))}, released "
                "without noise"
            )
        return f"{what} {claim} {of}, {ran}{end}."

    @property
    def rows_are_chunks(self) -> bool:
        """Whether a row is a chunk of a longer text, as declared for this run or for an earlier one
        on the same rows."""
        return any(run.rows_are_chunks for run in self.facts.everywhere)

    def _published(self) -> str:
        """Which run was trained by DP-FP as published: this one, unless only earlier ones were."""
        types = {
            row["purpose"] == EARLIER
            for row in self.mechanisms
            if row["type"] == "PublishedForwardNoise"
        }
        return "an earlier run on the same rows, which it names," if types == {True} else "it"

    def _what_ran(self) -> str:
        released = [row["type"] for row in self.mechanisms if row["purpose"] == RELEASE]
        rows = "a noisy representation of each row released once"
        labels = ", labels by randomised response" if "RandomizedResponse" in released else ""
        if "RecordRelease" in released:
            return rows + labels
        if self.steps == 0:
            return f"no step on the training set has run{labels}"
        steps = f"{self.steps:,} steps" if self.steps != 1 else "1 step"
        sampling = (
            "truncated Poisson sampling"
            if "a uniformly random part" in self.sampling
            else "Poisson sampling"
        )
        return f"{steps} of {self.mechanism_name} with {sampling}{labels}"

    @property
    def mechanism_name(self) -> str:
        """Short name of the mechanism."""
        types = {row["type"] for row in self.mechanisms if row["purpose"] != EARLIER}
        if self.facts.privacy_mode == "dp_sgd":
            return "DP-SGD"
        if self.status == NOT_ESTABLISHED:
            return "DP-FP as published (not established)"
        return (
            "DP-SGD below released representations"
            if "SumAndRows" in types
            else "DP-FP with a frozen encoder"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return plain(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyStatement:
        """Read back what :meth:`to_dict` wrote. Raises: LedgerError for unknown, missing or bad
        fields."""
        given = checked_fields(cls, values)
        try:
            given["epsilons"] = tuple(AccountantResult.from_dict(row) for row in given["epsilons"])
            given["facts"] = RunFacts.from_dict(given["facts"])
            for name in ("noise_multipliers", "sample_rates", "mechanisms", "not_covered"):
                given[name] = tuple(given[name])
        except TypeError as error:
            raise LedgerError(
                f"The privacy statement cannot be read ({error}): it was edited or damaged."
            ) from error
        return cls(**given)

    def __str__(self) -> str:
        lines = [f"Privacy: {self.status}", f"  {self.sentence()}"]
        if self.proven or self.status == NOT_ESTABLISHED:
            lines += [f"  {_row_text(row)}" for row in self.epsilons]
        if self.accountant_note and self.proven:
            lines.append(f"  {self.accountant_note}")
        return "\n".join(lines)


def epsilon_text(epsilon: float | None) -> str:
    """An epsilon that is already rounded up, as printed; "none" where there is none."""
    if epsilon is None:
        return "none"
    return "0" if epsilon == 0 else f"{epsilon:.{EPSILON_DIGITS}f}"


def delta_text(delta: float) -> str:
    """Delta rounded up to four significant digits, so that "(epsilon, delta)-private" stays
    true."""
    exact = Decimal(repr(float(delta)))
    if exact == 0:
        return "0"
    last_digit = Decimal(1).scaleb(exact.adjusted() - DELTA_DIGITS + 1)
    return f"{float(exact.quantize(last_digit, ROUND_CEILING)):g}"


def not_established(plan: PrivacyPlan, ledger: Ledger) -> bool:
    """Whether what is planned, or ran, has no bound that is known."""
    planned = () if plan.forward is None or plan.forward.variant != PUBLISHED else (plan.event(),)
    return any(not event.established for event in (*planned, *ledger.events))


def _why_not_private(ledger: Ledger, facts: RunFacts) -> str:
    if facts.insecure_seed:
        return (
            "noise and sampling came from a fixed seed (insecure_seed), and whoever knows it can "
            "subtract the noise"
        )
    for run in facts.earlier:
        if run.insecure_seed:
            return (
                f"noise and sampling of {run.name} on the same rows came from a fixed seed "
                "(insecure_seed), and whoever knows it can subtract that noise"
            )
    noiseless = sum(event.steps for event in ledger.events if compose(event).noiseless)
    return f"{noiseless} of {ledger.steps()} steps ran without noise" if noiseless else ""


def _proven(facts: RunFacts) -> tuple[str, str]:
    reason = (
        "Poisson sampling, per-example clipping and Gaussian noise, composed over the steps in the "
        "ledger"
    )
    if facts.privacy_mode == "dp_fp":
        reason = (
            "what trains above the noise is a function of clipped and noised representations; "
            "below it nothing trains, or DP-SGD does; composed over the releases in the ledger"
        )
    released = released_in_words(facts)
    if not released:
        return PROVEN, reason
    return PROVEN_WEIGHTS_ONLY, (
        f"{reason}; epsilon covers the weights only, because these were released without noise at "
        f"the user's request: {', '.join(released)}"
    )


def _result(ledger: Ledger, delta: float, accountant: str) -> AccountantResult:
    (answer,) = compare(ledger.events, delta, (accountant,))
    value = answer.epsilon
    if (
        value is None
    ):  # DP-FP's figure, too, stands in the note: no number here can be taken for an epsilon
        return AccountantResult(accountant, None, None, note=answer.note)
    if not math.isfinite(value.value):
        return AccountantResult(accountant, None, None, note="no finite epsilon")
    point = None if value.estimate is None else round_up(value.estimate, EPSILON_DIGITS)
    return AccountantResult(accountant, value.rounded_up(EPSILON_DIGITS), value.kind, point)


def _headline(rows: tuple[AccountantResult, ...], wanted: str) -> tuple[AccountantResult, str]:
    """The result that the claim is made with, and why if it is not the one asked for."""
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


def _rates(event: Event) -> list[tuple[float, float]]:
    """(noise multiplier, sample rate) of what an event consists of."""
    if isinstance(event, BestOfRandomRuns):
        return [pair for each in event.run for pair in _rates(each)]
    if isinstance(event, RandomizedResponse):
        return []
    rate = getattr(event, "sample_rate", 1.0)
    rows = getattr(event, "record_noise_multiplier", None)
    return [(event.noise_multiplier, rate), *([] if rows is None else [(rows, rate)])]


def _row_text(row: AccountantResult) -> str:
    if row.epsilon is None:
        return f"{row.accountant:<8} -        {row.note}"
    point = "" if row.estimate is None else f" (point estimate {epsilon_text(row.estimate)})"
    return f"{row.accountant:<8} {epsilon_text(row.epsilon):<8} {row.kind}{point}"
