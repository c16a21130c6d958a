"""The tasks ``causal_lm`` and ``seq2seq``: train, let the model write, score, save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dp.cli import tasks
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.classification import one_or_all
from hf_dp.tasks.generation.arguments import TABLE, DecodingArguments, TextArguments
from hf_dp.tasks.models import TextModelArguments, check_positions
from hf_dp.tasks.sources import load_evaluation, load_train

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig

    from hf_dp.cli.config import Recipe
    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

logger = logging.getLogger(__name__)


class Writing(tasks.PrivateTask):
    """The task of a decoder, or of an encoder-decoder: ``kind`` is causal_lm or seq2seq."""

    ARGUMENTS = (TextModelArguments, TextArguments, DecodingArguments)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build_trainer(
        self,
        model_args: TextModelArguments,
        data: TextArguments,
        decoding: DecodingArguments,
        args: DPTrainingArguments,
        adapter: PeftConfig | None,
        change_rows: Callable[..., Dataset] | None = None,
    ) -> tuple[DPTrainer, tasks.Evaluate]:
        """Return the trainer, and what evaluates it. ``change_rows`` adds canaries."""
        from transformers import DataCollatorForSeq2Seq, set_seed

        from hf_dp.plans.units import USER
        from hf_dp.tasks.generation.encoding import CausalEncoding, encode_training, encoding_of
        from hf_dp.tasks.generation.evaluation import check_prompts, evaluate_texts, evaluation_sets
        from hf_dp.tasks.generation.scores import check_metrics
        from hf_dp.tasks.models import load_language_model
        from hf_dp.trainer.publishing import usage
        from hf_dp.trainer.trainer import DPTrainer

        if args.privacy_mode == "dp_fp":
            raise ConfigError(
                "privacy_mode 'dp_fp' noises one pooled representation of an example, but a "
                "generating model has one for each token. Use privacy_mode: dp_sgd."
            )
        check_metrics(data.metrics, bertscore_model=data.bertscore_model)
        if data.drop_long_rows and args.bands is not None:
            raise ConfigError(
                f"Expected `bands` to be unset with drop_long_rows, got {args.bands!r}: a row that "
                "is left out moves all later ones. Protect a file of the rows that are short."
            )
        with args.main_process_first(desc="loading the rows"):  # into a cache that all share
            rows, evaluation_rows = load_train(data), load_evaluation(data)
        set_seed(args.seed)  # initial weights
        model, tokenizer = load_language_model(model_args, self.kind)
        check_positions(model, data.max_length, data.max_target_length)
        tasks.prepare(model, model_args, args, adapter, data.max_length)
        encoding = encoding_of(self.kind, tokenizer, data)
        if change_rows is not None:
            rows = change_rows(rows, tokenizer, encoding)
        with args.main_process_first(desc="encoding the rows"):
            train_dataset, before = encode_training(rows, data, encoding, args.privacy_unit_column)
            sets = evaluation_sets(
                evaluation_rows, data, decoding, encoding, args.privacy_unit_column
            )
        if not sets:
            raise DataError("There is no evaluation set. Name one in `validation_file`.")
        if data.metrics:  # before anything is spent
            virtual = getattr(adapter, "num_virtual_tokens", None) or 0
            for one in sets:
                check_prompts(model, one.prompts, decoding, virtual)
        if args.is_private and args.privacy_unit != USER and before > len(rows):
            # Several references of a row are examples of their own, so a row is not the unit.
            args.rows_are_chunks = True
        trainer = DPTrainer(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=one_or_all({one.name: one.encoded for one in sets}),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            processing_class=tokenizer,
            peft_config=adapter,
        )
        if trainer.is_fsdp_enabled and data.metrics:
            raise ConfigError(
                "The model is sharded (FSDP), so no process holds what generates. "
                "Set metrics: [] and score the saved checkpoint in one process: hf-dp eval."
            )
        tasks.describe_sources(trainer, model_args, data)
        if isinstance(encoding, CausalEncoding) and data.data_format not in ("text", TABLE):
            ended = f'print(model("A prompt" + {encoding.separator!r}))  # all prompts end so'
            trainer.card.update(usage=f"{usage(trainer.model, 'text-generation')}\n{ended}")
        if data.drop_long_rows:
            rule = f"examples longer than {data.max_length} tokens, before any was counted"
            count = before - len(train_dataset)
            logger.warning("Left out by drop_long_rows: %d of %d %s.", count, before, rule)
            # Not how many: the card tells N of the rows, and this would be a second number of them.
            trainer.data_settings["drop_long_rows"] = rule

        def evaluate() -> list[str]:
            if trainer.is_fsdp_enabled:  # its processes must all make the same forwards
                return tasks.metric_lines(trainer.evaluate(), trainer.eval_dataset, ("loss",))
            found = evaluate_texts(
                trainer.accelerator.unwrap_model(trainer.model),
                tokenizer,
                trainer.data_collator,
                sets,
                data,
                decoding,
                folder=args.output_dir,
                batch_size=args.per_device_eval_batch_size,
            )
            trainer.record_evaluation(found.metrics, trainer.eval_dataset)
            return found.lines

        return trainer, evaluate

    def evaluate(
        self, values: Recipe, words: Sequence[str], *, zero_shot: bool
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics of a model that ``hf-dp train`` wrote, or of its untrained base."""
        import torch
        from transformers import DataCollatorForSeq2Seq

        from hf_dp.tasks.generation.encoding import encoding_of
        from hf_dp.tasks.generation.evaluation import evaluate_texts, evaluation_sets
        from hf_dp.tasks.generation.scores import check_metrics
        from hf_dp.tasks.models import load_language_model, load_trained

        args, model_args, data, decoding = tasks.parse_evaluation(
            (tasks.EvalArguments, *self.ARGUMENTS), values, words
        )
        if zero_shot and model_args.from_scratch:
            raise ConfigError(
                "With `from_scratch` the untrained base knows nothing. Leave --zero-shot out."
            )
        check_metrics(data.metrics, bertscore_model=data.bertscore_model)
        rows = load_evaluation(data)
        path = None
        if zero_shot:
            model, tokenizer = load_language_model(model_args, self.kind)
        else:
            path = args.place(values)
            model, tokenizer = load_trained(path, model_args, self.kind)
        if torch.cuda.is_available() and not args.use_cpu:
            model = model.to("cuda")
        found = evaluate_texts(
            model,
            tokenizer,
            DataCollatorForSeq2Seq(tokenizer),
            evaluation_sets(rows, data, decoding, encoding_of(self.kind, tokenizer, data)),
            data,
            decoding,
            folder=path if path and Path(path).is_dir() else None,
            batch_size=args.per_device_eval_batch_size,
        )
        return found.metrics, found.lines


CAUSAL, SEQ2SEQ = Writing("causal_lm"), Writing("seq2seq")
