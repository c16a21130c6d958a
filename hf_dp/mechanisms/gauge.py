"""The gauge of a step: public numbers by which gradients are measured before they are noised.

The sums of a step, their sensitivity and their noise are in units of the *mechanism*: gradients are
divided by the gauge before they are clipped to C, the plan's norm, and what has left the gate is
multiplied by it again. So sensitivity and noise are the same numbers in all steps, however the
clipping norm moves, and noise that is correlated over steps means what its analysis says.

It is one number for all gradients, the step's clipping norm / C (:mod:`hf_dp.plans.quantile`), or
one for each number of a gradient, 1 / scale (:mod:`hf_dp.plans.scaling`), or both: a function of
public numbers and of what earlier steps released. So all that a step does with it is chosen before
its draw, as adaptive composition allows, or comes after the gate. Checkpoints of a Trainer keep it;
a loop of one's own begins with 1 whenever it is started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.scales import Scale, sides
from hf_dp.errors import ConfigError
from hf_dp.mechanisms.balance import Balance
from hf_dp.mechanisms.scales import Scales
from hf_dp.plans.balance import LOADS
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.quantile import COUNT, HIGHEST, LOG, LOWEST
from hf_dp.run.private_run import PrivateRun

# Safetensors, but not by its name, since evidence vouches for those. "_": it is not published.
FILE_NAME = "_gauge.state"
_RATIO = "ratio"


class Gauge:
    """The gauge of a run's steps, which moves as the plan ``rules`` says; by default it stays 1.

    Attributes: ratio: the norm of the next step, divided by C. scales: what the gradients of the
        next step are multiplied by; None: 1. balance: what the routers of a mixture are asked for,
        which also follows from releases; None: nothing.
    """

    def __init__(self, run: PrivateRun, rules: DpSgdPlan):
        self.run, self.plan, self.quantile, self.ratio = run, run.plan, rules.clipping_quantile, 1.0
        balance = rules.router_balance
        self.balance = None if balance is None else Balance(run, balance)
        beta = rules.gradient_scaling_beta
        self.scales = None if beta is None else Scales(beta, run.processes)

    @property
    def clipping_norm(self) -> float:
        """What the gradients of the next step are clipped to."""
        return self.ratio * self.plan.clipping_norm

    def measure(self, engine: ClippingEngine) -> dict[str, Tensor]:
        """Let an engine measure gradients; return the sums that it adds to meanwhile, each (), by
        part of the step's event. They are not private."""
        quantile, norm, device = self.quantile, self.clipping_norm, self.run.device
        scales: dict[str, Scale] = {}
        if self.scales is not None:  # in the first step, too, so that all take the same memory
            now, named = self.scales.now, dict(self.run.model.named_parameters())
            for name in engine.groups:  # what trains may change between steps
                scales[name] = now.get(name) or Scale(*map(torch.ones, sides(named[name].shape)))
        found = {} if self.balance is None else {LOADS: self.balance.sum_of_loads()}
        if quantile is None:
            engine.measure(scales=scales)
            return found
        total = torch.zeros((), dtype=torch.float64, device=device)

        def count(sizes: Tensor, used: Tensor) -> None:
            counted = quantile.counted(sizes[0], used, norm, engine.regrouped, self.plan)
            total.add_(counted.to(device))

        engine.measure(self.ratio, count, scales)
        return found | {COUNT: total}

    @torch.no_grad()
    def undo(self, noised: Mapping[str, Tensor]) -> float:
        """Put noised sums back into the units of gradients, in place. Return the norm that noise
        with 1 in each number has then."""
        squares, scales = 0.0, {} if self.scales is None else self.scales.now
        for name, total in noised.items():
            if (scale := scales.get(name)) is not None:
                scale.undo(total)
            if self.quantile is not None:
                total.mul_(self.ratio)
            squares += total.numel() if scale is None else scale.inverse_squares()
        return math.sqrt(squares) * self.ratio

    def learn(
        self, released: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Move on to the next step, by the noised sums of this one: the gradients by name, others
        by part of the event. Return what this one's log may say."""
        if self.scales is not None:
            self.scales.learn(gradients)
        if self.balance is not None:
            self.balance.learn(released[LOADS])
        if self.quantile is None:
            return {}
        used = torch.tensor(self.clipping_norm, dtype=torch.float64)
        self.ratio = self.quantile.moved(self.ratio, float(released[COUNT]), self.plan)
        return {LOG: used}

    # -- kept with a run --

    def save(self, folder: str) -> None:
        """Write into a checkpoint what :meth:`load` reads."""
        kept = {} if self.scales is None else self.scales.kept()
        if self.balance is not None:
            kept |= self.balance.kept()
        if self.quantile is not None:
            kept[_RATIO] = torch.tensor(self.ratio, dtype=torch.float64)
        if kept:
            save_file(kept, Path(folder, FILE_NAME))

    def load(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint. Raises: ConfigError if it does not say where the gauge was."""
        if checkpoint is None or not (self.quantile or self.scales or self.balance):
            return
        path = Path(checkpoint, FILE_NAME)
        try:
            kept = load_file(path)
            ratio = 1.0 if self.quantile is None else float(kept[_RATIO])
            if not LOWEST <= ratio <= HIGHEST:
                raise ValueError(_RATIO)
            if self.scales is not None:
                self.scales.go_on(kept, self.run.model)
            if self.balance is not None:
                self.balance.go_on(kept)
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"Cannot resume: the checkpoint {path.parent.name!r} has no {FILE_NAME} that says "
                "in which units its next step measures gradients. Copy the whole checkpoint, "
                "resume from another, or start a new run in a new output_dir."
            ) from error
        self.ratio = ratio
