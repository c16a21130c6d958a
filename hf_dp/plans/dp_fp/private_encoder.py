"""DP-FP's last layer above an encoder that is trained by DP-SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from hf_dp import _validate
from hf_dp.accounting import SUM, VECTORS, Event, SampledRecordRelease, SumAndRows
from hf_dp.plans.dp_fp.base import PRIVATE_ENCODER, PROOF, SHOWN, ForwardPlan, check_labels
from hf_dp.plans.dp_sgd import CLIPPINGS, DpSgdPlan, check_noise
from hf_dp.plans.draws import Sampler
from hf_dp.plans.mechanism import register_plan
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.words import Words

SEPARATE, SHARED = "separate", "shared"
DRAWS = (SEPARATE, SHARED)


@register_plan
@dataclass(frozen=True)
class PrivateEncoderPlan(ForwardPlan):
    """DP-SGD below the noise, an ordinary gradient from released vectors above it.

    Each step releases a noisy sum of encoder gradients, and noisy vectors from which the last
    layer's gradient follows. The vectors show who was drawn, so the sum may be taken for that of a
    secret Poisson sample only if its draw is another, independent one (``separate``).

    Args:
        clipping_norm, noise_multiplier, clipping: of the gradients, as in :class:`DpSgdPlan`.
        draws: whether gradients and vectors are of ``separate`` draws or of one ``shared`` one.
        record_clipping_norm, record_noise_multiplier: of the vectors.
        budget_ratio: how much of the target the gradients leave to the vectors; None with given
            noise.
        labels_in_vector, num_classes: as in :class:`FrozenPlan`.

    Raises: InvalidArgumentError.
    """

    clipping: str = "flat"
    draws: str = SEPARATE
    record_clipping_norm: float = 1.0
    record_noise_multiplier: float | None = None
    budget_ratio: float | None = None
    labels_in_vector: bool = False
    num_classes: int | None = None

    name: ClassVar[str] = "dp_fp_private_encoder"
    variant: ClassVar[str] = PRIVATE_ENCODER

    def __post_init__(self) -> None:
        check_noise(self)
        _validate.one_of("clipping", self.clipping, CLIPPINGS)
        _validate.one_of("representation_draws", self.draws, DRAWS)
        _validate.positive("record_clipping_norm", self.record_clipping_norm)
        if self.record_noise_multiplier is not None:
            _validate.positive("record_noise_multiplier", self.record_noise_multiplier)
        if self.budget_ratio is not None:
            _validate.in_unit_interval("representation_budget_ratio", self.budget_ratio)
        check_labels(self)

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
            self.require_noise()
        assert self.record_noise_multiplier is not None
        return self.record_noise_multiplier

    @property
    def protects_labels(self) -> bool:
        return self.labels_in_vector

    def sampler(self, schedule: Schedule, steps: int) -> Sampler:
        return self.gradients.sampler(schedule, steps)

    def forwarded(self, schedule: Schedule) -> float:
        draws = 2 if self.draws == SEPARATE else 1  # one for the gradients, one for the vectors
        return draws * super().forwarded(schedule)

    def step_event(self, schedule: Schedule, noise_multiplier: float, steps: int) -> Event:
        one_draw = self.draws == SHARED
        rate = self.sample_rate(schedule)
        return SumAndRows(noise_multiplier, self.vector_noise_multiplier, rate, steps, one_draw)

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {
            SUM: self.gradients.sensitivities(schedule)[SUM],
            VECTORS: self.vector_sensitivity,
        }

    def _check_selection(self, selection: SelectionPlan | None, draws: str = SEPARATE) -> None:
        if self.draws == SHARED:
            super()._check_selection(selection, self.draws)

    def require_noise(self) -> None:
        if self.record_noise_multiplier is None:
            raise _validate.invalid(
                "representation_noise_multiplier",
                None,
                "to be given beside `noise_multiplier`",
                "Only a target_epsilon can decide it.",
            )

    def calibrated(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        selection: SelectionPlan | None,
    ) -> tuple[Self, SelectionPlan | None]:
        """Return the plan with the gradients' noise for their part of epsilon alone, and then the
        vectors' for the whole (as ComputeSigma of DP-FROST)."""
        if self.record_noise_multiplier is not None or self.budget_ratio is None:
            raise _validate.invalid(
                "representation_noise_multiplier",
                self.record_noise_multiplier,
                "to be None with a target_epsilon, which decides it",
                "Set `representation_budget_ratio`, or give `noise_multiplier` instead of the "
                "target.",
            )
        rate = self.sample_rate(schedule)
        for_sums = (1 - self.budget_ratio) * target_epsilon
        if self.draws == SHARED:  # the vectors show whose gradients the sum is of

            def sums_alone(noise_multiplier: float, steps: int) -> Event:
                return SampledRecordRelease(noise_multiplier, rate, steps)

            sigma = schedule.calibrated(for_sums, prior_events, rate, sums_alone)
        else:
            below, selection = self.gradients.calibrated(
                schedule, for_sums, prior_events, selection
            )
            sigma = below.sigma
        with_sums = replace(self, noise_multiplier=sigma)
        prior = tuple(prior_events) if selection is None else (*prior_events, selection.event())

        def event(noise_multiplier: float, steps: int) -> Event:
            noised = replace(with_sums, record_noise_multiplier=noise_multiplier)
            return noised.step_event(schedule, sigma, steps)

        of_vectors = schedule.calibrated(target_epsilon, prior, rate, event)
        return replace(with_sums, record_noise_multiplier=of_vectors), selection

    def words(self, schedule: Schedule) -> Words:
        below = self.gradients.words(schedule)
        drawn = (
            "Poisson: each row joins each draw independently with the probability sample_rate; an "
            "empty draw counts"
        )
        secret = (
            "Gradients and released rows come from two independent draws; that of the gradients "
            "stays secret, that of the rows is seen and amplifies nothing"
        )
        return Words(
            name="DP-SGD below released representations",
            mechanism=(
                f"{below.mechanism} of the encoder. The last layer trains on released vectors: "
                f"{self._vectors_in_words()}"
            ),
            sampling=f"{drawn}. {SHOWN if self.draws == SHARED else secret}",
            drawn=below.drawn,
            proof=PROOF,
            tag=below.tag,
        )
