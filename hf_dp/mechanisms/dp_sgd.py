"""DP-SGD's step: noise on the clipped sum, in ``p.grad`` (Li et al., algorithm 1).

Any optimizer then makes it DP-Adam and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_dp._validate import invalid
from hf_dp.accounting import LOSS, SUM
from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.compiled import not_compiled
from hf_dp.clipping.self_check import in_training
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.losses import base_model, reads_by_tokens
from hf_dp.mechanisms.base import Batches, Clipped, Mechanism, register_mechanism
from hf_dp.mechanisms.gauge import Gauge
from hf_dp.plans.balance import LOADS
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.quantile import LOG
from hf_dp.plans.scaling import BETA
from hf_dp.run.gate import Release
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.base import Tuner


@register_mechanism
class DpSgd(Mechanism):
    """Per-example gradients clipped by the engine, summed, noised once per logical batch."""

    plan_type: ClassVar[type[MechanismPlan]] = DpSgdPlan
    masks_rows = True

    def __init__(self, run: PrivateRun, tuner: Tuner | None = None):
        super().__init__(run, tuner)
        rules: DpSgdPlan = self.plan.gradients
        self.gauge = Gauge(run, rules)
        asked = {"noised_loss": rules.loss, LOG: rules.clipping_quantile}
        self.logs = tuple(name for name, part in asked.items() if part is not None)
        if self.gauge.scales is not None:
            self.needs_whole_weights = "Scales of a part of the gradients are not implemented."
        if self.gauge.balance is not None:
            self.needs_whole_weights = "Balanced routers of a sharded model are not implemented."

    def start(self, checkpoint: str | None = None) -> None:
        self.gauge.load(checkpoint)

    def save(self, folder: str) -> None:
        self.gauge.save(folder)

    def prepare(self) -> None:
        if self.gauge.scales is not None and self.tuner.clips_in_its_own_way:
            why, error = "It clips numbers other than gradients.", UnsupportedArgumentError
            name = type(self.tuner).__name__
            raise invalid("peft_config", name, f"to be one without it with `{BETA}`", why, error)
        if self.gauge.balance is not None:
            self.gauge.balance.check()
        if self.run.options.torch_compile and self.tuner.clips_in_its_own_way:
            why, error = "Its own engine is not compiled.", UnsupportedArgumentError
            name = type(self.tuner).__name__
            raise invalid("torch_compile", True, f"to be False with {name}", why, error)
        if self.run.options.torch_compile and reads_by_tokens(self.run.model):
            why = "it finds the place where it reads by tokens that its backbone must not see"
            raise not_compiled(type(base_model(self.run.model)).__name__, why)
        self.run.check_engine()
        if self.gauge.scales is not None:
            self._refuse_unscaled()

    def _refuse_unscaled(self) -> None:
        """Raise UnsupportedModelError, on synthetic examples, for gradients without scales."""
        run = self.run
        with run.randomness.streams(), run.forward_context(), in_training(run.model):
            batch, _ = run.engine_check.batches()
            engine = ClippingEngine(run.model, 1.0, run.plan.clipping, run.strategy())
            with engine:
                self.gauge.measure(engine)
                engine.backward(run.losses(batch))

    def clip(self, batches: Batches) -> Clipped:
        """Return, by parameter, the sum of clipped gradients: ``sum_i w_i g_i``, norms at most C
        in units of the gauge; and the other sums that the plan releases. Not private."""
        run, part, beside = self.run, self.plan.loss, {}
        watch: list[Callable[[Tensor], None]] = []
        if part is not None:
            losses = BoundedLosses(part.bound, part.unit(run.plan), run.device)
            beside[LOSS] = losses.total
            watch.append(losses.add)
        with self.tuner.engine(run) as engine:
            beside |= self.gauge.measure(engine)
            if self.gauge.balance is not None:
                watch.append(partial(self.gauge.balance.add, beside[LOADS]))
            loss_sum = run.feed(engine, batches, watch)
            sums = engine.collect()
        return Clipped(sums, loss_sum, beside)

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Return ``(clipped sum + N(0, (sigma C)^2)) / B`` for every trainable parameter, in the
        units of gradients, and note ``noised["noised_loss"]`` likewise. The noise is drawn once per
        logical batch, and the divisor is a public constant, also for an empty draw."""
        sums, divisor = clipped.values, self.run.plan.expected_batch_size
        beside = {part: release.beside(part, total) for part, total in clipped.beside.items()}
        for each in self.run.inside:
            each.clipped(sums)
        noised = release.sum(sums)
        for each in self.run.inside:
            each.noised(noised)
        for total in noised.values():
            total.div_(divisor)
        spread, told = self.gauge.undo(noised), self.gauge.learn(beside, noised)
        self.noised = {"noised_loss": beside[LOSS] / divisor} | told if LOSS in beside else told
        own = {id(total) for total in noised.values()}
        gradients = self.tuner.finish(noised)  # a function of what is noised: free
        same = {id(gradient) for gradient in gradients.values()} == own
        as_noised = same and self.tuner.keeps_all_noise
        std = release.noise_std(SUM) / divisor
        self.noise_norm = spread * std if as_noised else None
        return {p: gradients.pop(name) for name, p in self._trainable().items()}

    def rehearse(self, batches: Batches, optimizer: Optimizer | None) -> None:
        """Clip synthetic batches, and give the optimizer zeros: sums without noise must not reach
        it."""
        with self.tuner.engine(self.run) as engine:
            self.gauge.measure(engine)
            for batch in batches:
                engine.backward(self.run.losses(batch))
            sums = engine.collect()
        for total in sums.values():
            total.copy_(torch.zeros_like(total))  # which takes what the noise takes
        gradients = self.tuner.finish(sums)
        trained = self._trainable()
        for name, parameter in trained.items():
            parameter.grad = gradients.pop(name).to(parameter.dtype)
        if optimizer is not None:
            optimizer.step()
        for parameter in trained.values():
            parameter.grad = None

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.run.model.named_parameters() if p.requires_grad}


class BoundedLosses:
    """Sums losses over this process's examples of one draw; ``total``, (), float64, is not private.

    Args:
        bound: the most that one example adds; each loss is clipped to [0, bound].
        unit: a power of two. Each loss is rounded down to a multiple of it, so that no sum of them
            is rounded (:meth:`hf_dp.plans.dp_sgd.NoisedLoss.unit`).
    """

    def __init__(self, bound: float, unit: float, device: torch.device):
        self.bound, self.unit = bound, unit
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, losses: Tensor) -> None:
        """Add the losses, (b,), of a physical batch. One that is not finite adds 0."""
        values = losses.double()
        values = torch.where(torch.isfinite(values), values, 0).clamp(0, self.bound)
        self.total += (values / self.unit).floor_().mul_(self.unit).sum()
