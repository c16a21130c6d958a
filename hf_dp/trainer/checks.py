"""What must hold of model, data, collator and subclass before a private run may start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from hf_dp.errors import DataError, UnaccountedGradientError, UnsupportedArgumentError, UnsupportedModelError
from hf_dp.losses import base_model
from hf_dp.trainer.dataloader import check_rows


def check_train_dataset(dataset: Any) -> int:
    """The number of examples N of a training set. Raises: DataError without a length, or with fewer than two rows."""
    if dataset is None:
        raise DataError("Private training needs a `train_dataset`.")
    try:
        length = len(dataset)
    except TypeError:
        raise DataError(
            f"The train_dataset ({type(dataset).__name__}) has no length. Poisson sampling needs the number of rows: load "
            "the data without streaming=True."
        ) from None
    if length < 2:
        raise DataError(f"Expected a train_dataset with at least two rows, got {length}. Check file and split name.")
    return length


def check_collator(collator: Callable[[list[Any]], Mapping[str, Any]], dataset: Any) -> None:
    """Collate two rows and look at the result's shape: labels there, one row per example.

    Raises: DataError. Nothing computed here is kept.
    """
    if type(collator).__name__ == "DataCollatorWithFlattening":
        raise DataError(
            "DataCollatorWithFlattening puts many examples into one row, so no example could be clipped. Use "
            "DataCollatorWithPadding."
        )
    batch = collator([dataset[0], dataset[1]])
    if not isinstance(batch, Mapping):
        raise DataError(f"Expected the data collator to return a mapping of tensors, got {type(batch).__name__}.")
    if "labels" not in batch:
        raise DataError(
            f"The training batches have no `labels` (they have {sorted(batch)}). Name the label column `label` or `labels` "
            "(dataset.rename_column), or use a collator that makes labels."
        )
    check_rows(batch, 2)


def check_not_training_data(dataset: Any, train_dataset: Any) -> None:
    """Raise UnsupportedArgumentError when an evaluation set is the training set: its metrics would be un-noised releases."""
    candidates = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    for candidate in candidates:
        if candidate is None or train_dataset is None:
            continue
        same = candidate is train_dataset or (
            getattr(candidate, "_fingerprint", None) is not None
            and getattr(candidate, "_fingerprint", None) == getattr(train_dataset, "_fingerprint", None)
        )
        if same:
            raise UnsupportedArgumentError(
                "Expected an evaluation set other than the training set: metrics on training rows are computed from private "
                "data without noise, and epsilon would not cover them. Pass a held-out set."
            )


_PRIVATE_SEAMS = (
    "training_step", "get_train_dataloader", "get_batch_samples", "_prepare_for_training", "_run_epoch", "private_batches",
    "feed", "engine", "losses_of", "columns_for_training", "check_engine", "replace_model",
)  # fmt: skip


def check_subclass(trainer_class: type, dp_trainer: type, base: type) -> None:
    """Raise when a subclass overrides ``compute_loss``, which private steps do not call, or what a private step is."""
    for name in _PRIVATE_SEAMS:
        if getattr(trainer_class, name) is not getattr(dp_trainer, name):
            raise UnsupportedArgumentError(
                f"{trainer_class.__name__} overrides {name}, which draws, clips, adds noise or records the step: the privacy "
                "statement would describe something that did not run. Override compute_per_example_loss, or use callbacks."
            )
    if trainer_class.compute_loss is not base.compute_loss:  # type: ignore[attr-defined]
        raise UnsupportedArgumentError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for a batch; a private step needs one "
            "loss per example. Override compute_per_example_loss(self, model, inputs) -> Tensor (b,) instead."
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise UnaccountedGradientError when the optimizer trains a parameter that the model does not have."""
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UnaccountedGradientError(
                    f"The optimizer trains a parameter of shape {tuple(parameter.shape)} that is not in the model, so its "
                    "gradient would be neither clipped nor noised. Make it part of the model."
                )


def check_head_is_trainable(model: nn.Module) -> None:
    """Under an adapter, the head of a classifier must train, too: it is new, and random weights would stay.

    Raises: UnsupportedModelError naming ``modules_to_save``, or when nothing trains at all.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no trainable parameter. Set requires_grad_(True) on what to train (in a recipe: "
            "leave something out of `freeze`)."
        )
    base: Any = base_model(model)
    if base is model:
        return
    refuse_frozen_heads(base, {parameter for parameter in base.parameters() if parameter.requires_grad})


def refuse_frozen_heads(model: Any, trained: Collection[nn.Parameter]) -> None:
    """Raise UnsupportedModelError when a classifier has a head of which nothing is ``trained``."""
    if not type(model).__name__.endswith(("Classification", "QuestionAnswering")):
        return
    backbone = getattr(model, "base_model_prefix", "")
    frozen = sorted(
        name
        for name, child in model.named_children()
        if name != backbone
        and any(True for _ in child.parameters())
        and not any(parameter in trained for parameter in child.parameters())
    )
    if frozen:
        raise UnsupportedModelError(
            f"Under this peft_config the head {frozen} of {type(model).__name__} would stay frozen, and a new head is random. "
            f"Set modules_to_save={frozen} in the peft_config."
        )
