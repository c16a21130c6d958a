"""DP-FP as published (Du and Mi 2021, Algorithm 1). No epsilon is established for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from hf_dp import _validate
from hf_dp.accounting import Event, PublishedForwardNoise
from hf_dp.plans.dp_fp.base import PUBLISHED, MicroBatchPlan
from hf_dp.plans.mechanism import register_plan
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import NONE
from hf_dp.plans.words import Words


@register_plan
@dataclass(frozen=True)
class PublishedPlan(MicroBatchPlan):
    """Algorithm 1 of the paper: noise in the forward pass, then an ordinary optimizer.

    No epsilon is established for it (:attr:`hf_dp.accounting.PublishedForwardNoise.reasons`).
    """

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
        rate = self.sample_rate(schedule)
        return PublishedForwardNoise(noise_multiplier, rate, self.num_micro_batches, steps)

    def _check_accountant(self, schedule: Schedule) -> None:
        if schedule.accountant != "gdp_clt":
            raise _validate.invalid(
                "accountant",
                schedule.accountant,
                f"to be gdp_clt with dp_fp_variant={self.variant!r}",
                "The published variant has no bound, only the paper's own figure; the others have "
                "one.",
            )

    def calibrated(
        self,
        schedule: Schedule,
        target_epsilon: float,
        prior_events: Sequence[Event],
        selection: SelectionPlan | None,
    ) -> tuple[Self, None]:
        from hf_dp.accounting import gdp_clt  # it takes scipy, and so half of the time of --help

        draws = schedule.steps * self.num_micro_batches
        rate = self.sample_rate(schedule)
        sigma = gdp_clt.noise_multiplier(target_epsilon, schedule.delta, rate, draws)
        return replace(self, noise_multiplier=sigma), None

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
            sampling=self._draws_in_words(),
            drawn="Poisson sampling",
            proof="",
            tag="dp-fp",
        )
