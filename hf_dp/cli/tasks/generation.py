"""Run the tasks ``causal_lm`` and ``seq2seq``: train, let the model write, score, save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_dp.cli.config import card_block, parse, peft_config
from hf_dp.cli.summary import metric_lines, print_summary, signal_to_noise
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.models import (
    StartArguments,
    check_positions,
    freeze,
    turn_off_dropout,
    warn_of_new_weights,
)
from hf_dp.tasks.sources import load_evaluation, load_train

ARGUMENTS = (StartArguments, TextArguments, DecodingArguments)


def train(kind: str, values: dict[str, Any], words: Sequence[str]) -> int:
    """Run a task; print a summary whose last line is the output folder.

    Args: kind: causal_lm or seq2seq.
    """
    trainer, sets, data, decoding = trainer_of(kind, values, words)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    try:
        lines = _evaluate(trainer, sets, data, decoding)
    finally:  # what was trained is kept, whatever becomes of the scores
        trainer.save_model()  # and with push_to_hub also publish it
    found = {**trainer.evaluation_metrics(), **signal_to_noise(trainer.state.log_history)}
    trainer.save_metrics("eval", found, combined=False)
    trainer.save_state()  # the log; it is never published
    print_summary(trainer, lines)
    # Otherwise a process of several may abort at its exit; Trainer.end() does no more.
    trainer.accelerator.end_training()
    return 0


def trainer_of(
    kind: str, values: dict[str, Any], words: Sequence[str]
) -> tuple[Any, list[Any], TextArguments, DecodingArguments]:
    """Return the trainer of a configuration, its evaluation sets, and how these are read and
    answered. Raises: as :func:`build_trainer`."""
    from hf_dp.trainer.arguments import DPTrainingArguments

    model_args, data, decoding, args = parse(
        [*ARGUMENTS, DPTrainingArguments],
        values,
        words,
        prog="hf-dp train",
        extra=("task", "peft", "card"),
    )
    card = card_block(values.get("card"))
    adapter = peft_config(values.get("peft"))
    trainer, sets = build_trainer(kind, model_args, data, decoding, args, adapter)
    if args.is_private:
        trainer.describe(**card)
    return trainer, sets, data, decoding


def _evaluate(
    trainer: Any, sets: list[Any], data: TextArguments, decoding: DecodingArguments
) -> list[str]:
    """Evaluate the trained model; return lines to read."""
    from hf_dp.tasks.generation.evaluation import evaluate_texts

    if trainer.is_fsdp_enabled:  # its processes must all make the same forwards
        return metric_lines(trainer.evaluate(), trainer.eval_dataset, ("loss",))
    found = evaluate_texts(
        trainer.accelerator.unwrap_model(trainer.model),
        trainer.processing_class,
        trainer.data_collator,
        sets,
        data,
        decoding,
        folder=trainer.args.output_dir,
        batch_size=trainer.args.per_device_eval_batch_size,
    )
    trainer.record_evaluation(found.metrics, trainer.eval_dataset)
    return found.lines


def build_trainer(
    kind: str,
    model_args: StartArguments,
    data: TextArguments,
    decoding: DecodingArguments,
    args: Any,
    adapter: Any,
    change_rows: Callable[[Any, Any, Any], Any] | None = None,
) -> tuple[Any, list[Any]]:
    """Return a :class:`DPTrainer` for the task, and its evaluation sets.

    Args: change_rows: makes of rows, tokenizer and encoding the rows to train on instead.

    Raises: DataError, ConfigError, InvalidArgumentError, UnsupportedModelError.
    """
    from transformers import DataCollatorForSeq2Seq, set_seed

    from hf_dp.plans.units import USER
    from hf_dp.tasks.generation.decoding import check_prompts
    from hf_dp.tasks.generation.encoding import encode, encoding_of
    from hf_dp.tasks.generation.evaluation import evaluation_sets
    from hf_dp.tasks.generation.language_models import load_language_model
    from hf_dp.trainer.trainer import DPTrainer

    refuse(model_args, args, adapter)
    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        rows, evaluation_rows = load_train(data), load_evaluation(data)
    set_seed(args.seed)  # initial weights
    model, tokenizer = load_language_model(model_args, kind)
    check_positions(model, data.max_length, data.max_target_length)
    freeze(model, model_args.freeze)
    turn_off_dropout(model, model_args.without_dropout)
    if adapter is not None:
        warn_of_new_weights(model)
    if args.auto_physical_batch_size and args.auto_physical_batch_length is None:
        args.auto_physical_batch_length = data.max_length
    encoding = encoding_of(kind, tokenizer, data)
    if change_rows is not None:
        rows = change_rows(rows, tokenizer, encoding)
    with args.main_process_first(desc="encoding the rows"):
        train_dataset = encode(rows, data, encoding, args.privacy_unit_column)
        sets = evaluation_sets(evaluation_rows, data, decoding, encoding, args.privacy_unit_column)
    if data.metrics:  # before anything is spent
        virtual = getattr(adapter, "num_virtual_tokens", None) or 0
        for one in sets:
            check_prompts(model, one.asked.prompts, decoding, virtual)
    if args.is_private and args.privacy_unit != USER and len(train_dataset) > len(rows):
        # Several references of a row are examples of their own, so a row is not the unit.
        args.rows_are_chunks = True
    # In 16 bits only examples that are padded alike share a physical batch.
    multiple = 8 if args.bf16 and data.max_length % 8 == 0 else None
    trainer = DPTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=_as_trainer_takes_them(sets),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=multiple),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    if trainer.is_fsdp_enabled and data.metrics:
        raise ConfigError(
            "The model is sharded (FSDP), and each process holds a part of what would write. Set "
            "metrics: [] and score the saved checkpoint in one process: hf-dp eval."
        )
    base = None if model_args.from_scratch else model_args.model_name_or_path
    trainer.card.update(dataset=data.public_name, base_model=base)
    return trainer, sets


def refuse(model_args: StartArguments, args: Any, adapter: Any) -> None:
    """Refuse what a task that writes cannot do. Raises: ConfigError."""
    if args.privacy_mode == "dp_fp":
        raise ConfigError(
            "privacy_mode 'dp_fp' noises one pooled representation of an example, and a model that "
            "writes has one for each token. Use privacy_mode: dp_sgd."
        )
    if model_args.from_scratch and adapter is not None:
        raise ConfigError(
            "`from_scratch` does not go with `peft`: the random base of the adapter would not be "
            "saved. Leave one of them out."
        )


def _as_trainer_takes_them(sets: Sequence[Any]) -> Any:
    if not sets:
        raise DataError("There is no evaluation set. Name one in `validation_file`.")
    encoded = {one.name: one.encoded for one in sets}
    return next(iter(encoded.values())) if len(encoded) == 1 else encoded
