"""Noisy releases from which is chosen what trains. Each is in the durable ledger before anything is
made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp.accounting import SELECTION
from hf_dp.clipping import ClippingEngine
from hf_dp.plan import rounding_margin
from hf_dp.tuners.frost.config import FrostConfig, made_from
from hf_dp.tuners.frost.magnitude import MagnitudeEngine
from hf_dp.tuners.frost.partition import Partition
from hf_dp.tuners.frost.select import select
from hf_dp.tuners.masks import ParamConfig, largest

logger = logging.get_logger(__name__)


def select_partitions(trainer: Any, config: FrostConfig) -> dict[str, Any]:
    """One run of PSEL (DP-FROST, Algorithm 4) on the trainer's model and private rows; see
    :func:`made_from`.

    In each iteration the remaining partitions alone are trainable, so the gradient is clipped over
    them alone.
    """
    plan = trainer.privacy_plan.selection
    parts = config.candidate_partitions(trainer.model)
    with _only_trains(
        trainer.model, {name for part in parts for name in part.parameters}
    ) as restrict:
        trainer.check_engine()
        trainer.model.train()  # as in the steps to come
        draws = iter(
            trainer.private_batches(
                plan.sampler(trainer.privacy_plan.num_examples, config.selection_iterations)
            )
        )

        def observe(remaining: Sequence[Partition]) -> tuple[list[float], float]:
            restrict({name for part in remaining for name in part.parameters})
            engine = MagnitudeEngine(
                trainer.model, remaining, plan.clipping_norm, plan.release, plan.norm_order
            )
            with engine:
                trainer.feed(engine, next(draws))
                magnitudes = engine.magnitudes()
            logger.info("DP-FROST: %d partitions remain.", len(remaining))
            return release(trainer, magnitudes, engine.sensitivity).tolist(), engine.sensitivity

        selection = select(
            parts,
            observe,
            unfreeze_ratio=config.unfreeze_ratio,
            iterations=config.selection_iterations,
            sample_rate=plan.sample_rate,
            gap_coefficient=config.gap_coefficient,
            noise_multiplier=plan.noise_multiplier,
        )
    return made_from(selection, plan, parts)


def select_entries(trainer: Any, config: ParamConfig) -> dict[str, Tensor]:
    """Masks of the single parameters with the largest noisy gradient, from one draw."""
    plan = trainer.privacy_plan.selection
    wanted = set(config.candidate_names(trainer.model))
    with _only_trains(trainer.model, wanted):
        trainer.check_engine()
        trainer.model.train()  # as in the steps to come
        (batches,) = trainer.private_batches(plan.sampler(trainer.privacy_plan.num_examples))
        with ClippingEngine(trainer.model, plan.clipping_norm) as engine:
            trainer.feed(engine, batches)
            sums = engine.collect()
    flat = torch.cat([total.flatten() for total in sums.values()])
    rows = trainer.privacy_plan.num_examples
    noisy = release(
        trainer, flat, plan.clipping_norm * (1 + rounding_margin(plan.sample_rate * rows, rows))
    )
    parts = noisy.split([total.numel() for total in sums.values()])
    return largest(
        {
            name: part.view(total.shape)
            for (name, total), part in zip(sums.items(), parts, strict=True)
        },
        config.unfreeze_ratio,
    )


@torch.no_grad()
def release(trainer: Any, values: Tensor, sensitivity: float) -> Tensor:
    """``values`` with Gaussian noise for this sensitivity; recorded, durably, before they are
    returned."""
    plan, run = trainer.private_run()
    noisy = values + trainer.randomness.gaussian_like(
        values, plan.selection.noise_multiplier * sensitivity
    )
    run.append(plan.selection.event(1), SELECTION)
    return noisy


@contextmanager
def _only_trains(model: nn.Module, names: set[str]) -> Iterator[Callable[[set[str]], None]]:
    """Inside, of the parameters that trained only the named ones do; call what it gives to name
    others."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }

    def restrict(to: set[str]) -> None:
        for name, parameter in trained.items():
            parameter.requires_grad_(name in to)

    restrict(names)
    try:
        yield restrict
    finally:
        restrict(set(trained))
