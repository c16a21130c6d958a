"""DP-FP with a frozen encoder: what trains is a function of released vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from hf_dp import _validate
from hf_dp.accounting import (
    RELEASE,
    VECTORS,
    Event,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
)
from hf_dp.plans.dp_fp.base import FROZEN, PROOF, SHOWN, MicroBatchPlan, check_labels
from hf_dp.plans.mechanism import register_plan
from hf_dp.plans.release import PlannedRelease
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import RECORD_AND_LABEL_ZERO_OUT, RECORD_ZERO_OUT
from hf_dp.plans.words import Words

ONCE, FRESH = "once", "fresh"
REUSES = (ONCE, FRESH)


@register_plan
@dataclass(frozen=True)
class FrozenPlan(MicroBatchPlan):
    """Everything below the noise is frozen, so that what trains is a function of released vectors.

    Args:
        num_micro_batches: M independent Poisson draws a step.
        reuse: ``once`` (one noisy vector an example, used for all steps) or ``fresh`` (a new one
            each time the example is drawn).
        label_epsilon: of a randomized response that replaces the labels once; None: they are
            public, or in the vector.
        labels_in_vector: the released vector has a block for each class and the representation
            stands in that of its label.
        num_classes: K, for both.

    Raises: InvalidArgumentError.
    """

    reuse: str = ONCE
    label_epsilon: float | None = None
    labels_in_vector: bool = False
    num_classes: int | None = None

    name: ClassVar[str] = "dp_fp_frozen"
    variant: ClassVar[str] = FROZEN

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("representation_release", self.reuse, REUSES)
        if self.label_epsilon is not None:
            _validate.positive("label_epsilon", self.label_epsilon)
        check_labels(self)
        if self.label_epsilon is not None and self.labels_in_vector:
            raise _validate.invalid(
                "label_epsilon",
                self.label_epsilon,
                "to be None with labels_in_vector=True",
                "Either protects the labels.",
            )

    @property
    def protects_labels(self) -> bool:
        return self.label_epsilon is not None or self.labels_in_vector

    @property
    def relation(self) -> str:
        return RECORD_ZERO_OUT if self.label_epsilon is None else RECORD_AND_LABEL_ZERO_OUT

    @property
    def releases_each_step(self) -> bool:
        return self.reuse == FRESH

    def forwarded(self, schedule: Schedule) -> float:
        return float(schedule.num_examples)  # each row passes the frozen part once

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        if not self.releases_each_step:
            raise _validate.invalid(
                "representation_release",
                self.reuse,
                "to be 'fresh' for steps that release something",
                "Each row was released before them.",
            )
        rate = self.sample_rate(schedule)
        return SampledRecordRelease(noise_multiplier, rate, steps, self.num_micro_batches)

    def releases_before(self, schedule: Schedule) -> tuple[PlannedRelease, ...]:
        vectors: tuple[PlannedRelease, ...] = ()
        if not self.releases_each_step:
            event = RecordRelease(self.sigma, 1)
            vectors = (PlannedRelease(event, RELEASE, {VECTORS: self.vector_sensitivity}),)
        return (*self.label_release(), *vectors)

    def label_release(self) -> tuple[PlannedRelease, ...]:
        """Return the randomized response of the labels, if there is one."""
        if self.label_epsilon is None or self.num_classes is None:
            return ()
        event = RandomizedResponse(self.label_epsilon, self.num_classes, 1)
        return (PlannedRelease(event, RELEASE),)

    def calibrated(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        selection: SelectionPlan | None,
    ) -> tuple[Self, None]:
        def event(noise_multiplier: float, steps: int) -> Event:
            if self.releases_each_step:
                return self.step_event(schedule, noise_multiplier, steps)
            return RecordRelease(noise_multiplier, 1)

        prior = (*prior_events, *(release.event for release in self.label_release()))
        rate = self.sample_rate(schedule)
        sigma = schedule.calibrated(target_epsilon, prior, rate, event)
        return replace(self, noise_multiplier=sigma), None

    def words(self, schedule: Schedule) -> Words:
        each_step = self.releases_each_step
        when = "anew each time a row is drawn" if each_step else "once for each row"
        labels = ""
        if self.label_epsilon is not None:
            labels = (
                ". Each label was replaced once by randomized response with epsilon "
                f"{self.label_epsilon!r} among {self.num_classes} classes"
            )
        return Words(
            name="DP-FP with a frozen encoder",
            mechanism=(
                f"DP-FP with a frozen encoder: {self._vectors_in_words()}, {when}; only the last "
                f"layer trains, and only on these vectors{labels}"
            ),
            sampling=(
                f"{self._draws_in_words()}. {SHOWN}"
                if each_step
                else "none: a vector of every row is released once; which of them a step uses "
                "depends on no row"
            ),
            drawn="Poisson sampling",
            proof=PROOF,
            tag="dp-fp",
            sampling_code="poisson" if each_step else "none",
        )

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        ran = super().what_ran(schedule, steps, released)
        if any(isinstance(event, RecordRelease) for event in released):
            ran = "a noisy representation of each row released once"
        if any(isinstance(event, RandomizedResponse) for event in released):
            ran += ", labels by randomized response"
        return ran
