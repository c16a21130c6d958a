"""Small features: guards, warnings, logs and progress, and two that see what is not noised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import EarlyStoppingCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers.optimization import GreedyLR
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_dp._dataclasses import default_of
from hf_dp.accounting import TRAINING
from hf_dp.accounting.composition import doubt_of_delta
from hf_dp.clipping.sharding import held
from hf_dp.distributed.processes import Processes
from hf_dp.errors import LedgerError, UnaccountedGradientError
from hf_dp.features.base import Feature, Inside, Seen, register
from hf_dp.mechanisms import Mechanism
from hf_dp.planning import doubts
from hf_dp.run.other_training import note_steps_before_own
from hf_dp.statement.facts import (
    CLIPPED_GRADIENT_NORM,
    NO_EPSILON,
    TRAINING_LOSS,
    Flags,
    seen_in_pretraining,
)

logger = logging.get_logger(__name__)


@register
class StopBeforeTarget(Feature):
    """Ends training before ``target_epsilon`` is passed; aborts after a step not in the ledger."""

    _ahead = 0  # steps in the ledger beyond the optimizer's: branches, earlier calls of train()

    def begin(self, seen: Seen) -> None:
        self._book = seen.book if seen.plan.releases_each_step else None

    def on_train_begin(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self._book is not None:
            self._ahead = self._book.steps_made - state.global_step

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if self._book is None:
            return
        recorded = self._book.steps_made - self._ahead
        if recorded != state.global_step:
            raise LedgerError(
                f"The optimizer made step {state.global_step}, but the ledger holds {recorded}: a "
                "step ran that was not recorded. Do not publish the weights in memory."
            )
        if self._book.exhausted:
            control.should_training_stop = True


@register
class WeightsMove(Feature):
    """Aborts if the first optimizer steps leave every trainable weight unchanged: the optimizer
    holds other tensors than the model, which was wrapped or moved since. Of each weight the first
    values are compared."""

    _moved = False
    _before: Sequence[Tensor] = ()

    def on_pre_optimizer_step(
        self, args: object, state: State, control: Control, **kw: Any
    ) -> None:
        model: nn.Module = kw["model"]
        note_steps_before_own(model)
        if not self._moved:  # an empty draw of DP-FP has no gradient, and may leave all unchanged
            gradients = [p.grad for p in model.parameters() if p.requires_grad]
            told = any(each is not None and bool(held(each).any()) for each in gradients)
            self._before = _values(model) if Processes.here().largest(told) else []

    def on_optimizer_step(self, args: object, state: State, control: Control, **kw: Any) -> None:
        optimizer: Optimizer = kw["optimizer"]
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        # Warmup starts at a learning rate of 0.
        if self._moved or not self._before or (rates and not any(rates)):
            return
        pairs = zip(self._before, _values(kw["model"]), strict=True)
        moved = any(not torch.equal(before, now) for before, now in pairs)
        self._moved, self._before = bool(Processes.here().largest(moved)), []
        if not self._moved:
            raise UnaccountedGradientError(
                "The optimizer step changed none of the model's trainable weights: it holds other "
                f"tensors, or its rates {rates} are too small for their precision. Wrap the model, "
                "move it and set its dtype before you create optimizer and trainer."
            )


def _values(model: nn.Module) -> list[Tensor]:
    trained = [p.detach() for p in model.parameters() if p.requires_grad and p.numel()]
    return [held(each).flatten()[:4096].clone() for each in trained]


@register
class ModelSelection(Feature):
    """Weakens the claim where evaluation chooses a checkpoint, the end or learning rates."""

    def weaken(self, seen: Seen) -> None:
        args = self.args
        selects = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        early = any(isinstance(each, EarlyStoppingCallback) for each in seen.callbacks)
        # Those that Trainer tells of metrics. None was made yet where the argument alone says it.
        steered = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        steered |= isinstance(seen.schedule, (ReduceLROnPlateau, GreedyLR))
        seen.book.weaken(Flags(model_selection=bool(selects or early or steered)))


@register
class NoisedNumbers(Feature):
    """Logs what a step releases beside the gradients: means over the steps since the last log.

    Beside the norm of a noised gradient stands ``signal_to_noise``: an estimate from that norm of
    |g|^2 / |z|^2, the square of Li et al.'s ratio (section 3.1.1). E|g + z|^2 = |g|^2 + E|z|^2, so
    where there is hardly any signal, it may be below 0.
    """

    _totals: dict[str, Tensor]

    def begin(self, seen: Seen) -> None:
        self._totals, self._steps = {}, 0

    start = begin

    def released(self, seen: Seen) -> None:
        self._steps += 1
        for name, value in seen.noised.items():
            self._totals[name] = self._totals.get(name, 0) + value.double()

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        if "loss" in logs or "train_loss" in logs:  # and not of an evaluation
            logs |= {name: float(total) / self._steps for name, total in self._totals.items()}
            self._totals, self._steps = {}, 0
        if seen.noise_norm is not None and "grad_norm" in logs:
            logs["signal_to_noise"] = (float(logs["grad_norm"]) / seen.noise_norm) ** 2 - 1


@register
class Outlook(Feature):
    """Warns of a large delta; before the first step of a new run, why it will learn little; and of
    training data that the base model was pretrained on."""

    def begin(self, seen: Seen) -> None:
        doubt = doubt_of_delta(seen.plan.delta, seen.plan.of_delta)
        if doubt and seen.processes.is_main:
            logger.warning(doubt)

    def start(self, seen: Seen) -> None:
        dataset = seen.card.get("dataset")
        if known := seen_in_pretraining(dataset, seen.pretraining_sources):
            logger.warning(
                "The base model was pretrained on %s, the same text as the training data %s: what "
                "it knows of these rows is not covered by epsilon. The card says so.",
                ", ".join(known),
                dataset,
            )
        if seen.book.ledger.steps(TRAINING) or not seen.processes.is_main:
            return
        made: Any = getattr(seen.optimizer, "optimizer", seen.optimizer)  # accelerate wraps it
        # A schedule has set "lr" to its first value already, which is 0 in a warmup.
        rates = [group.get("initial_lr", group.get("lr")) for group in made.param_groups]
        for doubt in doubts(
            seen.plan,
            parameters=seen.trained,
            learning_rate=max(
                (float(each) for each in rates if each is not None), default=math.inf
            ),
            optimizer=type(made).__name__.lower(),
        ):
            logger.warning(doubt)


@register
class ExpectedEpochs(Feature):
    """Counts epochs as expected passes over the rows; Trainer counts whole loaders."""

    def begin(self, seen: Seen) -> None:
        self._a_step = seen.plan.expected_batch_size / seen.plan.drawn_from

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        state.epoch = state.global_step * self._a_step


@register
class Progress(Feature):
    """Shows epsilon, and what else is released with noise, behind a terminal's bar and in columns
    of a notebook's table, at the first step and at each log. There, the training loss reads
    "withheld" unless it is released."""

    _shows = False

    def begin(self, seen: Seen) -> None:
        self._seen = seen

    def on_train_begin(self, args: object, state: State, control: Control, **kw: object) -> None:
        self._shows = False

    def on_step_end(self, args: object, state: State, control: Control, **kw: object) -> None:
        if not self._shows and (self._those("training_bar") or self._those("training_tracker")):
            self._show(self._seen.spent(), state)

    def on_log(self, args: object, state: State, control: Control, **kw: Any) -> None:
        self._show(kw.get("logs") or {}, state)

    def on_evaluate(self, args: object, state: State, control: Control, **kw: object) -> None:
        for table in self._those("training_tracker"):
            columns, *_, last = table.inner_table
            if last[columns.index("Training Loss")] == "No log":
                last[columns.index("Training Loss")] = "withheld"
            if "" in columns:  # the table takes `eval_` off all names, and so all of `epsilon`
                place = columns.index("")
                for row in table.inner_table:
                    del row[place : place + 1]
            table.display()

    def _those(self, name: str) -> list[Any]:
        """Return the bars or tables that the trainer's callbacks show now."""
        found = (getattr(each, name, None) for each in self._seen.callbacks)
        return [each for each in found if each is not None]

    def _show(self, logs: Mapping[str, float], state: State) -> None:
        if not {"epsilon", NO_EPSILON} & logs.keys():
            return
        self._shows = True
        noised = {n.replace("_", " "): logs[n] for n in logs if n.startswith("noised_")}
        behind = "privacy not established"
        if "epsilon" in logs:
            behind = f"epsilon {logs['epsilon']:g}"
            behind += "".join(f", {name} {value:.4g}" for name, value in noised.items())
        for bar in self._those("training_bar"):
            bar.set_postfix_str(behind)
        if "epsilon" not in logs or any(name.startswith("eval_") for name in logs):
            return
        for table in self._those("training_tracker"):
            columns = table.inner_table[0]
            place = state.global_step if columns[0] == "Step" else round(state.epoch or 0, 2)
            is_new = table.inner_table[-1][0] != place  # else it keeps its metrics
            row: dict[str, object] = {
                **dict.fromkeys(columns if is_new else (), "No log"),  # the first must fill all
                columns[0]: place,
                "Training Loss": logs.get("loss", "withheld"),
                "Epsilon": logs["epsilon"],
                **{name.title(): value for name, value in noised.items()},
            }
            table.write_line(row)
            table.display()  # not only after the next step


@register
class Unnoised(Inside):
    """``release=[...]``: what the user lets out without noise, on purpose. Beside the norm of the
    clipped mean stands ``measured_signal_to_noise``, |g|^2 / |z|^2 with the norm as it is."""

    asked_for_by = "release"
    _loss: Tensor | None = None
    _signal: float = 0.0

    def clipped(self, sums: dict[str, Tensor]) -> None:
        if CLIPPED_GRADIENT_NORM in self.args.release:
            squares = sum(float(total.double().square().sum()) for total in sums.values())
            self._signal = squares**0.5 / self.run.plan.expected_batch_size

    def stepped(self, loss_sum: Tensor) -> None:
        if TRAINING_LOSS in self.args.release:
            total = self.run.processes.summed(loss_sum)
            self._loss = total / self.run.plan.expected_batch_size

    def released(self, seen: Seen) -> None:
        seen.loss = self._loss

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        asked_for = CLIPPED_GRADIENT_NORM in self.args.release
        if asked_for and seen.noise_norm is not None and "grad_norm" in logs:
            logs[CLIPPED_GRADIENT_NORM] = self._signal
            logs["measured_signal_to_noise"] = (self._signal / seen.noise_norm) ** 2


@register
class PhysicalBatch(Inside):
    """``auto_physical_batch_size``: the largest physical batch that fits, found once, before the
    steps. ``per_device_train_batch_size`` is an upper limit, unless it is the default."""

    asked_for_by = "auto_physical_batch_size"
    _found = False

    def fit(self, mechanism: Mechanism, optimizer: Optimizer | None) -> None:
        if self._found:
            return
        self._found, args = True, self.args
        given = args.per_device_train_batch_size
        default = default_of(type(args).__dataclass_fields__["per_device_train_batch_size"])
        args.per_device_train_batch_size = mechanism.find_physical_batch(
            optimizer,
            length=args.auto_physical_batch_length,
            most_examples=None if given == default else given,
        )
