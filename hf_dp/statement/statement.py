"""The privacy statement: what a run may claim, computed from what ran.

It is the same wherever it is printed. Its numbers come from the ledger, never from the plan's
intentions. Epsilon is a bound, rounded up, and what it does not cover is part of the statement.
What must be said follows Ponomareva et al. 2023 (arXiv 2303.00654), "How to report".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

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
)
from hf_dp.accounting.accountants import Answer
from hf_dp.accounting.composition import compose
from hf_dp.accounting.knows import NO_BOUND
from hf_dp.errors import LedgerError
from hf_dp.plans import units
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement import wording
from hf_dp.statement.facts import RunFacts, Weaknesses, refuse_unnamed

REFUTED_BY_AUDIT = "refuted by an audit"  # instead of an epsilon


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run may claim, and with which numbers. Only :meth:`from_ledger` computes it.

    Attributes:
        plan, ledger, facts: what was planned, what ran, and what the trainer said about the run.
        status: a code of :mod:`hf_dp.statement.wording`, as weak as that of the weakest earlier run
            that is named.
        reasons: why, in words; of NOT_ESTABLISHED, each reason by itself.
        epsilon: the headline, an upper bound rounded up to three decimals; None when there is no
            bound to claim.
        accountant, accountant_note: whose bound that is, and why not that of the one asked for.
        epsilons: what each accountant says, rounded up to three decimals, or why it says nothing.
    """

    plan: PrivacyPlan
    ledger: Ledger
    facts: RunFacts
    status: str
    reasons: tuple[str, ...]
    epsilon: float | None
    accountant: str
    accountant_note: str
    epsilons: tuple[Answer, ...]

    @classmethod
    def from_ledger(cls, plan: PrivacyPlan, ledger: Ledger, facts: RunFacts) -> PrivacyStatement:
        """Return the strongest statement that what ran allows.

        The function is pure and takes about a second (four accountants). An accountant outside its
        range is listed without epsilon. If the plan's accountant is out of its range or gives no
        bound, the headline is the smallest bound there is, and ``accountant_note`` says so.

        Raises:
            AccountingRangeError: no accountant gives a finite bound.
            InvalidArgumentError: no statement is known for the unit or relation.
            LedgerError: the ledger counts earlier runs, but ``facts`` name none.
        """
        _validate.one_of("privacy_unit", plan.privacy_unit, units.PRIVACY_UNITS)
        _validate.one_of(
            "neighboring_relation", plan.neighboring_relation, units.NEIGHBORING_RELATIONS
        )
        refuse_unnamed(ledger, facts.earlier)
        for run in facts.earlier:
            if (run.unit == units.USER) != (plan.users is not None) and run.unit != units.NONE:
                raise LedgerError(
                    f"Expected {run.name} to protect what this run does (privacy_unit="
                    f"{plan.privacy_unit!r}), got {run.unit!r}. {NO_BOUND} Start both runs with "
                    "the same privacy_unit."
                )
        stated = partial(cls, plan, Ledger.from_list(ledger.to_list()), facts)

        def unclaimed(
            status: str, reasons: tuple[str, ...], note: str, known: Iterable[Answer] = ()
        ) -> PrivacyStatement:
            said = {row.accountant: row for row in known}
            rows = tuple(said.get(name, Answer(name, None, note)) for name in ACCOUNTANTS)
            return stated(status, reasons, None, plan.accountant, note, rows)

        if reason := why_not_private(ledger, facts):
            note = REFUTED_BY_AUDIT if facts.refuted else "not computed: the run is not private"
            return unclaimed(wording.NOT_PRIVATE, (reason,), note)
        if seen := observed(facts):
            note = "not computed: not only hf_dp saw what was not noised"
            return unclaimed(wording.NOT_ESTABLISHED, seen, note)
        if found := _not_established(plan, ledger):
            reasons = found[0].reasons or ("its plan says that no bound is known",)
            estimates = [name for name in ACCOUNTANTS if name not in BOUNDS]
            known = wording.results_of(ledger, plan.delta, estimates)
            note = "no bound is known for what ran"
            return unclaimed(wording.NOT_ESTABLISHED, reasons, note, known)
        if unknown := [run.name for run in facts.earlier if units.NONE in (run.unit, run.relation)]:
            reasons = tuple(f"no bound is known for {name} on the same rows" for name in unknown)
            return unclaimed(wording.NOT_ESTABLISHED, reasons, "no bound is known for what ran")
        results = wording.results_of(ledger, plan.delta, ACCOUNTANTS)
        accountant, epsilon, note = wording.headline(results, plan.accountant)
        if facts.audit is not None and (
            reason := facts.audit.refutation(epsilon, ledger.events, accountant)
        ):
            return unclaimed(wording.NOT_PRIVATE, (reason,), REFUTED_BY_AUDIT)
        status, reason = wording.PROVEN, plan.words.proof
        if released := wording.released_in_words(facts):
            status = wording.PROVEN_WEIGHTS_ONLY
            reason += (
                "; epsilon covers the weights only, because these were released without noise at "
                f"the user's request: {', '.join(released)}"
            )
        return stated(status, (reason,), epsilon, accountant, note, results)

    @property
    def proven(self) -> bool:
        """Whether the headline holds: for all that left the run, or at least for the weights."""
        return self.status in (wording.PROVEN, wording.PROVEN_WEIGHTS_ONLY)

    @property
    def status_reason(self) -> str:
        """Why the status is what it is, in words."""
        return "; ".join(self.reasons)

    @property
    def unit_code(self) -> str:
        """Of :mod:`hf_dp.plans.units`: the weakest of this run and of all earlier runs."""
        if self.status == wording.NOT_ESTABLISHED:
            return units.NONE
        return units.weakest_unit((self.plan.unit, *(run.unit for run in self.facts.earlier)))

    @property
    def relation_code(self) -> str:
        """As :attr:`unit_code`."""
        if self.status == wording.NOT_ESTABLISHED:
            return units.NONE
        relations = (self.plan.mechanism.relation, *(run.relation for run in self.facts.earlier))
        return units.weakest_relation(relations)

    @property
    def unit(self) -> str:
        """What is protected, in words."""
        return wording.unit_in_words(self.unit_code, self.facts, self.plan.users)

    @property
    def neighboring_relation(self) -> str:
        """Against which change, in words."""
        return wording.relation_in_words(self.relation_code, self.plan, self.ledger)

    @property
    def mechanism(self) -> str:
        """What is clipped, noised and released, and what chose what trains, in words."""
        plan = self.plan
        chosen = "" if plan.selection is None else f". {plan.selection.in_words(plan.one)}"
        return f"{plan.words.mechanism}{chosen}"

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """Those that ran, in order; the plan's when nothing ran."""
        ran = dict.fromkeys(sigma for sigma, _ in _rates(self.ledger.events))
        return tuple(ran) or (self.plan.noise_multiplier,)

    @property
    def sample_rates(self) -> tuple[float, ...]:
        """Likewise."""
        ran = dict.fromkeys(rate for _, rate in _rates(self.ledger.events))
        return tuple(ran) or (self.plan.sample_rate,)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What epsilon says nothing about, in words: first what depends on the run."""
        return tuple(wording.not_covered(self.facts, self.plan))

    @property
    def delta(self) -> float:
        """As in the plan, not rounded."""
        return self.plan.delta

    @property
    def steps(self) -> int:
        """How many ran, by the ledger."""
        return self.ledger.steps(TRAINING)

    @property
    def covered(self) -> str:
        """What epsilon covers."""
        return "; ".join(filter(None, (wording.COVERED, self.plan.words.also_covered)))

    @property
    def rows_are_chunks(self) -> bool:
        """Whether rows are chunks of longer texts, as declared for this run or an earlier one."""
        return any(run.rows_are_chunks for run in self.facts.everywhere)

    def sentence(self) -> str:
        """Return the claim in one sentence, or a sentence that says there is none."""
        if self.status == wording.NOT_ESTABLISHED:
            why = "; ".join(observed(self.facts)) or self._what_ran() or self.status_reason
            return (
                "NO differential privacy guarantee is established for this run: "
                f"{why}. No epsilon is claimed."
            )
        if not self.proven:
            return f"This run is NOT private: {self.status_reason}. No epsilon is claimed."
        what, end = "The released weights", ""
        if self.status == wording.PROVEN_WEIGHTS_ONLY:
            what = "The released weights alone"
            released = ", ".join(wording.released_in_words(self.facts))
            end = f"; this does not cover {released}, released without noise"
        row = "one row (a chunk of a longer text)" if self.rows_are_chunks else "one row"
        if self.unit_code != units.EXAMPLE:
            row = f"the text (or image) of {row}, labels being public,"
        count, users = self.plan.num_examples, self.plan.users
        of_all = f"{row} of the training set of {count:,} rows"
        if users is not None:
            of_all = f"{wording.one_user(users)}, of which the training set has {count:,}"
        bound = f"({wording.epsilon_text(self.epsilon)}, {wording.delta_text(self.delta)})"
        return (
            f"{what} are {bound}-differentially private with respect to zero-out of {of_all} "
            f"({self.accountant} upper bound, {self._what_ran()}){end}."
        )

    def _what_ran(self) -> str:
        """Say what ran: in earlier runs on the same rows, in the selection, and in this run."""
        plan, ledger = self.plan, self.ledger
        if self.status == wording.NOT_ESTABLISHED:
            if not (found := _not_established(plan, ledger)):
                return ""
            event = found[0]
            earlier = event in ledger.events and event not in plan.events()
            who = "an earlier run on the same rows, which it names," if earlier else "it"
            return f"{who} was trained by {event.unestablished or plan.words.name}"
        before = [entry.event for entry in ledger.entries if entry.purpose == RELEASE]
        ran = plan.mechanism.what_ran(plan, ledger.steps(TRAINING), before)
        others = [e for e in ledger.entries if e.purpose != EARLIER and not plan.makes(e)]
        if further := sum(entry.event.steps for entry in others):
            ran += (
                f", and {further} further release{'s' * (further > 1)} that the plan does not make"
            )
        if chosen := ledger.steps(SELECTION):
            ran = f"{chosen} noisy release{'s' * (chosen > 1)} to choose what trains, {ran}"
        if ledger.steps(EARLIER):
            ran = f"what earlier runs released of the same rows, {ran}"
        return ran

    def __str__(self) -> str:
        lines = [f"Privacy: {wording.STATUSES[self.status]}", f"  {self.sentence()}"]
        if self.proven or self.status == wording.NOT_ESTABLISHED:
            lines += [f"  {wording.line(row)}" for row in self.epsilons]
        if self.accountant_note and self.proven:
            lines.append(f"  {self.accountant_note}")
        if self.facts.audit is not None:
            lines.append(f"  audit    {self.facts.audit.in_words()}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the claim as plain data, for ``privacy.json`` and the card's YAML, without what
        there is nothing to say of. ``epsilon``, always an upper bound, is None unless the status is
        a proven one."""
        plan = self.plan
        released = [name for run in self.facts.everywhere for name in run.released]
        values = {
            "accountant": self.accountant if self.proven else None,
            "unit": self.unit_code,
            "users": plan.users and asdict(plan.users),
            "rows_are_chunks": self.rows_are_chunks or None,
            "neighboring_relation": self.relation_code,
            "mechanism": plan.words.name,
            "sampling": plan.words.sampling_code,
            "noise_multiplier": _one_or_list(self.noise_multipliers),
            "sample_rate": _one_or_list(self.sample_rates),
            "steps": self.steps,
            "bands": bands if (bands := plan.correlated_steps) > 1 else None,
            "clipping": plan.clipping,
            "clipping_norm": plan.clipping_norm,
            "num_examples": plan.num_examples,
            "released_without_noise": list(dict.fromkeys(released)) or None,
            "audit": self.facts.audit and self.facts.audit.found(),
        }
        kept = {name: value for name, value in values.items() if value is not None}
        return {"status": self.status, "epsilon": self.epsilon, "delta": self.delta, **kept}


def observed(facts: Weaknesses) -> tuple[str, ...]:
    """Return why nothing is known of what a run shows, where code that is not hf_dp's was inside
    its gate, or that of an earlier run."""
    names = dict.fromkeys(name for run in facts.everywhere for name in run.observers)
    return tuple(f"{name}, which is not hf_dp's, saw what was not noised" for name in names)


def _not_established(plan: PrivacyPlan, ledger: Ledger) -> list[Event]:
    """List the events, planned or run, for which no bound is known."""
    mechanism = plan.mechanism
    known = mechanism.established and units.NONE not in (mechanism.unit, mechanism.relation)
    planned = () if known else plan.events()[-1:]
    return [*planned, *(event for event in ledger.events if not event.established)]


def why_not_private(ledger: Ledger, facts: Weaknesses) -> str:
    """Return why no epsilon holds for what ran, of this run or an earlier one; empty if one may."""
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
        if run.refuted:
            return f"an audit refuted what the ledger gives for {run.name} on the same rows"
    if facts.refuted:
        audit = facts.audit if isinstance(facts, RunFacts) else None
        what = "what the ledger gives"
        return f"an audit refuted {what}" if audit is None else audit.told(what)
    noiseless = sum(event.steps for event in ledger.events if compose(event).noiseless)
    return f"{noiseless} of {ledger.steps()} steps ran without noise" if noiseless else ""


def _rates(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Yield (noise multiplier, sample rate) for each part of each event."""
    for event in events:
        if isinstance(event, BestOfRandomRuns):
            yield from _rates(event.run)
        else:
            rate = getattr(event, "sample_rate", 1.0)
            yield from ((sigma, rate) for sigma in event.noise_multipliers.values())


def _one_or_list(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)
