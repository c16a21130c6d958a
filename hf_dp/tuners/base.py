"""The hooks by which a method decides what trains, and the preconditions that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.checks import refuse_frozen_heads
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.apply import complete, describe_training
from hf_dp.tuners.selection import SelectionConfig, always_trained, candidates
from hf_dp.tuners.without_privacy import PlainRun


class Tuner:
    """Decides what trains inside a private run.

    This base class decides nothing: everything that is trainable trains.
    """

    clips_in_its_own_way = False  # whether :meth:`engine` differs from the run's engine
    gradients_are_noised_sums = True  # and not made of several of them
    needs_whole_weights = ""  # why, where a sharded model cannot be trained

    @property
    def undecided(self) -> bool:
        """Whether what trains is still to be decided, when training starts."""
        return False

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        """Return what the selection will release, or None if there is no selection."""
        return None

    def prepare(self, run: PrivateRun) -> None:
        """Raise for what cannot work, before anything is written."""

    def check_arguments(self, args: TrainingArguments) -> None:
        """Raise InvalidArgumentError for training arguments that cannot work."""

    def start(self, run: PrivateRun, checkpoint: str | None = None) -> None:
        """Select what trains, or read what the run of a checkpoint selected.

        It is called before the optimizer exists, and may replace ``run.model``.
        """

    def start_plain(self, run: PlainRun, checkpoint: str | None = None) -> None:
        """Choose what trains in a run without privacy, as :meth:`start` does in a private one, or
        read what the run of a checkpoint chose.

        What is chosen by noisy numbers there is chosen by the same numbers without noise here.
        """

    def before_plain_step(self, run: PlainRun, step: int) -> None:
        """Do what is due before a batch of step number ``step`` of a run without privacy."""

    def before_step(self, run: PrivateRun, step: int) -> None:
        """Do what is due before private step number ``step``, counted from 0."""

    def engine(self, run: PrivateRun) -> ClippingEngine:
        """Return the engine that clips the gradients of the steps."""
        return run.engine()

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients for the optimizer, made from what was clipped and noised."""
        return noised

    def tune(self, optimizer: Any) -> None:
        """Change the optimizer that has just been made."""

    def releases_to_come(self) -> int:
        """Return how many more noisy releases this process will make after the first step."""
        return 0

    def save(self, folder: str) -> None:
        """Write what was selected, beside weights that do not show it themselves."""

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        """Make everything trainable inside that may ever train, so that the optimizer gets it."""
        yield

    def describe(self, model: nn.Module) -> str:
        """Return what trains, in words, for the card."""
        return describe_training(model)


# What makes the tuner of a configuration: called with a copy of it, and whether the run is private.
TUNERS: dict[type, Callable[[Any, bool], Tuner | None]] = {}


def serves(*kinds: type) -> Callable[[Any], Any]:
    """Register what makes the tuner of these configurations, a class or a function; a decorator."""

    def register(make: Any) -> Any:
        TUNERS.update(dict.fromkeys(kinds, make))
        return make

    return register


def refuse_options(run: PrivateRun, config: Any) -> None:
    """Raise InvalidArgumentError for a way to clip that a method with its own engine lacks."""
    method, strategy = config.method.upper(), run.options.clipping_strategy
    if run.plan.clipping not in ("flat", "automatic"):
        raise invalid("clipping", run.plan.clipping, f"to be 'flat' or 'automatic' with {method}")
    if strategy not in (None, "book_keeping"):
        advice = "The method computes norms in its own way."
        raise invalid("clipping_strategy", strategy, f"to be None with {method}", advice)


def freeze_others(model: nn.Module, config: SelectionConfig) -> None:
    """Freeze what neither may be chosen nor always trains, as an adapter would."""
    kept = {*candidates(model, config), *always_trained(model, config)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter in kept)


def refuse_made_before(run: PrivateRun | PlainRun, config: SelectionConfig) -> None:
    """Raise for a model that cannot work with a selection in the run, before it costs privacy."""
    if hasattr(run.model, "peft_config"):
        raise InvalidArgumentError(
            "Expected `peft_config` to be None for a model that is a PeftModel already. Pass the "
            "base model, or leave `peft_config` unset."
        )
    complete(run.model, config)
    refuse_frozen_heads(run.model, always_trained(run.model, config))


def refuse_several_processes(run: PlainRun, config: SelectionConfig) -> None:
    """Raise for a choice by a sample of rows in several processes of a run without privacy."""
    if not run.processes.alone:
        expected = "to choose in one process with privacy_mode='non_private'"
        advice = f"There are {run.processes.count}, and each would sample rows of its own."
        name = type(config).__name__
        raise invalid("peft_config", name, expected, advice, UnsupportedArgumentError)


def refuse_other_options(earlier: Any, now: Any) -> None:
    """Raise ConfigError when a resumed run has other options than the run was started with."""
    then, wanted = earlier.options(), now.options()
    changed = [name for name in wanted if then.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"Cannot resume: `{name}` of peft_config is {wanted[name]!r}, but the run was started "
            f"with {then.get(name)!r}. Set it back to that value, or start a new run in a new "
            "output_dir."
        )


@contextmanager
def only_trains(model: nn.Module, names: set[str]) -> Iterator[Callable[[set[str]], None]]:
    """Leave only the named parameters trainable inside, of those that were trainable.

    Yields: a function that takes other names and restricts to them instead.
    """
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
