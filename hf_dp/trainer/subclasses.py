"""Check that a subclass of DPTrainer overrides nothing that rows pass on their way to a step."""

from __future__ import annotations

from hf_dp.errors import UnsupportedArgumentError

# What a subclass may override, of what DPTrainer and Trainer have. Trainer has a hundred methods,
# and many of them see a batch: what is not known to be harmless is refused.
MAY_OVERRIDE = frozenset(
    {
        # the task: the self-check compares it with one example at a time
        "compute_per_example_loss",
        "synthetic_batches",
        "compute_loss_context_manager",  # is given no rows
        # after the noise
        "create_optimizer",
        "create_scheduler",
        "create_optimizer_and_scheduler",
        "get_decay_parameter_names",
        "get_optimizer_cls_and_kwargs",
        "log",
        # on rows that are not the training set's
        "evaluate",
        "evaluation_loop",
        "predict",
        "prediction_step",
        "get_eval_dataloader",
        "get_test_dataloader",
        # what is written and sent; each of them adds to what is there
        "save_model",
        "save_metrics",
        "save_state",
        "log_metrics",
        "metrics_format",
        "describe",
        "create_model_card",
        "push_to_hub",
        "init_hf_repo",
    }
)


def check_subclass(trainer_class: type, dp_trainer: type, base: type) -> None:
    """Raise UnsupportedArgumentError when a subclass overrides anything else.

    Attributes that neither class has are the subclass's own, and free.

    Args: base: transformers' Trainer.
    """
    if trainer_class.compute_loss is not base.compute_loss:  # type: ignore[attr-defined]
        raise UnsupportedArgumentError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for a "
            "batch, but a private step needs one loss per example. Override "
            "compute_per_example_loss(self, model, inputs) -> Tensor (b,) instead."
        )
    for each in trainer_class.__mro__:
        if each in base.__mro__ or each.__module__.partition(".")[0] == "hf_dp":
            continue
        for name in vars(each):
            known = name in MAY_OVERRIDE or (name.startswith("__") and name.endswith("__"))
            if not known and hasattr(dp_trainer, name):
                raise UnsupportedArgumentError(
                    f"{each.__name__} overrides {name}, which may change what draws, clips, adds "
                    "noise or records a step. The privacy statement would describe something that "
                    "did not run. Override compute_per_example_loss instead, use callbacks, or "
                    f"override one of {sorted(MAY_OVERRIDE)}."
                )
