"""DP-FROST: it selects what trains from the private rows, once, as an adapter, or repeatedly, in
place. ``DPTrainer`` makes the choice, and its ledger counts what the choice costs. What a run chose
is read back from ``selection.json``, by transformer block and kind of matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import ClassVar, TypedDict

import numpy as np
from torch import nn
from transformers.utils import logging

from hf_dp._validate import integer, invalid, non_negative, one_of
from hf_dp.accounting import SUM
from hf_dp.errors import ConfigError, UnsupportedArgumentError
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.selection import MAGNITUDES, SelectionPlan
from hf_dp.run.clock import SELECTION
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.base import (
    ConfiguredTuner,
    Run,
    Tuner,
    apply_peft,
    describe_training,
    only_trains,
    samples_of,
    serves,
)
from hf_dp.tuners.frost.magnitude import MagnitudeEngine, sensitivity
from hf_dp.tuners.frost.select import Partition, estimate, select
from hf_dp.tuners.public_choice import BLOCK
from hf_dp.tuners.selection import FILE_NAME, PrivateConfig, register

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
    """K > 1 (section 5.3): selection k takes place at step ``(k - 1) floor(U / K)`` of U. The model
    trains in place, and a whole checkpoint is saved."""

    needs_whole_weights = (
        "DP-FROST with num_selections above 1 looks at whole gradients again while it trains."
    )
    selects_again = True
    _may_train: Sequence[nn.Parameter] = ()

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        assert isinstance(run, PrivateRun)  # as tuner() has seen to
        if self.config.num_selections > run.plan.steps:
            raise invalid(
                "num_selections",
                self.config.num_selections,
                f"to be at most the {run.plan.steps} steps of the run",
                "More selections would be paid for but never made.",
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
    """Return the tuner of DP-FROST, or None for a selection that is an adapter like any other."""
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
    """Run PSEL (DP-FROST, Algorithm 4) on the run's model and rows. In each iteration only the
    remaining partitions are trainable, so the gradient is clipped over these alone. In a run
    without privacy the magnitudes are those of definition 6, neither clipped nor noised."""
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


# What a matrix does, by the end of its name, in the order in which a block computes; the names of
# BERT, RoBERTa, MPNet, DistilBERT, ViT, DINOv2, GPT-2, OPT, Llama and ModernBERT.
KINDS = {
    "query": r"(query|q_proj|q_lin|attn\.q|SelfAttention\.q)",
    "key": r"(key|k_proj|k_lin|attn\.k|SelfAttention\.k)",
    "value": r"(value|v_proj|v_lin|attn\.v|SelfAttention\.v)",
    "query, key, value": r"(c_attn|Wqkv|qkv)",
    "attention output": r"(attention\.output\.dense|o_proj|out_lin|out_proj|attn\.c_proj|attn\.o|"
    r"attn\.Wo|SelfAttention\.o)",
    "intermediate": r"(intermediate\.dense|fc1|c_fc|lin1|up_proj|mlp\.Wi|wi)",
    "gate": r"gate_proj",
    "output": r"(output\.dense|fc2|mlp\.c_proj|lin2|down_proj|mlp\.Wo|wo)",
    "layer norm": r"(\w*norm\w*|\w*LayerNorm\w*|ln_\w+)",
}
_ENDS = {kind: re.compile(rf"(^|.*\.){pattern}$") for kind, pattern in KINDS.items()}


@dataclass(frozen=True)
class Part:
    """One partition."""

    name: str
    block: str  # which transformer block it is in, "" outside the blocks
    kind: str  # what it does there, such as "query"; outside the blocks the end of its name
    magnitude: float  # the estimate of its gradient's magnitude over all rows (PGM-EST)
    order: int | None  # when it was chosen, from 1


@dataclass(frozen=True)
class Chosen:
    """One selection of a run, and all that could be chosen, in the model's order."""

    parts: tuple[Part, ...]
    magnitude: str  # mg, mgn or mgna
    norm_order: int  # alpha
    noised: bool  # as they are in every private run


def read_chosen(folder: str) -> list[Chosen]:
    """Return the selections of a finished run, in their order."""
    config = FrostConfig.from_pretrained(folder)
    if not config.made:
        raise ConfigError(
            f"Expected {FILE_NAME} in {folder!r} to hold a selection, got none. Name the output "
            "folder of a run with peft_type: frost that has ended."
        )
    try:
        return [_chosen(made, config) for made in config.made]
    except (KeyError, TypeError) as problem:
        raise ConfigError(
            f"{FILE_NAME} in {folder!r} lacks {problem}: another version of hf_dp wrote it. Use "
            "that version."
        ) from problem


def _chosen(made: Made, config: FrostConfig) -> Chosen:
    noised = "noisy_magnitudes" in made
    observed = made["noisy_magnitudes"] if noised else made["magnitudes_without_noise"]
    names = list(observed[0])
    table = np.array([[row.get(name, np.nan) for name in names] for row in observed])
    scales = made["sensitivities"] if noised else [1.0] * len(observed)
    magnitudes = estimate(table, scales, config.selection_sample_rate)
    orders = {name: place + 1 for place, name in enumerate(made["partitions"])}
    parts = [
        Part(name, block, kind, float(magnitude), orders.get(name))
        for (name, block, kind), magnitude in zip(_placed(names), magnitudes, strict=True)
    ]
    return Chosen(tuple(parts), config.magnitude, config.norm_order, noised)


def _placed(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return each name with its block and its kind; kinds that a block has twice are numbered."""
    matches = [BLOCK.match(f"{name}.") for name in names]
    several = len({match[1] for match in matches if match}) > 1
    found: list[tuple[str, str, str]] = []
    for name, match in zip(names, matches, strict=True):
        if match is None:
            found.append((name, "", ".".join(name.split(".")[-2:])))
            continue
        local = name[match.end() :]
        kind = next((kind for kind, end in _ENDS.items() if end.match(local)), local)
        found.append((name, f"{match[1]} {match[2]}" if several else match[2], kind))
    counts = Counter((block, kind) for _, block, kind in found if block)
    twice = {kind for (_, kind), count in counts.items() if count > 1}
    seen: Counter[tuple[str, str]] = Counter()
    for place, (name, block, kind) in enumerate(found):
        if block and kind in twice:
            seen[block, kind] += 1
            found[place] = (name, block, f"{kind} {seen[block, kind]}")
    return found
