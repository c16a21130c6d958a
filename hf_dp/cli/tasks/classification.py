"""Read a run that classifies from a configuration, and carry it out; for texts and images alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_dp.cli.config import card_block, parse, peft_config
from hf_dp.cli.summary import metric_lines, print_summary, signal_to_noise
from hf_dp.errors import ConfigError


def run(trainer: Any) -> int:
    """Train, evaluate and save; print a summary whose last line is the output folder."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()  # and with push_to_hub also publish it
    found = {**trainer.evaluation_metrics(), **signal_to_noise(trainer.state.log_history)}
    trainer.save_metrics("eval", found, combined=False)
    trainer.save_state()  # the log; it is never published
    print_summary(trainer, metric_lines(metrics, trainer.eval_dataset))
    # Otherwise a process of several may abort at its exit; Trainer.end() does no more.
    trainer.accelerator.end_training()
    return 0


def configured(
    kinds: Sequence[type],
    build: Callable[[Any, Any, Any, Any], Any],
    values: dict[str, Any],
    words: Sequence[str],
) -> Any:
    """Return the trainer of a configuration.

    Args:
        kinds: the dataclasses of the task: of its model, and of its data.
        build: makes the trainer of these two, the training arguments and the adapter.

    Raises: ConfigError, and as ``build``.
    """
    from hf_dp.trainer.arguments import DPTrainingArguments

    model_args, data_args, args = parse(
        [*kinds, DPTrainingArguments],
        values,
        words,
        prog="hf-dp train",
        extra=("task", "peft", "card"),
    )
    card = card_block(values.get("card"))
    adapter = peft_config(values.get("peft"))
    if model_args.from_scratch and adapter is not None:
        raise ConfigError(
            "`from_scratch` does not go with `peft`: the random base of the adapter would not be "
            "saved. Leave one of them out."
        )
    trainer = build(model_args, data_args, args, adapter)
    if args.is_private:
        trainer.describe(**card)
    return trainer


def describe_sources(trainer: Any, model_args: Any, data_args: Any) -> None:
    """Note, for the card, which data the trainer trains on and which model it starts from.

    What is trained without privacy names its data in its configuration, for the cards of the
    private runs that start from it.
    """
    base = None if model_args.from_scratch else model_args.model_name_or_path
    trainer.card.update(dataset=data_args.public_name, base_model=base)
    if not trainer.args.is_private and (data_args.dataset_name or data_args.data_name):
        config = trainer.model.config
        seen = getattr(config, "pretraining_sources", None) or []
        config.pretraining_sources = list(dict.fromkeys([*seen, data_args.public_name]))
