"""DP-FROST in a run: it selects once, as an adapter, or repeatedly, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.accounting import SUM
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.rounding import ROUNDING_MARGIN, clipping_share
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.clock import SELECTION
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import apply_peft, describe_training
from hf_dp.tuners.base import (
    Tuner,
    freeze_others,
    only_trains,
    refuse_made_before,
    refuse_other_options,
    refuse_several_processes,
    serves,
)
from hf_dp.tuners.frost.config import FrostConfig, chosen_from, made_from
from hf_dp.tuners.frost.magnitude import MagnitudeEngine, sensitivity
from hf_dp.tuners.frost.partition import Partition
from hf_dp.tuners.frost.select import Observe, Selection, select
from hf_dp.tuners.selection import candidates
from hf_dp.tuners.without_privacy import PlainRun

logger = logging.get_logger(__name__)

# Without privacy no gradient is clipped (definition 6): far above any norm, and a float64.
_NO_CLIPPING = 1e300


Run = TypeVar("Run", PrivateRun, PlainRun)


class _Frost(Tuner):
    def __init__(self, config: FrostConfig):
        self.config = config
        self._applied = False

    @property
    def undecided(self) -> bool:
        return not self._applied

    def plan(self, clipping_norm: float) -> SelectionPlan:
        return self.config.selection_plan(clipping_norm)

    def prepare(self, run: PrivateRun) -> None:
        refuse_made_before(run, self.config)
        self.config.candidate_partitions(run.model)
        if self.config.num_selections > run.plan.steps:
            raise invalid(
                "num_selections",
                self.config.num_selections,
                f"to be at most the {run.plan.steps} steps of the run",
                "Selections beyond them would be paid for and never made.",
            )

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        if self._applied:
            return
        self.prepare(run)  # again: things may have changed, and what follows costs privacy
        if checkpoint is not None:
            self._read(checkpoint)
        elif not self.config.made:
            self._select(run, select_partitions)
        run.selections = self.config.made
        self._apply(run)
        self._applied = True

    def _select(self, run: Run, select_by: Callable[[Run, FrostConfig], dict[str, Any]]) -> None:
        with run.clock.part(SELECTION):
            made = select_by(run, self.config)
        self.config.made.append(made)
        logger.info(
            "DP-FROST selected %d of %d partitions.", len(made["partitions"]), made["candidates"]
        )

    def _read(self, checkpoint: str) -> None:
        """Take over what the run selected before, instead of paying for it again."""
        earlier = FrostConfig.from_pretrained(checkpoint)
        refuse_other_options(earlier, self.config)
        self.config.made = earlier.made

    def _apply(self, run: PrivateRun) -> None:
        raise NotImplementedError

    def describe(self, model: nn.Module) -> str:
        if not self.config.made:
            return describe_training(model)
        return f"{describe_training(model)}: " + "; then ".join(
            f"{len(made['partitions'])} of {made['candidates']} partitions, chosen privately "
            "(DP-FROST; sensitivities "
            f"{', '.join(f'{value:.3g}' for value in made['sensitivities'])}): "
            f"{', '.join(made['partitions'])}"
            for made in self.config.made
        )


class SelectOnce(_Frost):
    """K = 1: an adapter of the selected weights takes the place of the model."""

    def _apply(self, run: PrivateRun | PlainRun) -> None:
        self.config.parameters = list(self.config.made[0]["parameters"])
        run.model = apply_peft(run.model, self.config, run.device)

    def start_plain(self, run: PlainRun, checkpoint: str | None = None) -> None:
        if self._applied:
            return
        refuse_made_before(run, self.config)
        if checkpoint is not None:
            self._read(checkpoint)
        else:
            self._select(run, select_without_noise)
        self._apply(run)
        self._applied = True


class Reselect(_Frost):
    """K > 1 (section 5.3): selection k takes place at step ``(k - 1) floor(U / K)`` of U.

    The model trains in place, and a whole checkpoint is saved.
    """

    needs_whole_weights = (
        "DP-FROST with num_selections above 1 looks at whole gradients again while it trains."
    )
    _may_train: Sequence[nn.Parameter] = ()

    def _apply(self, run: PrivateRun) -> None:
        freeze_others(run.model, self.config)
        self._may_train = [*candidates(run.model, self.config)]
        self._switch(run.model)

    def _switch(self, model: nn.Module) -> None:
        selected = set(self.config.made[-1]["parameters"])
        may_train = set(self._may_train)
        for name, parameter in model.named_parameters():
            if parameter in may_train:
                parameter.requires_grad_(name in selected)

    def before_step(self, run: PrivateRun, step: int) -> None:
        every = max(1, run.plan.steps // self.config.num_selections)
        made = len(self.config.made)
        if made < self.config.num_selections and step >= made * every:
            with self.all_that_may_train(run.model):
                self._select(run, select_partitions)
            self._switch(run.model)

    def releases_to_come(self) -> int:
        to_make = self.config.num_selections - len(self.config.made)
        return to_make * self.config.selection_iterations

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        before = [(parameter, parameter.requires_grad) for parameter in self._may_train]
        for parameter, _ in before:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, trained in before:
                parameter.requires_grad_(trained)

    def save(self, folder: str) -> None:
        self.config.write_details(folder)


@serves(FrostConfig)
def tuner(config: FrostConfig, is_private: bool) -> Tuner | None:
    """Return the tuner of DP-FROST, or None for a selection that is an adapter like any other.

    Raises:
        UnsupportedArgumentError: repeated selections in ``non_private`` mode.
        ConfigError: the configuration holds a selection that another run made.
    """
    if config.parameters is not None or config.made:
        if not is_private and config.parameters is not None:
            return None
        raise ConfigError(
            "This FrostConfig holds a selection that another run made from private rows. The "
            "ledger of this run would not count it. Pass a new FrostConfig, or resume that run. If "
            "the rows were public, pass model=get_peft_model(model, config) without peft_config, "
            "and set adapter_init_data_is_public=True."
        )
    if not is_private and config.num_selections > 1:
        expected = "to be 1 with privacy_mode='non_private'"
        advice = "There the partitions are chosen once. Set it to 1."
        count = config.num_selections
        raise invalid("num_selections", count, expected, advice, UnsupportedArgumentError)
    return Reselect(config) if config.num_selections > 1 else SelectOnce(config)


def select_partitions(run: PrivateRun, config: FrostConfig) -> dict[str, Any]:
    """Run PSEL (DP-FROST, Algorithm 4) on the run's model and private rows; see :func:`made_from`.

    In each iteration only the remaining partitions are trainable, so the gradient is clipped over
    these alone.
    """
    plan = run.plan.selection
    assert plan is not None and plan.noise_multiplier is not None
    parts, rows = config.candidate_partitions(run.model), run.plan.num_examples
    share = clipping_share(plan.sample_rate * rows, rows, ROUNDING_MARGIN)
    with only_trains(run.model, {name for part in parts for name in part.parameters}):
        run.check_engine()
        run.model.train()  # as in the steps to come
        draws = iter(run.draws(plan.sampler(rows, config.selection_iterations)))

        def observe(remaining: Sequence[Partition]) -> tuple[list[float], float]:
            kind = plan.quantity, plan.norm_order
            bound = sensitivity(remaining, *kind, plan.clipping_norm)
            engine = MagnitudeEngine(run.model, remaining, plan.clipping_norm * share, *kind)
            with engine:
                run.feed(engine, next(draws))
                magnitudes = engine.magnitudes(run.processes)
            logger.info("DP-FROST: %d partitions remain.", len(remaining))
            with run.release(plan.release(bound)) as release:
                noised = release.sum({SUM: magnitudes})[SUM]
            return noised.tolist(), bound

        selection = _select(run.model, config, parts, observe, plan.noise_multiplier)
    return made_from(selection, plan, parts)


def select_without_noise(run: PlainRun, config: FrostConfig) -> dict[str, Any]:
    """Run PSEL on un-clipped magnitudes without noise, for a run without privacy.

    The magnitudes are those of definition 6, in the variant that the configuration names.

    Raises: UnsupportedArgumentError with several processes, which would sample different rows.
    """
    refuse_several_processes(run, config)
    parts, kind = config.candidate_partitions(run.model), (config.magnitude, config.norm_order)
    run.model.train()  # as in the steps to come

    def observe(remaining: Sequence[Partition]) -> tuple[list[float], float]:
        with MagnitudeEngine(run.model, remaining, _NO_CLIPPING, *kind) as engine:
            for batch in run.sample(config.selection_sample_rate):
                engine.backward(run.losses(run.model, batch))
            # Without noise all iterations weigh the same in the estimate.
            return engine.magnitudes().tolist(), 1.0

    selection = _select(run.model, config, parts, observe, 0.0)
    observed = [dict(row) for row in selection.observed]
    return {**chosen_from(selection, parts), "magnitudes_without_noise": observed}


def _select(
    model: nn.Module,
    config: FrostConfig,
    parts: Sequence[Partition],
    observe: Observe,
    noise_multiplier: float,
) -> Selection:
    """Run PSEL; while ``observe`` looks, only what remains is trainable."""
    with only_trains(model, {name for part in parts for name in part.parameters}) as restrict:

        def look(remaining: Sequence[Partition]) -> tuple[Sequence[float], float]:
            restrict({name for part in remaining for name in part.parameters})
            return observe(remaining)

        return select(
            parts,
            look,
            unfreeze_ratio=config.unfreeze_ratio,
            iterations=config.selection_iterations,
            sample_rate=config.selection_sample_rate,
            gap_coefficient=config.gap_coefficient,
            noise_multiplier=noise_multiplier,
        )
