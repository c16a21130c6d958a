"""The loads of a mixture's experts, example by example, and the loss that balances them
(:mod:`hf_dp.plans.balance`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_dp._borrowed import routers_of
from hf_dp._validate import invalid
from hf_dp.batches.structure import Batch
from hf_dp.errors import UnsupportedArgumentError, UnsupportedModelError
from hf_dp.losses import widened
from hf_dp.plans.balance import COEFFICIENT, RouterBalance
from hf_dp.run.private_run import PerExampleLoss, PrivateRun

_DECAY = 0.9  # of the average of noised loads
_MEAN, _STEPS = "loads", "steps_of_loads"


class Balance:
    """Adds the load-balancing loss to a run's, and sums up loads.

    Attributes: mean: (L, E), the decayed sum of noised loads, in their units. steps: how many.
    """

    def __init__(self, run: PrivateRun, rule: RouterBalance):
        self.run, self.rule = run, rule
        routers = routers_of(run.model)
        named = [
            [getattr(each, n, None) or 0 for n in ("num_experts", "top_k")] for each in routers
        ]
        sizes = {*map(tuple, named)}
        self.experts, self.chosen = max(sizes, default=(0, 0))
        if len(sizes) != 1 or not 0 < self.chosen < self.experts:
            raise UnsupportedModelError(
                f"`{COEFFICIENT}` balances experts, but {type(run.model).__name__} has no routers "
                "that hf_dp knows, all with the same number of experts and of experts per token. "
                "Remove it."
            )
        self.layers = layers = len(routers)
        self.largest = math.sqrt(self.chosen * (1 - self.chosen / self.experts) * layers)
        self.mean, self.steps = torch.zeros(layers, self.experts, dtype=torch.float64), 0
        self._shares: Tensor | None = None
        run.add_to_losses = self.add_to

    def check(self) -> None:
        """Raise UnsupportedArgumentError for what it is not implemented with."""
        run, plan = self.run, self.run.plan
        checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in run.model.modules())
        by_user = plan.users is not None and not plan.users.by_row
        for name, found in {
            "gradient_checkpointing": checkpoints,
            "torch_compile": run.options.torch_compile,
            "views_per_example": plan.mechanism.views_per_example > 1,
            "privacy_unit": by_user,
        }.items():
            if found:
                expected, why = f"to be unset with {name}", "It is not implemented. Remove one."
                given = self.rule.coefficient
                raise invalid(COEFFICIENT, given, expected, why, UnsupportedArgumentError)

    @property
    def estimate(self) -> Tensor:
        """The estimate of f_e - k / E, (L, E); zeros before the first release."""
        return self.mean * (self.largest / max(1 - _DECAY**self.steps, 1 - _DECAY))

    def add_to(self, own: PerExampleLoss, model: nn.Module, batch: Batch) -> Tensor:
        """Return the losses, (b,), of a batch with the loss that balances, and keep its loads.

        Raises: UnsupportedModelError for routers that do something else than known ones.
        """
        seen: list[tuple[Tensor, Tensor]] = []

        def see(module: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
            if len(output) == 3 and [each.shape[-1] for each in output[::2]] == known:
                seen.append((output[0], output[2]))  # logits (b T, E), indices (b T, k)

        known = [self.experts, self.chosen]

        handles = [each.register_forward_hook(see) for each in routers_of(model)]
        try:
            losses = own(model, batch)
        finally:
            for each in handles:
                each.remove()
        if len(seen) != self.layers or any(each.is_floating_point() for _, each in seen):
            raise UnsupportedModelError(
                f"Expected each of {self.layers} routers to run once in a forward, and to return "
                f"logits of {self.experts} experts, scores and the {self.chosen} chosen ones; "
                f"{len(seen)} did. Remove `{COEFFICIENT}`."
            )
        b = len(losses)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).double()
        weights = (mask / mask.sum(1, keepdim=True).clamp(min=1)).to(losses.device)  # (b, T)
        with torch.no_grad():
            chosen = [
                nn.functional.one_hot(i, self.experts).sum(1).view(b, -1, self.experts)
                for _, i in seen
            ]
            self._shares = torch.stack(
                [torch.einsum("bt,bte->be", weights, c.double()) for c in chosen], 1
            )
        estimate = self.estimate.to(losses.device, losses.dtype)
        found = [widened(x).softmax(-1).view(b, -1, self.experts) for x, _ in seen]
        means = torch.stack([torch.einsum("bt,bte->be", weights.to(p.dtype), p) for p in found], 1)
        factor = self.rule.coefficient * self.experts / len(seen)
        return losses + factor * (means * estimate).sum((1, 2)).to(losses.dtype)

    def sum_of_loads(self) -> Tensor:
        """Return zeros, (L, E), float64, for :meth:`add`."""
        return torch.zeros_like(self.mean, device=self.run.device)

    def add(self, total: Tensor, losses: Tensor) -> None:
        """Add the loads of the last batch to a total; those of an example whose loss is not finite,
        or that does not count, are 0.

        Each number is cut to a multiple of a power of two, N of which fit into float64, so that the
        sum is exact in whatever order it is formed, and no norm grows.
        """
        assert self._shares is not None
        unit = math.ldexp(1.0, self.run.plan.num_examples.bit_length() - 52)
        loads = (self._shares - self.chosen / self.experts) / self.largest
        # At most 1 but for rounding, and for a row without tokens where k > E / 2.
        norms = loads.flatten(1).norm(dim=1) * (1 + 1e-12)
        loads = (loads / norms.clamp(min=1)[:, None, None] / unit).trunc() * unit
        counts = losses.isfinite() & norms.isfinite()
        total += loads.where(counts[:, None, None], 0.0).sum(0)

    def learn(self, noised: Tensor) -> None:
        """Move on to the next step, by the noised sum of this one, (L, E)."""
        now = noised.double().cpu() / self.run.plan.expected_batch_size
        self.mean, self.steps = _DECAY * self.mean + (1 - _DECAY) * now, self.steps + 1

    def kept(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {_MEAN: self.mean, _STEPS: torch.tensor(self.steps)}

    def go_on(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint. Raises: KeyError, ValueError where it does not fit."""
        if kept[_MEAN].shape != self.mean.shape:
            raise ValueError(_MEAN)
        self.mean, self.steps = kept[_MEAN].double(), int(kept[_STEPS])
