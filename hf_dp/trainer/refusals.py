"""What a private trainer refuses of what it is given."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import Trainer

from hf_dp._validate import invalid
from hf_dp.clipping import refuse_coupling
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.run.checks import (
    check_head_is_trainable,
    refuse_adapters_from_data,
    refuse_selections_from_data,
)
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.plain import Given
from hf_dp.trainer.subclasses import check_subclass


def check_private(given: Given, args: DPTrainingArguments) -> None:
    """Raise UnsupportedArgumentError for a subclass or a loss that no private step can have."""
    name = given.trainer_class.__name__
    check_subclass(given.trainer_class, given.dp_trainer, Trainer)
    if given.has_own_loss and args.privacy_mode == DP_FP and not args.is_published_dp_fp:
        raise UnsupportedArgumentError(
            f"{name} overrides compute_per_example_loss, which takes the model's inputs; with "
            f"dp_fp_variant={args.dp_fp_variant!r} the last layer trains on released rows, not on "
            "inputs. Use privacy_mode='dp_sgd' for a loss of your own."
        )
    if given.has_own_loss and args.chunked_loss:
        raise invalid(
            "chunked_loss",
            True,
            f"to be False for {name}, which computes a loss of its own",
            "Remove it.",
            UnsupportedArgumentError,
        )
    if given.compute_loss_func is not None:
        raise invalid(
            "compute_loss_func",
            given.compute_loss_func,
            "to be None in private modes",
            "It returns one number for a batch. Override "
            "DPTrainer.compute_per_example_loss(self, model, inputs).",
            UnsupportedArgumentError,
        )


def check_private_model(model: Any, args: DPTrainingArguments, *, trains: bool) -> None:
    """Raise for a model that cannot train privately, or was made from private rows already."""
    if model is None:  # model_init makes it
        return
    refuse_coupling(model)
    check_head_is_trainable(model)
    if not args.adapter_init_data_is_public:
        refuse_adapters_from_data(model)
        if trains:
            refuse_selections_from_data(model)


def refuse_search() -> NoReturn:
    """Refuse a search: each trial is a release on the same rows."""
    raise UnsupportedArgumentError(
        "hyperparameter_search trains on the private rows once per trial, and the epsilon of one "
        "run does not cover the search. Tune on public data; or run trials one by one, all of "
        "which count (epsilon of their ledgers' events together); or draw their number secretly "
        "and release only the best (`hf-dp account search` gives its cost)."
    )
