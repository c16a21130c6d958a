"""The hooks by which a method decides what trains, and what all methods share."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoConfig, TrainingArguments

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.distributed.processes import Processes
from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.losses import known_task
from hf_dp.plans.rounding import clipping_share, rounding_margin
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.checks import head_of, refuse_frozen_heads
from hf_dp.run.clock import Clock
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.selection import PrivateConfig, SelectionConfig, SelectionModel, always_trained

logger = logging.getLogger(__name__)

# Without privacy no gradient is clipped: far above any norm, and a float32.
_NO_CLIPPING = 1e30

Batch = Mapping[str, object]


@dataclass
class PlainRun:
    """One run in ``non_private`` mode, as a tuner sees it: no plan, no ledger, nothing noised.

    A recipe can then be compared with itself without privacy. What a private run chooses by noisy
    numbers is chosen by the same numbers without noise, and nothing is claimed of it.
    """

    model: nn.Module  # what trains; a tuner may replace it
    device: torch.device
    processes: Processes  # that train it together
    # The collated batches of a sample of the training rows that holds each with this probability.
    sample: Callable[[float], Iterator[Batch]]
    losses: Callable[[nn.Module, Batch], Tensor]  # of each example, (b,)
    clock: Clock = field(default_factory=Clock)
    selections: Sequence[object] = ()  # what the tuner chose


Run = PrivateRun | PlainRun


class Tuner:
    """Decides what trains inside a run. This base class decides nothing: everything that is
    trainable trains."""

    undecided = False  # whether what trains is still to be decided, when training starts

    clips_in_its_own_way = False  # whether :meth:`engine` differs from the run's engine
    gradients_are_noised_sums = True  # and not made of several of them
    selects_again = False  # what trains, between steps
    keeps_all_noise = True  # and does not remove a part of it in :meth:`finish`
    needs_whole_weights = ""  # why, where a sharded model cannot be trained

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        """Return what the selection will release, or None if there is no selection."""
        return None

    def prepare(self, run: Run) -> None:
        """Raise for what cannot work, before anything is written."""

    def check_arguments(self, args: TrainingArguments) -> None:
        """Raise InvalidArgumentError for training arguments that cannot work."""

    def start(self, run: Run, checkpoint: str | None = None) -> None:
        """Select what trains, or read what the run of a checkpoint selected. It is called before
        the optimizer exists, and may replace ``run.model``."""

    def before_step(self, run: Run, step: int) -> None:
        """Do what is due before step number ``step``, counted from 0. Without privacy it is called
        for each batch of a step."""

    def engine(self, run: PrivateRun) -> ClippingEngine:
        """Return the engine that clips the gradients of the steps."""
        return run.engine()

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients for the optimizer, made from what was clipped and noised."""
        return noised

    def tune(self, optimizer: Optimizer) -> None:
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


Config = TypeVar("Config", bound=SelectionConfig)


class ConfiguredTuner(Tuner, Generic[Config]):
    """The base of tuners that a :class:`SelectionConfig` describes: a copy, into which the tuner
    writes what it chose."""

    undecided = True

    def __init__(self, config: Config, is_private: bool = True):
        self.config, self.is_private = config, is_private

    def prepare(self, run: Run) -> None:
        if hasattr(run.model, "peft_config"):
            raise InvalidArgumentError(
                "Expected `peft_config` to be None for a model that is a PeftModel already. Pass "
                "the base model, or leave `peft_config` unset."
            )
        complete(run.model, self.config)
        refuse_frozen_heads(run.model, always_trained(run.model, self.config))
        if isinstance(run, PrivateRun) and self.clips_in_its_own_way:
            self._refuse_options(run)

    def _refuse_options(self, run: PrivateRun) -> None:
        """Raise InvalidArgumentError for a way to clip that the method's own engine lacks."""
        method, strategy = self.config.method.upper(), run.options.clipping_strategy
        if run.plan.clipping not in ("flat", "automatic"):
            raise invalid(
                "clipping", run.plan.clipping, f"to be 'flat' or 'automatic' with {method}"
            )
        if strategy not in (None, "book_keeping"):
            advice = "The method computes norms in its own way."
            raise invalid("clipping_strategy", strategy, f"to be None with {method}", advice)

    def start(self, run: Run, checkpoint: str | None = None) -> None:
        if self.undecided:
            self.prepare(run)  # again: things may have changed, and what follows costs privacy
            earlier = None
            if checkpoint is not None:
                earlier = type(self.config).from_pretrained(checkpoint)
                refuse_other_options(earlier, self.config)
            self.decide(run, checkpoint, earlier)
            self.undecided = False

    def decide(self, run: Run, checkpoint: str | None, earlier: Config | None) -> None:
        """Select what trains, or take over what the run of a checkpoint selected, of which
        ``earlier`` is the configuration."""
        raise NotImplementedError

    def only_chosen(self, model: nn.Module, chosen: Iterable[nn.Parameter]) -> None:
        """Freeze what is neither among these nor always trains, as an adapter would."""
        kept = {*chosen, *always_trained(model, self.config)}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in kept)

    def save(self, folder: str) -> None:
        self.config.write_details(folder)


def refuse_other_options(earlier: SelectionConfig, now: SelectionConfig) -> None:
    """Raise ConfigError when a resumed run has other options than the run was started with."""
    then = earlier.options()
    for name, value in now.options().items():
        if then.get(name) != value:
            raise ConfigError(
                f"Cannot resume: `{name}` of peft_config is {value!r}, but the run was started "
                f"with {then.get(name)!r}. Set it back to that value, or start a new run in a new "
                "output_dir."
            )


# What makes the tuner of a configuration: called with a copy of it, and whether the run is private.
MakeTuner = Callable[..., Tuner | None]
TUNERS: dict[type[PeftConfig], MakeTuner] = {}
Maker = TypeVar("Maker", bound=MakeTuner)


def serves(*kinds: type[PeftConfig]) -> Callable[[Maker], Maker]:
    """Register what makes the tuner of these configurations, a class or a function; a decorator."""

    def register(make: Maker) -> Maker:
        TUNERS.update(dict.fromkeys(kinds, make))
        return make

    return register


class Samples:
    """Clipped sums over secret draws of a private run; they leave through its gate, with noise.

    Args:
        iterations: how many draws.
        margin: by how much of C the noise is scaled up for rounding; by default as the draw asks
            (:func:`hf_dp.plans.rounding.rounding_margin`).

    Attributes:
        clipping_norm: C, of what one example adds.
        clips_to: the share of it that an engine is given, so that rounding is covered.
        noise_multiplier: the standard deviation of the noise, divided by the sensitivity.
    """

    def __init__(self, run: PrivateRun, iterations: int, margin: float | None = None):
        plan, rows = run.plan.selection, run.plan.num_examples
        assert plan is not None and plan.noise_multiplier is not None
        self._run, self.plan = run, plan
        expected = plan.sample_rate * rows
        self.margin = rounding_margin(expected, rows) if margin is None else margin
        self.clipping_norm, self.noise_multiplier = plan.clipping_norm, plan.noise_multiplier
        self.clips_to = self.clipping_norm * clipping_share(expected, rows, self.margin)
        run.check_engine()
        run.model.train()  # as in the steps to come
        self._draws = iter(run.draws(plan.sampler(rows, iterations)))

    def feed(self, engine: ClippingEngine) -> None:
        """Run the next draw through the model into the engine."""
        self._run.feed(engine, next(self._draws))

    def release(self, sums: Mapping[str, Tensor], sensitivity: float) -> dict[str, Tensor]:
        """Return the sums with noise. Args: sensitivity: how far one example can move them."""
        with self._run.release(self.plan.release(sensitivity)) as release:
            return release.sum(dict(sums))


class ExactSamples:
    """The same of a run without privacy: nothing is clipped, and no noise is added."""

    plan: None = None
    margin, clipping_norm, clips_to, noise_multiplier = 0.0, _NO_CLIPPING, _NO_CLIPPING, 0.0

    def __init__(self, run: PlainRun, config: PrivateConfig):
        if not run.processes.alone:
            expected = "to choose in one process with privacy_mode='non_private'"
            advice = f"There are {run.processes.count}, and each would sample its own rows."
            name = type(config).__name__
            raise invalid("peft_config", name, expected, advice, UnsupportedArgumentError)
        self._run, self._rate = run, config.selection_sample_rate
        run.model.train()  # as in the steps to come

    def feed(self, engine: ClippingEngine) -> None:
        for batch in self._run.sample(self._rate):
            engine.backward(self._run.losses(self._run.model, batch))

    def release(self, sums: Mapping[str, Tensor], sensitivity: float) -> dict[str, Tensor]:
        return dict(sums)


@contextmanager
def only_trains(model: nn.Module, names: set[str]) -> Iterator[Callable[[set[str]], None]]:
    """Leave only the named parameters trainable inside, of those that were trainable. What it
    yields takes other names instead."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def restrict(to: set[str]) -> None:
        for name, parameter in trained.items():
            parameter.requires_grad_(name in to)

    restrict(names)
    try:
        yield restrict
    finally:
        restrict(set(trained))


def samples_of(
    run: Run, config: PrivateConfig, iterations: int, margin: float | None = None
) -> Samples | ExactSamples:
    """Return the samples that a selection looks at. Args: as of :class:`Samples`."""
    if isinstance(run, PlainRun):
        return ExactSamples(run, config)
    return Samples(run, iterations, margin)


_PEFT_TASKS = {
    "sequence_classification": "SEQ_CLS",
    "causal_lm": "CAUSAL_LM",
    "question_answering": "QUESTION_ANS",
}


def load_model(name_or_path: str) -> nn.Module:
    """Load a model by name or path, with the class that its config names."""
    config = AutoConfig.from_pretrained(name_or_path)
    architecture = (config.architectures or [None])[0]
    cls = getattr(transformers, architecture or "", None)
    if cls is None:
        raise InvalidArgumentError(
            f"Expected `model`={name_or_path!r} to name its class in config.architectures, got "
            f"{config.architectures!r}. Load it yourself, and pass the model."
        )
    return cls.from_pretrained(name_or_path)


def apply_peft(
    model: nn.Module, peft_config: PeftConfig, device: torch.device, seed: int | None = None
) -> PeftModel:
    """Move the model to its device, then wrap it for the adapter.

    If the model moved after wrapping, the optimizer would update copies: the run would look right
    and learn nothing. What is set and chosen is noted in a copy, ``peft_config`` of the result: the
    caller's own configuration may serve another run.

    Args: seed: that of the run, for a public draw of what trains that has no seed of its own.
    """
    if isinstance(model, PeftModel):
        raise InvalidArgumentError(
            "Expected `peft_config` to be None for a model that is a PeftModel already. Pass the "
            "base model, or leave `peft_config` unset."
        )
    config = copy.deepcopy(peft_config)
    complete(model, config)
    if getattr(config, "selection_seed", 0) is None:
        vars(config)["selection_seed"] = seed
    base: Any = model.to(device)  # PEFT takes more than its annotations say
    try:
        return get_peft_model(base, config)
    except (ValueError, TypeError, KeyError) as problem:
        raise InvalidArgumentError(
            f"peft cannot apply `peft_config` to {type(model).__name__}: {problem}"
        ) from problem


def complete(model: nn.Module, peft_config: PeftConfig) -> None:
    """Set a missing ``task_type`` from the model's class, and log it. Without it PEFT would neither
    train nor save the head. It knows none for images: the head of an image classifier is named in
    ``modules_to_save`` instead, beside what is named there."""
    if peft_config.task_type is not None:
        return
    task = known_task(model)
    if task == "image_classification" and hasattr(peft_config, "modules_to_save"):
        given = peft_config.modules_to_save or []
        given = [given] if isinstance(given, str) else list(given)
        peft_config.modules_to_save = [*given, *(n for n in head_of(model) if n not in given)]
        logger.info("peft_config.modules_to_save: %s.", peft_config.modules_to_save)
        return
    peft_config.task_type = _PEFT_TASKS.get(task)
    logger.info("peft_config.task_type was not set; using %s.", peft_config.task_type)


def describe_training(model: nn.Module) -> str:
    """Return what trains, in words and counts, for the card."""
    named = list(model.named_parameters())
    trainable = sum(p.numel() for _, p in named if p.requires_grad)
    # Of selected modules and of ``modules_to_save``, PEFT also keeps the frozen originals.
    marks = (f".{SelectionModel.prefix}", ".modules_to_save.")
    copies = {p for n, p in named if p.requires_grad and any(mark in n for mark in marks)}
    total = sum(p.numel() for _, p in named) - sum(p.numel() for p in copies)
    if trainable == total:
        return f"all {total:,} parameters"
    configs: Mapping[str, PeftConfig] = getattr(model, "peft_config", None) or {}
    kinds = {str(getattr(each.peft_type, "value", each.peft_type)) for each in configs.values()}
    of_kind = f" ({', '.join(sorted(kinds))})" if kinds else ""
    return f"{trainable:,} of {total:,} parameters{of_kind}"
