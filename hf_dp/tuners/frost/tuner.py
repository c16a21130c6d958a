"""DP-FROST: it selects what trains from the private rows, once, as an adapter, or repeatedly, in
place. ``DPTrainer`` makes the choice, and its ledger counts what the choice costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import ClassVar, TypedDict

from torch import nn
from transformers.utils import logging

from hf_dp._validate import integer, invalid, non_negative, one_of
from hf_dp.accounting import SUM
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.selection import MAGNITUDES, SelectionPlan
from hf_dp.run.clock import SELECTION
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import apply_peft, describe_training
from hf_dp.tuners.base import (
    ConfiguredTuner,
    Run,
    Tuner,
    only_trains,
    samples_of,
    serves,
)
from hf_dp.tuners.frost.magnitude import MagnitudeEngine, sensitivity
from hf_dp.tuners.frost.partition import Partition
from hf_dp.tuners.frost.select import select
from hf_dp.tuners.selection import PrivateConfig, register

logger = logging.get_logger(__name__)


class Made(TypedDict, total=False):
    """A selection as ``selection.json`` keeps it; of a private run nothing that was not noised."""

    partitions: list[str]  # that were chosen, in this order
    parameters: list[str]  # theirs
    candidates: int
    noisy_magnitudes: list[dict[str, float]]  # of the partitions that remained, by iteration
    sensitivities: list[float]
    plan: dict[str, object]
    events: list[dict[str, object]]
    magnitudes_without_noise: list[dict[str, float]]  # of a run without privacy


@register
@dataclass
class FrostConfig(PrivateConfig):
    """DP-FROST: the weight matrices with the largest noisy gradient magnitudes train.

    All other matrices are frozen. A new classification head and ``modules_to_save`` always train
    and are not counted. The defaults are the paper's (section 5, with the largest of its four
    ratios).

    Args:
        selection_iterations: T; 1 is the single-shot variant.
        gap_coefficient: nu.
        magnitude: ``mg``, ``mgn`` or ``mgna``.
        norm_order: alpha, 1 or 2, of the gradient's norm that is clipped.
        num_selections: K. Above 1, what trains is chosen again every 1/K of the steps, and a whole
            checkpoint is saved.
        made: the selections so far, filled in by the trainer.

    Raises: InvalidArgumentError naming the argument.
    """

    selection_iterations: int = field(default=5)
    gap_coefficient: float = field(default=5.0)
    magnitude: str = field(default="mgna")
    norm_order: int = field(default=1)
    num_selections: int = field(default=1)
    made: list[Made] = field(default_factory=list)

    method: ClassVar[str] = "frost"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("selection_iterations", self.selection_iterations, 1)
        integer("num_selections", self.num_selections, 1)
        non_negative("gap_coefficient", self.gap_coefficient)
        one_of("magnitude", self.magnitude, MAGNITUDES)

    def choose(self, model: nn.Module) -> list[str]:
        raise ConfigError(
            "FrostConfig holds no selection yet. The selection is made from the private rows and "
            "costs privacy: pass the configuration to DPTrainer(model, args, train_dataset=..., "
            "peft_config=FrostConfig(...)) and call train(). To load what such a run trained, call "
            "PeftModel.from_pretrained(model, folder)."
        )


class SelectOnce(ConfiguredTuner[FrostConfig]):
    """K = 1: an adapter of the selected weights takes the place of the model."""

    def plan(self, clipping_norm: float) -> SelectionPlan:
        config = self.config
        iterations = config.selection_iterations * config.num_selections
        return config.selection_plan(clipping_norm, config.magnitude, iterations, config.norm_order)

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        self.config.candidate_partitions(run.model)

    def decide(self, run: Run, checkpoint: str | None, earlier: FrostConfig | None) -> None:
        if earlier is not None:
            self.config.made = earlier.made  # instead of paying for it again
        elif not self.config.made:
            self._select(run)
        run.selections = self.config.made
        self._apply(run)

    def _select(self, run: Run) -> None:
        with run.clock.part(SELECTION):
            made = select_partitions(run, self.config)
        self.config.made.append(made)
        logger.info(
            "DP-FROST selected %d of %d partitions.", len(made["partitions"]), made["candidates"]
        )

    def _apply(self, run: Run) -> None:
        self.config.parameters = list(self.config.made[0]["parameters"])
        run.model = apply_peft(run.model, self.config, run.device)

    def save(self, folder: str) -> None:
        """Write nothing: the adapter's own ``save_pretrained`` does."""

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


class Reselect(SelectOnce):
    """K > 1 (section 5.3): selection k takes place at step ``(k - 1) floor(U / K)`` of U.

    The model trains in place, and a whole checkpoint is saved.
    """

    needs_whole_weights = (
        "DP-FROST with num_selections above 1 looks at whole gradients again while it trains."
    )
    _may_train: Sequence[nn.Parameter] = ()

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        assert isinstance(run, PrivateRun)  # as tuner() has seen to
        if self.config.num_selections > run.plan.steps:
            raise invalid(
                "num_selections",
                self.config.num_selections,
                f"to be at most the {run.plan.steps} steps of the run",
                "Selections beyond them would be paid for and never made.",
            )

    def _apply(self, run: Run) -> None:
        self._may_train = [*self.config.candidates(run.model).values()]
        self.only_chosen(run.model, self._may_train)
        self._switch(run.model)

    def _switch(self, model: nn.Module) -> None:
        selected = set(self.config.made[-1]["parameters"])
        may_train = set(self._may_train)
        for name, parameter in model.named_parameters():
            if parameter in may_train:
                parameter.requires_grad_(name in selected)

    def before_step(self, run: Run, step: int) -> None:
        assert isinstance(run, PrivateRun)
        every = max(1, run.plan.steps // self.config.num_selections)
        made = len(self.config.made)
        if made < self.config.num_selections and step >= made * every:
            with self.all_that_may_train(run.model):
                self._select(run)
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
    return (Reselect if config.num_selections > 1 else SelectOnce)(config, is_private)


def select_partitions(run: Run, config: FrostConfig) -> Made:
    """Run PSEL (DP-FROST, Algorithm 4) on the run's model and rows.

    In each iteration only the remaining partitions are trainable, so the gradient is clipped over
    these alone. In a run without privacy the magnitudes are those of definition 6, neither clipped
    nor noised.
    """
    parts, kind = config.candidate_partitions(run.model), (config.magnitude, config.norm_order)
    with only_trains(run.model, {name for part in parts for name in part.parameters}) as restrict:
        samples = samples_of(run, config, config.selection_iterations, ROUNDING_MARGIN)

        def observe(remaining: Sequence[Partition]) -> tuple[list[float], float]:
            restrict({name for part in remaining for name in part.parameters})
            # Without noise all iterations weigh the same in the estimate.
            exact = samples.noise_multiplier == 0
            bound = 1.0 if exact else sensitivity(remaining, *kind, samples.clipping_norm)
            with MagnitudeEngine(run.model, remaining, samples.clips_to, *kind) as engine:
                samples.feed(engine)
                magnitudes = engine.magnitudes(run.processes)
            logger.info("DP-FROST: %d partitions remain.", len(remaining))
            return samples.release({SUM: magnitudes}, bound)[SUM].tolist(), bound

        selection = select(
            parts,
            observe,
            unfreeze_ratio=config.unfreeze_ratio,
            iterations=config.selection_iterations,
            sample_rate=config.selection_sample_rate,
            gap_coefficient=config.gap_coefficient,
            noise_multiplier=samples.noise_multiplier,
        )
    by_name = {part.name: part for part in parts}
    chosen: Made = {
        "partitions": list(selection.names),
        "parameters": [p for name in selection.names for p in by_name[name].parameters],
        "candidates": len(parts),
    }
    observed = list(selection.observed)
    if samples.plan is None:
        return {**chosen, "magnitudes_without_noise": observed}
    return {
        **chosen,
        "noisy_magnitudes": observed,
        "sensitivities": list(selection.sensitivities),
        "plan": asdict(samples.plan),
        "events": [samples.plan.event(len(observed)).to_dict()],
    }
