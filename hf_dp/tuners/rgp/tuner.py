"""RGP in a run: each step gets new carriers, made from what the weights have learned so far."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_dp.clipping.low_rank import Carriers, LowRankEngine
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import describe_training
from hf_dp.tuners.base import (
    Tuner,
    refuse_made_before,
    refuse_options,
    refuse_other_options,
)
from hf_dp.tuners.rgp.config import RgpConfig, carriers, weight_gradients
from hf_dp.tuners.selection import always_trained


class Rgp(Tuner):
    """Clips and noises the gradients of carriers, and makes those of the weights from them.

    The model trains in place.
    """

    clips_in_its_own_way = True
    gradients_are_noised_sums = False
    needs_whole_weights = "RGP makes its carriers from whole weight matrices at every step."

    def __init__(self, config: RgpConfig):
        self.config = config
        self._start: dict[str, Tensor] = {}
        self._weights: dict[str, nn.Parameter] = {}
        self._carriers: dict[str, Carriers] = {}

    @property
    def undecided(self) -> bool:
        return not self._weights

    def prepare(self, run: PrivateRun) -> None:
        refuse_made_before(run, self.config)
        refuse_options(run, self.config)
        self.config.weights(run.model)

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        if self._weights:
            return
        self.prepare(run)
        if checkpoint is not None:
            refuse_other_options(RgpConfig.from_pretrained(checkpoint), self.config)
        self._weights = self.config.weights(run.model)
        self._start = {
            name: parameter.detach().clone() for name, parameter in self._weights.items()
        }
        kept = {*self._weights.values(), *always_trained(run.model, self.config)}
        for parameter in run.model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in kept)

    def before_step(self, run: PrivateRun, step: int) -> None:
        for name, weight in self._weights.items():
            made = carriers(
                weight, self._start[name], self.config.rank, self.config.power_iterations
            )
            # Their start is random, and every process must project onto the same ones.
            shared = map(run.processes.from_main, (made.left, made.right))
            self._carriers[name] = Carriers(*shared)

    def engine(self, run: PrivateRun) -> LowRankEngine:
        plan = run.plan
        return LowRankEngine(run.model, self._carriers, plan.clipping_norm, plan.clipping)

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        return weight_gradients(noised, self._carriers)

    def tune(self, optimizer: Any) -> None:
        if self.config.learning_rate_scale == 1:
            return
        mine = {id(weight) for weight in self._weights.values()}
        for group in list(optimizer.param_groups):
            scaled = [p for p in group["params"] if id(p) in mine]
            group["params"] = [p for p in group["params"] if id(p) not in mine]
            rate = group["lr"] * self.config.learning_rate_scale
            if scaled:
                optimizer.add_param_group({**group, "params": scaled, "lr": rate})

    def save(self, folder: str) -> None:
        self.config.write_details(folder)

    def describe(self, model: nn.Module) -> str:
        if not self._weights:
            return describe_training(model)
        seen = sum(self.config.rank * sum(weight.shape) for weight in self._weights.values())
        return (
            f"{describe_training(model)}, through rank-{self.config.rank} carriers of {seen:,} "
            "numbers a step (RGP)"
        )
