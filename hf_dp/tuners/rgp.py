"""RGP: low-rank carriers of weight gradients (Yu et al. 2021, arXiv 2106.09352).

It is one of the baselines of Li et al. Each step gets new carriers, made from what the weights have
learned so far. The model trains in place, and a whole checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_dp._validate import integer, invalid, positive
from hf_dp.clipping.partial_gradients import LEFT, RIGHT, Carriers, LowRankEngine
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.base import ConfiguredTuner, Run, describe_training, serves
from hf_dp.tuners.selection import InPlace, SelectionConfig, register


@dataclass
class RgpConfig(SelectionConfig):
    """RGP: the weight matrices of linear layers train through low-rank carriers.

    The head and ``modules_to_save`` train in full. Embeddings, biases and norms are frozen, as in
    section 5 of the paper.

    Args:
        rank: r, at least 1.
        power_iterations: how many make the carriers of a step, at least 1.
        learning_rate_scale: the learning rate of the weight matrices, divided by that of what
            trains in full.
    """

    rank: int = field(default=1)
    power_iterations: int = field(default=1)
    learning_rate_scale: float = field(default=1.0)

    method: ClassVar[str] = "rgp"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("rank", self.rank, 1)
        integer("power_iterations", self.power_iterations, 1)
        positive("learning_rate_scale", self.learning_rate_scale)

    def weights(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the matrices that get carriers, by name; embeddings are not among them.

        Raises: InvalidArgumentError for a rank above the smallest side of a matrix.
        """
        looked_up = {
            parameter
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }
        allowed = self.candidates(model)
        found = {n: p for n, p in allowed.items() if p.dim() == 2 and p not in looked_up}
        smallest = min((min(parameter.shape) for parameter in found.values()), default=0)
        if self.rank > smallest:
            expected = f"to be at most {smallest}, the smallest side of a weight matrix"
            raise invalid("rank", self.rank, expected, "Lower it.")
        return found


register(RgpConfig, InPlace)


@serves(RgpConfig)
class Rgp(ConfiguredTuner[RgpConfig]):
    """Clips and noises the gradients of carriers, and makes those of the weights from them."""

    clips_in_its_own_way = True
    gradients_are_noised_sums = False
    needs_whole_weights = "RGP makes its carriers from whole weight matrices at every step."

    def __init__(self, config: RgpConfig, is_private: bool = True):
        super().__init__(config, is_private)
        self._start: dict[str, Tensor] = {}
        self._weights: dict[str, nn.Parameter] = {}
        self._carriers: dict[str, Carriers] = {}
        self._made_for: int | None = None  # the step

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        self.config.weights(run.model)

    def decide(self, run: Run, checkpoint: str | None, earlier: RgpConfig | None) -> None:
        self._weights = self.config.weights(run.model)
        self._start = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.only_chosen(run.model, self._weights.values())
        if not self.is_private:
            for name, weight in self._weights.items():
                weight.register_hook(partial(self._projected, name))

    def _projected(self, name: str, gradient: Tensor) -> Tensor:
        """Return the weight's gradient as its carriers see it. The projection is linear and the
        same for all batches of a step, so it may come before they are added up."""
        each = self._carriers[name]
        left, right = each.left.to(gradient.dtype), each.right.to(gradient.dtype)
        return Carriers(left, right).gradient(gradient @ right.mT, left.mT @ gradient)

    def before_step(self, run: Run, step: int) -> None:
        if not self.is_private and step == self._made_for:
            return  # a later batch of the same step
        self._made_for = step
        for name, weight in self._weights.items():
            how = self.config.rank, self.config.power_iterations
            made = carriers(weight, self._start[name], *how)
            # Their start is random, and every process must project onto the same ones.
            left, right = map(run.processes.from_main, (made.left, made.right))
            self._carriers[name] = Carriers(left, right)

    def engine(self, run: PrivateRun) -> LowRankEngine:
        plan = run.plan
        return LowRankEngine(run.model, self._carriers, plan.clips_to, plan.clipping)

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        return weight_gradients(noised, self._carriers)

    def tune(self, optimizer: Optimizer) -> None:
        if self.config.learning_rate_scale == 1:
            return
        mine = {id(weight) for weight in self._weights.values()}
        for group in list(optimizer.param_groups):
            scaled = [p for p in group["params"] if id(p) in mine]
            group["params"] = [p for p in group["params"] if id(p) not in mine]
            rate = group["lr"] * self.config.learning_rate_scale
            if scaled:
                optimizer.add_param_group({**group, "params": scaled, "lr": rate})

    def describe(self, model: nn.Module) -> str:
        if self.undecided:
            return describe_training(model)
        seen = sum(self.config.rank * sum(weight.shape) for weight in self._weights.values())
        return (
            f"{describe_training(model)}, through rank-{self.config.rank} carriers of {seen:,} "
            "numbers a step (RGP)"
        )


@torch.no_grad()
def carriers(weight: Tensor, start: Tensor, rank: int, iterations: int) -> Carriers:
    """Return carriers along the historical update ``weight - start``. While there is no update yet,
    they are carriers along the weight. They come from a power iteration with a random start
    (algorithm 2). The update is a function of what was released, so they cost no privacy."""
    update = (weight - start).float()
    if not bool(update.any()):
        update = weight.float()
    right = torch.randn(rank, weight.shape[1], device=weight.device)
    for _ in range(iterations):
        left = torch.linalg.qr(update @ right.mT).Q
        right = torch.linalg.qr(update.mT @ left).Q.mT
    return Carriers(left, right)


def weight_gradients(
    noised: Mapping[str, Tensor], by_name: Mapping[str, Carriers]
) -> dict[str, Tensor]:
    """Return the released gradients, with those of carriers replaced by those of the weights.

    Equal numbers give equal bits, however they lie in memory, so that all processes get the same:
    where one has drawn no example, its sums are laid out by rows, those of the others perhaps by
    columns, and a matrix product adds up in another order then.
    """
    found = dict(noised)
    for name, each in by_name.items():
        # A copy in any case: a product may round by where its factors begin in a shared buffer.
        of_left, of_right = (
            found.pop(name + side).clone(memory_format=torch.contiguous_format).to(each.left.dtype)
            for side in (LEFT, RIGHT)
        )
        found[name] = each.gradient(of_left, of_right)
    return found
