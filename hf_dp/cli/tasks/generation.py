"""The tasks ``causal_lm`` and ``seq2seq``: train, let the model write, score, save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp.cli.tasks.shared import (
    EvalArguments,
    configured,
    describe_sources,
    metric_lines,
    multiple_of,
    parse_evaluation,
    prepare,
    run,
)
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.classification import one_or_all
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.models import StartArguments, check_positions
from hf_dp.tasks.sources import load_evaluation, load_train

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

ARGUMENTS = (StartArguments, TextArguments, DecodingArguments)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run a task; print a summary whose last line is the output folder."""
    from hf_dp.tasks.generation.evaluation import evaluate_texts

    trainer, sets, data, decoding = _configured(values, words)

    def evaluate() -> list[str]:
        if trainer.is_fsdp_enabled:  # its processes must all make the same forwards
            return metric_lines(trainer.evaluate(), trainer.eval_dataset, ("loss",))
        tokenizer: Any = trainer.processing_class
        found = evaluate_texts(
            trainer.accelerator.unwrap_model(trainer.model),
            tokenizer,
            trainer.data_collator,
            sets,
            data,
            decoding,
            folder=trainer.args.output_dir,
            batch_size=trainer.args.per_device_eval_batch_size,
        )
        trainer.record_evaluation(found.metrics, trainer.eval_dataset)
        return found.lines

    return run(trainer, evaluate)


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> DPTrainer:
    """Return the trainer of a configuration."""
    return _configured(values, words)[0]


def _configured(
    values: dict[str, Any], words: Sequence[str]
) -> tuple[DPTrainer, list[Any], TextArguments, DecodingArguments]:
    """Return the trainer, its evaluation sets, and how these are read and answered."""
    kept: list[Any] = []

    def build(*given: Any) -> DPTrainer:
        trainer, sets = build_trainer(values["task"], *given)
        kept.extend((sets, *given[1:3]))
        return trainer

    return configured(ARGUMENTS, build, values, words), *kept


def build_trainer(
    kind: str,
    model_args: StartArguments,
    data: TextArguments,
    decoding: DecodingArguments,
    args: DPTrainingArguments,
    adapter: PeftConfig | None,
    change_rows: Callable[[Any, Any, Any], Any] | None = None,
) -> tuple[DPTrainer, list[Any]]:
    """Return a :class:`DPTrainer` for the task, and its evaluation sets.

    Args:
        kind: causal_lm or seq2seq.
        change_rows: makes of rows, tokenizer and encoding the rows to train on instead.
    """
    from transformers import DataCollatorForSeq2Seq, set_seed

    from hf_dp.plans.units import USER
    from hf_dp.tasks.generation.encoding import encode, encoding_of
    from hf_dp.tasks.generation.evaluation import check_prompts, evaluation_sets
    from hf_dp.tasks.generation.language_models import load_language_model
    from hf_dp.trainer.trainer import DPTrainer

    if args.privacy_mode == "dp_fp":
        raise ConfigError(
            "privacy_mode 'dp_fp' noises one pooled representation of an example, and a model that "
            "writes has one for each token. Use privacy_mode: dp_sgd."
        )
    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        rows, evaluation_rows = load_train(data), load_evaluation(data)
    set_seed(args.seed)  # initial weights
    model, tokenizer = load_language_model(model_args, kind)
    check_positions(model, data.max_length, data.max_target_length)
    prepare(model, model_args, args, adapter, data.max_length)
    encoding = encoding_of(kind, tokenizer, data)
    if change_rows is not None:
        rows = change_rows(rows, tokenizer, encoding)
    with args.main_process_first(desc="encoding the rows"):
        train_dataset = encode(rows, data, encoding, args.privacy_unit_column)
        sets = evaluation_sets(evaluation_rows, data, decoding, encoding, args.privacy_unit_column)
    if not sets:
        raise DataError("There is no evaluation set. Name one in `validation_file`.")
    if data.metrics:  # before anything is spent
        virtual = getattr(adapter, "num_virtual_tokens", None) or 0
        for one in sets:
            check_prompts(model, one.asked.prompts, decoding, virtual)
    if args.is_private and args.privacy_unit != USER and len(train_dataset) > len(rows):
        # Several references of a row are examples of their own, so a row is not the unit.
        args.rows_are_chunks = True
    multiple = multiple_of(args, data.max_length)
    trainer = DPTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=one_or_all({one.name: one.encoded for one in sets}),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=multiple),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    if trainer.is_fsdp_enabled and data.metrics:
        raise ConfigError(
            "The model is sharded (FSDP), and each process holds a part of what would write. Set "
            "metrics: [] and score the saved checkpoint in one process: hf-dp eval."
        )
    return describe_sources(trainer, model_args, data), sets


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of a model that ``hf-dp train`` wrote, or of its untrained base.

    Args:
        values: the keys of the configuration that the model was trained with.
        words: the command line's, which win.
    """
    import torch
    from transformers import DataCollatorForSeq2Seq

    from hf_dp.tasks.generation.encoding import encoding_of
    from hf_dp.tasks.generation.evaluation import evaluate_texts, evaluation_sets
    from hf_dp.tasks.generation.language_models import load_language_model, load_trained

    args, model_args, data, decoding = parse_evaluation((EvalArguments, *ARGUMENTS), values, words)
    if zero_shot and model_args.from_scratch:
        raise ConfigError(
            "--zero-shot evaluates the untrained base, and with `from_scratch` it knows nothing. "
            "Leave one of them out."
        )
    rows, kind = load_evaluation(data), values["task"]
    path = args.trained or values.get("output_dir")
    if zero_shot:
        model, tokenizer = load_language_model(model_args, kind)
    else:
        model, tokenizer = load_trained(path or model_args.model_name_or_path, model_args, kind)
    if torch.cuda.is_available() and not args.use_cpu:
        model = model.to("cuda")
    found = evaluate_texts(
        model,
        tokenizer,
        DataCollatorForSeq2Seq(tokenizer),
        evaluation_sets(rows, data, decoding, encoding_of(kind, tokenizer, data)),
        data,
        decoding,
        folder=path if path and not zero_shot and Path(path).is_dir() else None,
        batch_size=args.per_device_eval_batch_size,
    )
    return found.metrics, found.lines
