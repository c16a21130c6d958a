"""What a trainer is given, and what of it no private step can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peft import PeftConfig
from torch import Tensor, nn
from transformers import Trainer

from hf_dp._validate import invalid
from hf_dp.batches.structure import DataSet
from hf_dp.batches.units import UnitTable, rows_to_draw, split_off_units
from hf_dp.clipping import refuse_coupling
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap import TrainingUsers
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.dp_sgd import MEAN_RUNS
from hf_dp.run import checks
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.row_arguments import users_of

# What a subclass may override, of what DPTrainer and Trainer have. Trainer has a hundred methods,
# and many of them see a batch: what is not known to be harmless is refused. These are the task
# (the self-check compares it with one example at a time), what comes after the noise, what reads
# rows that are not the training set's, and what is written and sent.
MAY_OVERRIDE = frozenset(
    """compute_per_example_loss synthetic_batches compute_loss_context_manager
    create_optimizer create_scheduler create_optimizer_and_scheduler get_decay_parameter_names
    get_optimizer_cls_and_kwargs log
    evaluate evaluation_loop predict prediction_step get_eval_dataloader get_test_dataloader
    save_model save_metrics save_state log_metrics metrics_format describe create_model_card
    push_to_hub init_hf_repo""".split()
)
# Those of them that may read rows which never come to DPTrainer.evaluation_loop, to be compared.
_EVALUATE = frozenset({"evaluate", "evaluation_loop", "predict"})


@dataclass
class Given:
    """What a trainer was given besides its arguments; ``dp_trainer`` is DPTrainer."""

    trainer_class: type[Trainer]
    dp_trainer: type[Trainer]
    model: str | nn.Module | None
    train_dataset: DataSet
    eval_dataset: DataSet
    model_init: Callable[..., nn.Module] | None
    compute_loss_func: Callable[..., Tensor] | None
    peft_config: PeftConfig | None

    def overrides(self, name: str) -> bool:
        """Return whether the trainer's class has a method of its own."""
        return getattr(self.trainer_class, name) is not getattr(self.dp_trainer, name)

    def check_private(self, args: DPTrainingArguments) -> None:
        """Raise UnsupportedArgumentError for a subclass or a loss that no private step can have."""
        name, own_loss = self.trainer_class.__name__, self.overrides("compute_per_example_loss")
        check_subclass(self.trainer_class, self.dp_trainer)
        if own_loss and args.privacy_mode == DP_FP and not args.is_published_dp_fp:
            raise UnsupportedArgumentError(
                f"{name} overrides compute_per_example_loss, but in DP-FP the last layer trains on "
                "released vectors. Use privacy_mode='dp_sgd' for a loss of your own."
            )
        if own_loss and args.chunked_loss:
            raise invalid(
                "chunked_loss",
                True,
                f"to be False for {name}, which computes a loss of its own",
                "Remove it.",
                UnsupportedArgumentError,
            )
        if self.compute_loss_func is not None:
            raise invalid(
                "compute_loss_func",
                self.compute_loss_func,
                "to be None in private modes",
                "It returns one number for a batch. Override "
                "DPTrainer.compute_per_example_loss(self, model, inputs).",
                UnsupportedArgumentError,
            )

    def check_evaluation(self, search: bool) -> bool:
        """Return whether DPTrainer sees all rows that the trainer's class evaluates on.

        Raises: UnsupportedArgumentError where it does not, in a private ``search``.
        """
        own = [(each, name) for each in _of_user(self.trainer_class) for name in vars(each)]
        unseen = [f"{each.__name__}.{name}" for each, name in own if name in _EVALUATE]
        if search and unseen:
            raise UnsupportedArgumentError(
                f"With {MEAN_RUNS}, the score that selects a run must read no training row, but "
                f"{unseen[0]} may read rows that are not compared with them. Override "
                f"get_eval_dataloader or pass compute_metrics instead, or leave {MEAN_RUNS} out."
            )
        return not unseen

    def check_private_model(self, model: nn.Module | None, args: DPTrainingArguments) -> None:
        """Raise for a model that cannot train privately, or was made from private rows already."""
        if model is None:  # model_init makes it
            return
        refuse_coupling(model)
        checks.check_head_is_trainable(model)
        if not args.adapter_init_data_is_public:
            checks.refuse_data_in_adapters(model, None if self.train_dataset is None else ())


def check_subclass(trainer_class: type[Trainer], dp_trainer: type[Trainer]) -> None:
    """Raise UnsupportedArgumentError for overriding what is not in :data:`MAY_OVERRIDE`."""
    if trainer_class.compute_loss is not Trainer.compute_loss:
        raise UnsupportedArgumentError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for a "
            "batch. Override compute_per_example_loss(self, model, inputs) -> Tensor (b,)."
        )
    for each in _of_user(trainer_class):
        for name in vars(each):
            known = name in MAY_OVERRIDE or (name.startswith("__") and name.endswith("__"))
            if not known and hasattr(dp_trainer, name):
                raise UnsupportedArgumentError(
                    f"{each.__name__} overrides {name}, which may change what draws, clips, adds "
                    "noise or records a step. Override compute_per_example_loss instead, use "
                    f"callbacks, or override one of {sorted(MAY_OVERRIDE)}."
                )


def _of_user(trainer_class: type[Trainer]) -> list[type]:
    """Return the classes of a trainer that are neither hf_dp's nor Trainer's."""
    others = [each for each in trainer_class.__mro__ if each not in Trainer.__mro__]
    return [each for each in others if each.__module__.partition(".")[0] != "hf_dp"]


@dataclass(frozen=True)
class Rows:
    """Training rows, without the column that says whose they are: ``units`` knows it, where users
    are protected. ``compared``: whether every evaluation set says whose its rows are."""

    data: DataSet
    units: UnitTable | None = None
    compared: bool = True

    @classmethod
    def of(cls, args: DPTrainingArguments, train_dataset: DataSet, eval_dataset: DataSet) -> Rows:
        """Note whose the training rows are, unless it is noted, and refuse evaluation rows of the
        same users, unless their metrics are released on purpose."""
        noted = train_dataset if isinstance(train_dataset, cls) else cls(train_dataset)
        if not args.is_private:
            return noted
        checks.check_train_dataset(noted.data)
        if noted is train_dataset:
            return noted
        users = users_of(args)
        if users is None:
            checks.hint_at_users(train_dataset)
            return noted
        units, data = split_off_units(train_dataset, users.column)
        data = rows_to_draw(data, units, users)
        checks.warn_of_users(units, users)
        compared = args.evaluate_on_training_rows or TrainingUsers(units).refuse(
            eval_dataset, search=args.private_selection_mean_runs is not None
        )
        return cls(data, units, compared)
