"""Run the same step through Opacus (>= 1.6), as its maintainers advise.

That is, with ``wrap_model=False`` and with position ids given in full. Opacus refuses a trainable
tied weight in ghost mode, so there the head gets a weight of its own, and the row says so. The
optimizer is told to skip the update (``signal_skip_step``, which ``BatchMemoryManager`` uses):
clipping and accumulation run, noise and update do not, as in the other modes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hf_dp.benchmarks.modes import CLIPPING_NORM, BenchmarkMode
from hf_dp.benchmarks.workload import Batch, Workload, build_model
from hf_dp.losses import base_model


class OpacusMode(BenchmarkMode):
    """``opacus_hooks`` (per-example gradients) or ``opacus_ghost`` (fast gradient clipping)."""

    def __init__(self, workload: Workload, name: str):
        self.ghost = name == "opacus_ghost"
        untie = self.ghost and workload.shape.tied
        self.note = "untied head (Opacus ghost refuses tied weights)" if untie else ""
        super().__init__(build_model(workload, tied=not untie), workload)
        self.hooks, self.optimizer = _make_private(self.model, "ghost" if self.ghost else "hooks")

    def step(self, batches: Sequence[Batch]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p in self.optimizer.params:
                p.summed_grad = None
            for batch in batches:
                self.optimizer.zero_grad(set_to_none=True)
                self._backward(self.losses(_explicit(self.model, batch)))
                self.optimizer.signal_skip_step(True)
                self.optimizer.step()

    def reset(self) -> None:
        for p in self.optimizer.params:
            p.grad = p.grad_sample = p.summed_grad = None

    def gradients(self) -> dict[str, Tensor]:
        return {name: getattr(p, "summed_grad") for name, p in self.trained().items()}  # noqa: B009

    def _backward(self, losses: Tensor) -> None:
        if self.ghost:
            from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

            DPTensorFastGradientClipping(self.hooks, self.optimizer, losses).backward()
        else:
            losses.mean().backward()


def _make_private(model: nn.Module, mode: str) -> tuple[Any, Any]:
    from opacus import PrivacyEngine

    # Opacus takes its sample rate from a loader; nothing here reads either.
    loader = DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooks, optimizer, *_ = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=0.0,
            max_grad_norm=CLIPPING_NORM,
            grad_sample_mode=mode,
            poisson_sampling=False,
            wrap_model=False,
        )
    return hooks, optimizer


def _explicit(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with contiguous (b, T) position and type ids.

    Opacus cannot split a lookup that examples share. RoBERTa makes its position ids from the
    tokens, one row of ids per example, so it needs none.
    """
    base: Any = base_model(model)
    accepted = inspect.signature(type(base).forward).parameters
    b, length = batch["input_ids"].shape
    extra = {}
    if "position_ids" in accepted and base.config.model_type != "roberta":
        extra["position_ids"] = torch.arange(length, device=batch["input_ids"].device).repeat(b, 1)
    if "token_type_ids" in accepted and hasattr(base.config, "type_vocab_size"):
        extra["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return {**batch, **extra}
