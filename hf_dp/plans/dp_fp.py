"""DP-FP's plans (Du and Mi 2021): noise on the representation that enters the last layer.

``published``: everything trains by an ordinary optimizer; no epsilon is established. ``frozen``:
only the last layer trains, from released vectors. ``private_encoder``: DP-SGD below the noise,
released vectors above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

from hf_dp import _validate
from hf_dp.accounting import (
    RELEASE,
    SUM,
    VECTORS,
    Event,
    PublishedForwardNoise,
    RecordRelease,
    SumAndRows,
)
from hf_dp.accounting.gdp_clt import noise_multiplier as papers_noise
from hf_dp.accounting.knows import VISIBLE
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.dp_sgd import CLIPPINGS, DpSgdPlan
from hf_dp.plans.draws import POISSON, Draw, Schedule
from hf_dp.plans.mechanism import MechanismPlan, PlannedRelease, Words, register_plan
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.samplers import MicroBatchSampler
from hf_dp.plans.units import EXAMPLE, FEATURES, NONE, RECORD_ZERO_OUT, USER, Users

DP_FP = "dp_fp"
PUBLISHED, FROZEN, PRIVATE_ENCODER = "published", "frozen", "private_encoder"
VARIANTS = (FROZEN, PRIVATE_ENCODER, PUBLISHED)
ONCE, FRESH = "once", "fresh"
REUSES = (ONCE, FRESH)

_PROOF = (
    "what trains above the noise is a function of clipped and noised representations; below it "
    "nothing trains, or DP-SGD does; composed over the releases in the ledger"
)
_SHOWN = "The rows that are released show who was drawn, so the sampling amplifies nothing"
_JOINS = (
    "each row joins each draw independently with the probability sample_rate; an empty draw counts"
)


@dataclass(frozen=True)
class MicroBatches(Draw):
    """Rows of M independent Poisson draws a step (Du and Mi 2021, section 3.2), each at the rate
    B / (M N).
    """

    num_micro_batches: int

    name: ClassVar[str] = "micro_batches"
    sampling: ClassVar[str] = POISSON
    kind: ClassVar[str] = VISIBLE
    drawn: ClassVar[str] = "Poisson sampling"

    def sample_rate(self, schedule: Schedule) -> float:
        return schedule.expected_batch_size / (self.num_micro_batches * schedule.num_examples)

    def sampler(self, schedule: Schedule, steps: int) -> MicroBatchSampler:
        rate = self.sample_rate(schedule)
        return MicroBatchSampler(schedule.num_examples, rate, steps, self.num_micro_batches)

    def words(self, schedule: Schedule) -> str:
        many = self.num_micro_batches > 1
        draws = f"{self.num_micro_batches} independent Poisson draws a step" if many else "Poisson"
        return f"{draws}: {_JOINS}"


@dataclass(frozen=True)
class ForwardPlan(MechanismPlan):
    """What the variants share: one clipped vector per example, with noise in each coordinate."""

    privacy_mode: ClassVar[str] = DP_FP
    variant: ClassVar[str]

    @property
    def labels_in_vector(self) -> bool:
        """Whether the vector has a block for each class, and the representation is in its own."""
        return False

    @property
    def num_classes(self) -> int | None:
        """K, where labels are protected."""
        return None

    @property
    def vector_clipping_norm(self) -> float:
        """C of a representation (Du and Mi 2021, equation 8)."""
        return self.clipping_norm

    @property
    def vector_noise_multiplier(self) -> float:
        """The noise multiplier of a representation."""
        return self.sigma

    @property
    def vector_sensitivity(self) -> float:
        """How far one example can move its own vector, the rounding of float32 included."""
        return self.vector_clipping_norm * (1 + ROUNDING_MARGIN)

    @property
    def unit(self) -> str:
        return EXAMPLE if self.labels_in_vector else FEATURES

    @property
    def relation(self) -> str:
        return RECORD_ZERO_OUT

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {VECTORS: self.vector_sensitivity}

    def outline(self, schedule: Schedule) -> tuple[str, ...]:
        words = self.words(schedule)
        labels = "covered" if self.labels_in_vector else "not protected"
        return (
            f"noise multiplier of vectors {self.vector_noise_multiplier:.6g}",
            words.mechanism,
            f"draws: {words.sampling}",
            f"labels: {labels}",
        )

    def check_users(self, users: Users | None) -> None:
        if users is not None:
            expected = f"to be {EXAMPLE!r} with privacy_mode={DP_FP!r}"
            why = (
                f"DP-FP releases a vector for each row, so a {users.name} of k rows is released k "
                "times. Use privacy_mode='dp_sgd'."
            )
            raise _validate.invalid("privacy_unit", USER, expected, why, UnsupportedArgumentError)

    def check(self, schedule: Schedule, selects: bool) -> None:
        here = f"with dp_fp_variant={self.variant!r}"
        if selects and self.variant != PRIVATE_ENCODER:
            other = f"A selection goes with dp_fp_variant={PRIVATE_ENCODER!r}."
            selection = "a private selection"
            raise _validate.invalid("peft_config", selection, f"to be None {here}", other)
        if (schedule.accountant == "gdp_clt") == self.established:
            expected = f"to be {'a bound' if self.established else 'gdp_clt'} {here}"
            why = "The published variant has the paper's own figure, the others have a bound."
            raise _validate.invalid("accountant", schedule.accountant, expected, why)

    def _check_labels(self) -> None:
        if self.labels_in_vector:
            least = "Labels of one class tell nothing."
            _validate.integer("num_classes", self.num_classes, 2, least)

    def _vectors_in_words(self) -> str:
        in_block = " and put into the block of its class in a vector of all classes"
        std = self.vector_noise_multiplier * self.vector_sensitivity
        return (
            "the representation that enters the last layer is clipped to an L2 norm of at most "
            f"{self.vector_clipping_norm!r}{in_block if self.labels_in_vector else ''}, and "
            f"Gaussian noise with standard deviation {std:.6g} is added to each coordinate"
        )


@dataclass(frozen=True)
class MicroBatchPlan(ForwardPlan):
    """A variant whose steps have M independent Poisson draws."""

    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        draws = _validate.integer("num_micro_batches", self.num_micro_batches, 1)
        object.__setattr__(self, "num_micro_batches", draws)

    @property
    def draw(self) -> MicroBatches:
        return MicroBatches(self.num_micro_batches)


@register_plan
@dataclass(frozen=True)
class PublishedPlan(MicroBatchPlan):
    """Algorithm 1 of the paper, for which no epsilon is established
    (:attr:`hf_dp.accounting.PublishedForwardNoise.reasons`)."""

    name: ClassVar[str] = "dp_fp_published"
    variant: ClassVar[str] = PUBLISHED
    established: ClassVar[bool] = False

    @property
    def unit(self) -> str:
        return NONE

    @property
    def relation(self) -> str:
        return NONE

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        rate = self.draw.sample_rate(schedule)
        return PublishedForwardNoise(noise_multiplier, rate, self.num_micro_batches, steps)

    def calibrated(
        self, schedule: Schedule, target_epsilon: float, prior_events: Sequence[Event]
    ) -> Self:
        draws = schedule.steps * self.num_micro_batches
        rate = self.draw.sample_rate(schedule)
        sigma = papers_noise(target_epsilon, schedule.delta, rate, draws)
        return replace(self, noise_multiplier=sigma)

    def words(self, schedule: Schedule) -> Words:
        target = schedule.target_epsilon
        figure = ""
        if target is not None:
            figure = (
                f", calibrated to {target!r} by the paper's own formula, which gives no epsilon"
            )
        return Words(
            name="DP-FP as published (not established)",
            mechanism=(
                f"DP-FP as published: in the forward pass {self._vectors_in_words()}{figure}; "
                "everything is then trained by an ordinary optimizer"
            ),
            sampling=self.draw.words(schedule),
            drawn=self.draw.drawn,
            proof="",
            tag="dp-fp",
        )


@register_plan
@dataclass(frozen=True)
class FrozenPlan(MicroBatchPlan):
    """Everything below the noise is frozen, so that what trains is a function of released vectors.

    Args:
        num_micro_batches: M independent Poisson draws a step.
        reuse: ``once`` (one noisy vector an example, used for all steps) or ``fresh`` (a new one
            each time the example is drawn).
        labels_in_vector: the released vector has a block for each of ``num_classes`` (K) and the
            representation stands in that of its label; else labels are public.

    Raises: InvalidArgumentError.
    """

    reuse: str = ONCE
    labels_in_vector: bool = False
    num_classes: int | None = None

    name: ClassVar[str] = "dp_fp_frozen"
    variant: ClassVar[str] = FROZEN

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("representation_release", self.reuse, REUSES)
        self._check_labels()

    @property
    def releases_each_step(self) -> bool:
        return self.reuse == FRESH

    def forwarded(self, schedule: Schedule) -> float:
        return float(schedule.num_examples)  # each row passes the frozen part once

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        if not self.releases_each_step:
            raise ConfigError("Expected no step to release rows, which were released before them.")
        return self.draw.event(schedule, noise_multiplier, steps)

    def releases_before(self, schedule: Schedule) -> tuple[PlannedRelease, ...]:
        if self.releases_each_step:
            return ()
        event = RecordRelease(self.sigma, 1)
        return (PlannedRelease(event, RELEASE, self.sensitivities(schedule)),)

    def calibrated(
        self, schedule: Schedule, target_epsilon: float, prior_events: Sequence[Event]
    ) -> Self:
        if self.releases_each_step:
            return super().calibrated(schedule, target_epsilon, prior_events)

        def once(noise_multiplier: float, steps: int) -> Event:
            return RecordRelease(noise_multiplier, 1)

        sigma = self.smallest_noise(schedule, target_epsilon, prior_events, once)
        return replace(self, noise_multiplier=sigma)

    def words(self, schedule: Schedule) -> Words:
        when = "anew each time a row is drawn"
        sampling = f"{self.draw.words(schedule)}. {_SHOWN}"
        if not self.releases_each_step:
            when = "once for each row"
            sampling = (
                "none: a vector of every row is released once; which of them a step uses depends "
                "on no row"
            )
        return Words(
            name="DP-FP with a frozen encoder",
            mechanism=(
                f"DP-FP with a frozen encoder: {self._vectors_in_words()}, {when}; only the last "
                "layer trains, and only on these vectors"
            ),
            sampling=sampling,
            drawn=self.draw.drawn,
            proof=_PROOF,
            tag="dp-fp",
            sampling_code=self.draw.sampling if self.releases_each_step else "none",
        )

    def what_ran(self, schedule: Schedule, steps: int, released: Sequence[Event]) -> str:
        if any(isinstance(event, RecordRelease) for event in released):
            return "a noisy representation of each row released once"
        return super().what_ran(schedule, steps, released)


@register_plan
@dataclass(frozen=True)
class PrivateEncoderPlan(ForwardPlan):
    """DP-SGD below the noise, an ordinary gradient from released vectors above it.

    Each step releases a noisy sum of encoder gradients, and noisy vectors from which the last
    layer's gradient follows. The vectors show who was drawn for them, so the gradients' draw is
    another, independent one: only then is it a secret Poisson sample.

    Args:
        clipping_norm, noise_multiplier, clipping: of the gradients, as in :class:`DpSgdPlan`.
        record_clipping_norm, record_noise_multiplier: of the vectors.
        budget_ratio: how much of the target the gradients leave to the vectors; None with given
            noise.
        labels_in_vector, num_classes: as in :class:`FrozenPlan`.

    Raises: InvalidArgumentError.
    """

    clipping: str = "flat"
    record_clipping_norm: float = 1.0
    record_noise_multiplier: float | None = None
    budget_ratio: float | None = None
    labels_in_vector: bool = False
    num_classes: int | None = None

    name: ClassVar[str] = "dp_fp_private_encoder"
    variant: ClassVar[str] = PRIVATE_ENCODER
    loss: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("clipping", self.clipping, CLIPPINGS)
        _validate.positive("record_clipping_norm", self.record_clipping_norm)
        if self.record_noise_multiplier is not None:
            _validate.positive("record_noise_multiplier", self.record_noise_multiplier)
        if self.budget_ratio is not None:
            _validate.in_unit_interval("representation_budget_ratio", self.budget_ratio)
        self._check_labels()

    @property
    def gradients(self) -> DpSgdPlan:
        """The DP-SGD below the noise."""
        return DpSgdPlan(self.clipping_norm, self.noise_multiplier, self.clipping)

    @property
    def vector_clipping_norm(self) -> float:
        return self.record_clipping_norm

    @property
    def vector_noise_multiplier(self) -> float:
        if self.record_noise_multiplier is None:
            expected, why = "to be given beside `noise_multiplier`", "Only a target can decide it."
            raise _validate.invalid("representation_noise_multiplier", None, expected, why)
        return self.record_noise_multiplier

    def clips_to(self, schedule: Schedule) -> float:
        return self.gradients.clips_to(schedule)

    def forwarded(self, schedule: Schedule) -> float:
        return 2 * super().forwarded(schedule)  # one draw for the gradients, one for the vectors

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        rate = self.draw.sample_rate(schedule)
        return SumAndRows(noise_multiplier, self.vector_noise_multiplier, rate, steps)

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {SUM: self.gradients.sensitivities(schedule)[SUM], VECTORS: self.vector_sensitivity}

    def require_noise(self) -> None:
        _ = self.vector_noise_multiplier

    def calibrated(
        self, schedule: Schedule, target_epsilon: float, prior_events: Sequence[Event]
    ) -> Self:
        """Return the plan with the gradients' noise for their part of epsilon alone, and then the
        vectors' for the whole (as ComputeSigma of DP-FROST)."""
        given = self.record_noise_multiplier
        if given is not None or self.budget_ratio is None:
            expected = "to be None with a target_epsilon, which decides it"
            other = "Set `representation_budget_ratio`, or give `noise_multiplier`, not the target."
            raise _validate.invalid("representation_noise_multiplier", given, expected, other)
        for_sums = (1 - self.budget_ratio) * target_epsilon
        of_sums = partial(self.gradients.step_event, schedule)
        sigma = self.smallest_noise(schedule, for_sums, prior_events, of_sums)
        with_sums = replace(self, noise_multiplier=sigma)

        def together(noise_multiplier: float, steps: int) -> Event:
            noised = replace(with_sums, record_noise_multiplier=noise_multiplier)
            return noised.step_event(schedule, sigma, steps)

        of_vectors = self.smallest_noise(schedule, target_epsilon, prior_events, together)
        return replace(with_sums, record_noise_multiplier=of_vectors)

    def words(self, schedule: Schedule) -> Words:
        below = self.gradients.words(schedule)
        return Words(
            name="DP-SGD below released representations",
            mechanism=(
                f"{below.mechanism} of the encoder. The last layer trains on released vectors: "
                f"{self._vectors_in_words()}"
            ),
            sampling=(
                f"Poisson: {_JOINS}. Gradients and released rows come from two independent draws; "
                "that of the gradients stays secret, that of the rows is seen and amplifies nothing"
            ),
            drawn=below.drawn,
            proof=_PROOF,
            tag=below.tag,
        )
