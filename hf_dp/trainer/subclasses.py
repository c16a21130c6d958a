"""Check that a subclass of DPTrainer overrides nothing that draws, clips, adds noise or records."""

from __future__ import annotations

from hf_dp.errors import UnsupportedArgumentError

_PRIVATE_SEAMS = (
    "training_step",
    "get_train_dataloader",
    "get_batch_samples",
    "_prepare_for_training",
    "_run_epoch",
    "columns_for_training",
    "check_engine",
    "run",
    "training_data",
)


def check_subclass(trainer_class: type, dp_trainer: type, base: type) -> None:
    """Raise UnsupportedArgumentError when a subclass overrides a part of the private step.

    It may not override ``compute_loss`` either, which private steps do not call.
    """
    for name in _PRIVATE_SEAMS:
        if getattr(trainer_class, name) is not getattr(dp_trainer, name):
            raise UnsupportedArgumentError(
                f"{trainer_class.__name__} overrides {name}, which draws, clips, adds noise or "
                "records the step. The privacy statement would describe something that did not "
                "run. Override compute_per_example_loss instead, or use callbacks."
            )
    if trainer_class.compute_loss is not base.compute_loss:  # type: ignore[attr-defined]
        raise UnsupportedArgumentError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for a "
            "batch, but a private step needs one loss per example. Override "
            "compute_per_example_loss(self, model, inputs) -> Tensor (b,) instead."
        )
