"""The privacy statement: what a run may claim, computed from what ran.

It is the same wherever it is printed. Its numbers come from the ledger, never from the plan's
intentions. Epsilon is a bound, rounded up, and what it does not cover is part of the statement.
What must be said follows Ponomareva et al. 2023 (arXiv 2303.00654), "How to report".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_dp import _validate
from hf_dp._dataclasses import checked_fields
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
)
from hf_dp.accounting.composition import compose
from hf_dp.errors import InvalidArgumentError, LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import (
    EXAMPLE,
    NEIGHBORING_RELATIONS,
    NONE,
    PRIVACY_UNITS,
    USER,
    Users,
    weakest_relation,
    weakest_unit,
)
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.results import (
    AccountantResult,
    delta_text,
    epsilon_text,
    headline,
    line,
    results_of,
)
from hf_dp.statement.weaknesses import plain, refuse_unnamed
from hf_dp.statement.wording import (
    covered,
    not_covered,
    one_user,
    relation_in_words,
    released_in_words,
    unit_in_words,
)

PROVEN = "proven"
PROVEN_WEIGHTS_ONLY = "proven for the weights only"
NOT_PRIVATE = "not private"
NOT_ESTABLISHED = "as published, not established"


REFUTED_BY_AUDIT = "refuted by an audit"  # instead of an epsilon


@dataclass(frozen=True)
class PrivacyStatement:
    """What the run may claim. Only :meth:`from_ledger` computes these values.

    Noise standard deviations are noise_multiplier x the sensitivity (clipping_norm and its rounding
    margin), on the sum.

    Attributes:
        status: PROVEN, PROVEN_WEIGHTS_ONLY (the user released un-noised quantities), NOT_PRIVATE or
            NOT_ESTABLISHED (DP-FP as published: no bound is known for what ran). It is as weak as
            that of the weakest earlier run that is named.
        status_reason: in words.
        not_established: each reason why no bound is known, in words.
        epsilon: the headline, an upper bound rounded up to three decimals; None when there is no
            bound to claim.
        delta: as in the plan, not rounded (:attr:`delta_text` is rounded up).
        accountant: the accountant whose bound the headline is.
        accountant_note: why that is not the accountant asked for, else empty.
        epsilons: one result for each of :data:`hf_dp.accounting.ACCOUNTANTS`.
        target_epsilon: what the noise was calibrated to, or None when the noise was given.
        unit, neighboring_relation: in words; the weakest of this run and of all earlier runs.
        unit_code, relation_code: codes of :mod:`hf_dp.plans.units`.
        privacy_mode: the argument that selected the mechanism.
        mechanism_name, mechanism, sampling: in words, from the mechanism's plan.
        sampling_code: "poisson" or "none".
        tag: the mechanism's tag on the Hub.
        what_ran: in words, for :meth:`sentence`.
        noise_multipliers, sample_rates: those of the mechanisms that ran, in order (the plan's when
            nothing ran).
        steps: how many ran, by the ledger.
        steps_planned: how many the plan has.
        expected_batch_size: the public divisor of the noisy sum.
        num_examples: N, stated as public.
        mechanisms: the entries of the ledger.
        covered, not_covered: in words.
        facts: what the trainer said about the run.
        users: whose rows are one unit, where users are protected; else None.
    """

    status: str
    status_reason: str
    not_established: tuple[str, ...]
    epsilon: float | None
    delta: float
    accountant: str
    accountant_note: str
    epsilons: tuple[AccountantResult, ...]
    target_epsilon: float | None
    unit: str
    unit_code: str
    neighboring_relation: str
    relation_code: str
    privacy_mode: str
    mechanism_name: str
    mechanism: str
    sampling: str
    sampling_code: str
    tag: str
    what_ran: str
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
    users: Users | None = None

    @classmethod
    def from_ledger(cls, plan: PrivacyPlan, ledger: Ledger, facts: RunFacts) -> PrivacyStatement:
        """Return the statement of a run.

        The function is pure and takes about a second (four accountants). An accountant outside its
        range is listed without epsilon. If the plan's accountant is out of its range or gives no
        bound, the headline is the smallest bound there is, and ``accountant_note`` says so.

        Raises:
            AccountingRangeError: no accountant gives a finite bound.
            InvalidArgumentError: no statement is known for the unit or relation.
            LedgerError: the ledger counts earlier runs, but ``facts`` name none.
        """
        _validate.one_of("privacy_unit", plan.privacy_unit, PRIVACY_UNITS)
        _validate.one_of("neighboring_relation", plan.neighboring_relation, NEIGHBORING_RELATIONS)
        refuse_unnamed(ledger, facts.earlier)
        _refuse_other_units(plan, facts)
        claim = _claim(plan, ledger, facts)
        unit, relation = NONE, NONE
        if claim.status != NOT_ESTABLISHED:
            unit = weakest_unit((plan.unit, *(run.unit for run in facts.earlier)))
            relations = (plan.mechanism.relation, *(run.relation for run in facts.earlier))
            relation = weakest_relation(relations, unit)
        rates = [pair for event in ledger.events for pair in _rates(event)]
        ran = rates or [(plan.noise_multiplier, plan.sample_rate)]
        words = plan.words
        one = plan.one
        selected = "" if plan.selection is None else f". {plan.selection.in_words(one)}"
        return cls(
            status=claim.status,
            status_reason=claim.reason,
            not_established=claim.not_established,
            epsilon=claim.epsilon,
            delta=plan.delta,
            accountant=claim.accountant,
            accountant_note=claim.accountant_note,
            epsilons=claim.epsilons,
            target_epsilon=None if claim.status == NOT_ESTABLISHED else plan.target_epsilon,
            unit=unit_in_words(unit, facts, plan.users),
            unit_code=unit,
            neighboring_relation=relation_in_words(relation, plan.users),
            relation_code=relation,
            privacy_mode=plan.mechanism.privacy_mode,
            mechanism_name=words.name,
            mechanism=f"{words.mechanism}{selected}",
            sampling=words.sampling,
            sampling_code=words.sampling_code,
            tag=words.tag,
            what_ran=what_ran(plan, ledger, claim.status),
            noise_multipliers=tuple(dict.fromkeys(sigma for sigma, _ in ran)),
            clipping_norm=plan.clipping_norm,
            clipping=plan.clipping,
            sample_rates=tuple(dict.fromkeys(rate for _, rate in ran)),
            expected_batch_size=plan.expected_batch_size,
            steps=ledger.steps(TRAINING),
            steps_planned=plan.steps_recorded,
            num_examples=plan.num_examples,
            mechanisms=tuple(ledger.to_list()),
            covered=covered(words),
            not_covered=not_covered(facts, plan),
            facts=facts,
            users=plan.users,
        )

    @property
    def proven(self) -> bool:
        """Whether the headline holds: for all that left the run, or at least for the weights."""
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
        """Return the claim in one sentence, or a sentence that says there is none."""
        if self.status == NOT_ESTABLISHED:
            why = "; ".join(observed(self.facts)) or self.what_ran
            return (
                "NO differential privacy guarantee is established for this run: "
                f"{why}. No epsilon is claimed."
            )
        if not self.proven:
            return f"This run is NOT private: {self.status_reason}. No epsilon is claimed."
        what, end = "The released weights", ""
        if self.status == PROVEN_WEIGHTS_ONLY:
            what = "The released weights alone"
            end = (
                f"; this does not cover {', '.join(released_in_words(self.facts))}, released "
                "without noise"
            )
        row = "one row (a chunk of a longer text)" if self.rows_are_chunks else "one row"
        unit = row if self.unit_code == EXAMPLE else f"the text of {row}, labels being public,"
        of_all = f"{unit} of the training set of {self.num_examples:,} rows"
        if self.users is not None:
            of_all = f"{one_user(self.users)}, of which the training set has {self.num_examples:,}"
        return (
            f"{what} are ({self.epsilon_text}, {self.delta_text})-differentially private with "
            f"respect to zero-out of {of_all} "
            f"({self.accountant} upper bound, {self.what_ran}){end}."
        )

    @property
    def rows_are_chunks(self) -> bool:
        """Whether rows are chunks of longer texts, as declared for this run or an earlier one."""
        return any(run.rows_are_chunks for run in self.facts.everywhere)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        values = {**plain(asdict(self)), "facts": self.facts.to_dict()}
        if self.users is None:
            del values["users"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyStatement:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        known = {"users": None, **values} if isinstance(values, Mapping) else values
        given = checked_fields(cls, known, LedgerError)
        try:
            if given["users"] is not None:
                given["users"] = Users(**checked_fields(Users, given["users"], LedgerError))
            given["epsilons"] = tuple(AccountantResult.from_dict(row) for row in given["epsilons"])
            given["facts"] = RunFacts.from_dict(given["facts"])
            for name in (
                "noise_multipliers",
                "sample_rates",
                "mechanisms",
                "not_covered",
                "not_established",
            ):
                given[name] = tuple(given[name])
        except (TypeError, InvalidArgumentError) as error:
            raise LedgerError(
                f"The privacy statement cannot be read ({error}): it was edited or damaged."
            ) from error
        return cls(**given)

    def __str__(self) -> str:
        lines = [f"Privacy: {self.status}", f"  {self.sentence()}"]
        if self.proven or self.status == NOT_ESTABLISHED:
            lines += [f"  {line(row)}" for row in self.epsilons]
        if self.accountant_note and self.proven:
            lines.append(f"  {self.accountant_note}")
        if self.facts.audit is not None:
            lines.append(f"  audit    {self.facts.audit.in_words()}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Claim:
    """What may be claimed, and with which numbers."""

    status: str
    reason: str
    epsilon: float | None
    accountant: str
    accountant_note: str
    epsilons: tuple[AccountantResult, ...]
    not_established: tuple[str, ...] = ()


def _refuse_other_units(plan: PrivacyPlan, facts: RunFacts) -> None:
    """Raise LedgerError for an earlier run that protects users where this one protects rows, or
    the other way round: no bound is known for both together."""
    for run in facts.earlier:
        if (run.unit == USER) != (plan.users is not None) and run.unit != NONE:
            raise LedgerError(
                f"Expected {run.name} to protect what this run does (privacy_unit="
                f"{plan.privacy_unit!r}), got {run.unit!r}: no bound is known for both together. "
                "Start both runs with the same privacy_unit."
            )


def _claim(plan: PrivacyPlan, ledger: Ledger, facts: RunFacts) -> _Claim:
    """Return the strongest claim that what ran allows."""
    if reason := _why_not_private(ledger, facts):
        return _not_private(plan, reason, "not computed: the run is not private")
    if by_others := observed(facts):
        note = "not computed: not only hf_dp saw what was not noised"
        epsilons = tuple(AccountantResult(name, None, None, note=note) for name in ACCOUNTANTS)
        reason = "; ".join(by_others)
        return _Claim(NOT_ESTABLISHED, reason, None, plan.accountant, note, epsilons, by_others)
    if unestablished := _not_established(plan, ledger):
        note = "no bound is known for what ran"
        others = [name for name in ACCOUNTANTS if name not in BOUNDS]
        epsilons = (
            *(AccountantResult(name, None, None, note=note) for name in BOUNDS),
            *results_of(ledger, plan.delta, others),
        )
        reasons = unestablished[0].reasons or ("its plan says that no bound is known",)
        reason = "; ".join(reasons)
        if unestablished[0].reasons:
            reason += " (Du and Mi 2021 claim otherwise)"
        return _Claim(NOT_ESTABLISHED, reason, None, plan.accountant, note, epsilons, reasons)
    epsilons = results_of(ledger, plan.delta, ACCOUNTANTS)
    chosen, note = headline(epsilons, plan.accountant)
    if facts.audit is not None and (
        reason := facts.audit.refutation(chosen.epsilon or 0.0, ledger.events, chosen.accountant)
    ):
        return _not_private(plan, reason, REFUTED_BY_AUDIT)
    status, reason = _proven(plan, facts)
    return _Claim(status, reason, chosen.epsilon, chosen.accountant, note, epsilons)


def observed(facts: RunFacts) -> tuple[str, ...]:
    """Return why nothing is known of what a run shows, where code that is not hf_dp's was inside
    its gate, or that of an earlier run."""
    names = dict.fromkeys(name for run in facts.everywhere for name in run.observers)
    return tuple(f"{name}, which is not hf_dp's, saw what was not noised" for name in names)


def _not_private(plan: PrivacyPlan, reason: str, note: str) -> _Claim:
    epsilons = tuple(AccountantResult(name, None, None, note=note) for name in ACCOUNTANTS)
    return _Claim(NOT_PRIVATE, reason, None, plan.accountant, note, epsilons)


def _not_established(plan: PrivacyPlan, ledger: Ledger) -> list[Event]:
    """List the events, planned or run, for which no bound is known."""
    mechanism = plan.mechanism
    known = mechanism.established and NONE not in (mechanism.unit, mechanism.relation)
    planned = () if known else plan.events()[-1:]
    return [*planned, *(event for event in ledger.events if not event.established)]


def _why_not_private(ledger: Ledger, facts: RunFacts) -> str:
    if facts.insecure_seed:
        return (
            "noise and sampling came from a fixed seed (insecure_seed), and anyone who knows it "
            "can subtract the noise"
        )
    for run in facts.earlier:
        if run.insecure_seed:
            return (
                f"noise and sampling of {run.name} on the same rows came from a fixed seed "
                "(insecure_seed), and anyone who knows it can subtract that noise"
            )
    noiseless = sum(event.steps for event in ledger.events if compose(event).noiseless)
    return f"{noiseless} of {ledger.steps()} steps ran without noise" if noiseless else ""


def _proven(plan: PrivacyPlan, facts: RunFacts) -> tuple[str, str]:
    reason = plan.words.proof
    released = released_in_words(facts)
    if not released:
        return PROVEN, reason
    return PROVEN_WEIGHTS_ONLY, (
        f"{reason}; epsilon covers the weights only, because these were released without noise at "
        f"the user's request: {', '.join(released)}"
    )


def what_ran(plan: PrivacyPlan, ledger: Ledger, status: str) -> str:
    """Say what ran: in earlier runs on the same rows, in the selection, and in this run."""
    if status == NOT_ESTABLISHED and (found := _not_established(plan, ledger)):
        event = found[0]
        earlier = event in ledger.events and event not in plan.events()
        who = "an earlier run on the same rows, which it names," if earlier else "it"
        return f"{who} was trained by {event.unestablished or plan.words.name}"
    before = [entry.event for entry in ledger.entries if entry.purpose == RELEASE]
    ran = plan.mechanism.what_ran(plan, ledger.steps(TRAINING), before)
    others = [e for e in ledger.entries if e.purpose != EARLIER and not plan.makes(e)]
    if further := sum(entry.event.steps for entry in others):
        ran += f", and {further} further release{'s' * (further > 1)} that the plan does not make"
    if chosen := ledger.steps(SELECTION):
        ran = f"{chosen} noisy release{'s' * (chosen > 1)} to choose what trains, {ran}"
    if ledger.steps(EARLIER):
        ran = f"what earlier runs released of the same rows, {ran}"
    return ran


def _rates(event: Event) -> list[tuple[float, float]]:
    """List (noise multiplier, sample rate) for each part of an event."""
    if isinstance(event, BestOfRandomRuns):
        return [pair for each in event.run for pair in _rates(each)]
    rate = getattr(event, "sample_rate", 1.0)
    return [(sigma, rate) for sigma in event.noise_multipliers.values()]
