"""The points at which a choice of what trains is asked, and what none of them may start with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.clipping import ClippingEngine
from hf_dp.errors import ConfigError, InvalidArgumentError
from hf_dp.plan import PrivacyPlan
from hf_dp.selection_plan import SelectionPlan
from hf_dp.trainer.checks import refuse_frozen_heads
from hf_dp.trainer.loading import describe_training, set_task_type
from hf_dp.tuners.selection import SelectionConfig, always_trained, candidates


class Choice:
    """Nothing to choose: the model trains as it was given."""

    def plan(self, clipping_norm: float) -> SelectionPlan | None:
        """What will be released to choose, or None."""
        return None

    def prepare(self, trainer: Any) -> None:
        """Raise, before anything is written, for what cannot work."""

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        """Choose, or read what a checkpoint's run has chosen. Before the optimizer exists."""

    def before_step(self, trainer: Any) -> None:
        """Before each private step."""

    def engine(self, model: nn.Module, plan: PrivacyPlan) -> ClippingEngine | None:
        """What clips the steps' gradients; None: the ordinary engine."""
        return None

    def finish(self, noised: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that the optimizer gets, by parameter, from what was clipped and noised."""
        return noised

    def tune(self, optimizer: Any) -> None:
        """Change the optimizer that was just made."""

    def releases_to_come(self) -> int:
        """How many more noisy releases this process means to make after the first step."""
        return 0

    def save(self, folder: str) -> None:
        """Write what was chosen beside weights that do not tell it themselves."""

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        """Inside, everything that may train at some time is trainable: for the optimizer."""
        yield

    def describe(self, model: nn.Module) -> str:
        """What trains, in words, for the card."""
        return describe_training(model)


def refuse_options(args: Any, config: Any) -> None:
    method = config.method.upper()
    if args.clipping not in ("flat", "automatic"):
        raise invalid("clipping", args.clipping, f"to be 'flat' or 'automatic' with {method}")
    if args.clipping_strategy not in (None, "book_keeping"):
        raise invalid(
            "clipping_strategy",
            args.clipping_strategy,
            f"to be None with {method}",
            "It has a way of its own to form norms.",
        )


def freeze_others(model: nn.Module, config: SelectionConfig) -> None:
    """Leave trainable what may be chosen and what always trains; an adapter would freeze the rest,
    too."""
    kept = {*candidates(model, config), *always_trained(model, config)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter in kept)


def refuse_made_before(trainer: Any, config: SelectionConfig) -> None:
    """What cannot work with a choice inside the run; asked before anything is paid for."""
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise invalid(
            "optimizers",
            type(trainer.optimizer).__name__,
            "to be (None, None) with this peft_config",
            "What trains is chosen when train() starts; set `optim` in the arguments instead.",
        )
    if hasattr(trainer.model, "peft_config"):
        raise InvalidArgumentError(
            "Expected `peft_config` to be None for a model that is a PeftModel already."
        )
    set_task_type(trainer.model, config)
    refuse_frozen_heads(trainer.model, always_trained(trainer.model, config))


def refuse_other_options(earlier: Any, now: Any) -> None:
    then, wanted = earlier.options(), now.options()
    changed = [name for name in wanted if then.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"Cannot resume: `{name}` of peft_config is {wanted[name]!r}, but the run was started "
            f"with {then.get(name)!r}."
        )
