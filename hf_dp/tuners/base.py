"""The hooks by which a method decides what trains, and the preconditions that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.errors import ConfigError, InvalidArgumentError
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.checks import refuse_frozen_heads
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import describe_training, set_task_type
from hf_dp.tuners.selection import SelectionConfig, always_trained, candidates


class Tuner:
    """Decides what trains, inside a private run. This one decides nothing: all that is trainable
    trains."""

    clips_in_its_own_way = False  # whether :meth:`engine` is another than the run's

    @property
    def undecided(self) -> bool:
        """Whether what trains is decided when training starts, and that is still to come."""
        return False

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        """Return what will be released to select, or None."""
        return None

    def prepare(self, run: PrivateRun) -> None:
        """Raise, before anything is written, for what cannot work."""

    def check_arguments(self, args: TrainingArguments) -> None:
        """Raise InvalidArgumentError for training arguments that cannot work."""

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        """Select what trains, or read what a checkpoint's run has selected.

        Before the optimizer exists; may replace ``run.model``.
        """

    def before_step(self, run: PrivateRun, step: int) -> None:
        """Do what is due before private step number ``step``, from 0."""

    def engine(self, run: PrivateRun) -> ClippingEngine:
        """Return what clips the steps' gradients."""
        return run.engine()

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that the optimizer gets, by parameter, from what was clipped and
        noised."""
        return noised

    def tune(self, optimizer: Any) -> None:
        """Change the optimizer that was just made."""

    def releases_to_come(self) -> int:
        """Return how many more noisy releases this process means to make after the first step."""
        return 0

    def save(self, folder: str) -> None:
        """Write what was selected beside weights that do not tell it themselves."""

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        """Make everything trainable, inside, that may train at some time: for the optimizer."""
        yield

    def describe(self, model: nn.Module) -> str:
        """Return what trains, in words, for the card."""
        return describe_training(model)


def refuse_options(run: PrivateRun, config: Any) -> None:
    """Raise InvalidArgumentError for ways to clip that a method with its own engine lacks."""
    method, strategy = config.method.upper(), run.options.clipping_strategy
    if run.plan.clipping not in ("flat", "automatic"):
        raise invalid("clipping", run.plan.clipping, f"to be 'flat' or 'automatic' with {method}")
    if strategy not in (None, "book_keeping"):
        raise invalid(
            "clipping_strategy",
            strategy,
            f"to be None with {method}",
            "It has a way of its own to form norms.",
        )


def freeze_others(model: nn.Module, config: SelectionConfig) -> None:
    """Leave trainable what may be chosen and what always trains; an adapter would freeze the rest,
    too."""
    kept = {*candidates(model, config), *always_trained(model, config)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter in kept)


def refuse_made_before(run: PrivateRun, config: SelectionConfig) -> None:
    """Raise for models that cannot work with a selection inside the run, before it is paid for."""
    if hasattr(run.model, "peft_config"):
        raise InvalidArgumentError(
            "Expected `peft_config` to be None for a model that is a PeftModel already."
        )
    set_task_type(run.model, config)
    refuse_frozen_heads(run.model, always_trained(run.model, config))


def refuse_other_options(earlier: Any, now: Any) -> None:
    then, wanted = earlier.options(), now.options()
    changed = [name for name in wanted if then.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"Cannot resume: `{name}` of peft_config is {wanted[name]!r}, but the run was started "
            f"with {then.get(name)!r}."
        )
