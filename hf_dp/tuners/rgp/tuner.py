"""RGP in a run: each step gets new carriers, made from what the weights have learned so far."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_dp.clipping.low_rank import Carriers, LowRankEngine
from hf_dp.distributed.processes import Processes
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import describe_training
from hf_dp.tuners.base import (
    Tuner,
    refuse_made_before,
    refuse_options,
    refuse_other_options,
    serves,
)
from hf_dp.tuners.rgp.config import RgpConfig, carriers, weight_gradients
from hf_dp.tuners.selection import always_trained
from hf_dp.tuners.without_privacy import PlainRun


@serves(RgpConfig)
class Rgp(Tuner):
    """Clips and noises the gradients of carriers, and makes those of the weights from them.

    The model trains in place.
    """

    clips_in_its_own_way = True
    gradients_are_noised_sums = False
    needs_whole_weights = "RGP makes its carriers from whole weight matrices at every step."

    def __init__(self, config: RgpConfig, is_private: bool = True):
        self.config = config
        self._start: dict[str, Tensor] = {}
        self._weights: dict[str, nn.Parameter] = {}
        self._carriers: dict[str, Carriers] = {}
        self._made_for: int | None = None  # the step, in a run without privacy

    @property
    def undecided(self) -> bool:
        return not self._weights

    def prepare(self, run: PrivateRun) -> None:
        refuse_made_before(run, self.config)
        refuse_options(run, self.config)
        self.config.weights(run.model)

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        if not self._weights:
            self.prepare(run)
            self._take(run.model, checkpoint)

    def start_plain(self, run: PlainRun, checkpoint: str | None = None) -> None:
        if self._weights:
            return
        refuse_made_before(run, self.config)
        self._take(run.model, checkpoint)
        for name, weight in self._weights.items():
            weight.register_hook(partial(self._projected, name))

    def _take(self, model: nn.Module, checkpoint: str | None) -> None:
        """Note the weight matrices and their values, and freeze what does not train."""
        if checkpoint is not None:
            refuse_other_options(RgpConfig.from_pretrained(checkpoint), self.config)
        self._weights = self.config.weights(model)
        self._start = {name: weight.detach().clone() for name, weight in self._weights.items()}
        kept = {*self._weights.values(), *always_trained(model, self.config)}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in kept)

    def _projected(self, name: str, gradient: Tensor) -> Tensor:
        """Return the weight's gradient as its carriers see it.

        The projection is linear and the same for all batches of a step, so it may come before
        they are added up.
        """
        each = self._carriers[name]
        left, right = each.left.to(gradient.dtype), each.right.to(gradient.dtype)
        return Carriers(left, right).gradient(gradient @ right.mT, left.mT @ gradient)

    def before_plain_step(self, run: PlainRun, step: int) -> None:
        if step != self._made_for:  # and not a later batch of the same step
            self._renew(run.processes)
            self._made_for = step

    def before_step(self, run: PrivateRun, step: int) -> None:
        self._renew(run.processes)

    def _renew(self, processes: Processes) -> None:
        for name, weight in self._weights.items():
            how = self.config.rank, self.config.power_iterations
            made = carriers(weight, self._start[name], *how)
            # Their start is random, and every process must project onto the same ones.
            shared = map(processes.from_main, (made.left, made.right))
            self._carriers[name] = Carriers(*shared)

    def engine(self, run: PrivateRun) -> LowRankEngine:
        plan = run.plan
        return LowRankEngine(run.model, self._carriers, plan.clips_to, plan.clipping)

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
