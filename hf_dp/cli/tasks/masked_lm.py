"""Continue the pretraining of a masked language model on public text, without privacy, for a base
whose masked-LM head is missing. The checkpoint lists its sources under ``pretraining_sources``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dp._arguments import argument
from hf_dp._validate import in_unit_interval, positive
from hf_dp.cli.config import Recipe, parse
from hf_dp.errors import DataError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_dp.tasks.masked_lm_trainer import MaskedLMTrainer


@dataclass
class PretrainingArguments:
    """What is trained, on which text, and when it ends."""

    model_name_or_path: str = argument(
        MISSING, "Hub name, folder, or package:NAME; its head may be missing."
    )
    text_files: list[str] = argument(
        MISSING, "Files of public text: .parquet, .csv, .json or .jsonl."
    )
    text_columns: list[str] = argument(
        MISSING, "Columns of text; a file needs only one. annotations.text for a nested one."
    )
    pretraining_sources: list[str] = argument(
        MISSING,
        "Names of all public data sets that the checkpoint will have seen, those of the "
        "base included.",
    )
    max_length: int = argument(64, "Longest text, in tokens; longer ones are cut.")
    mlm_probability: float = argument(0.3, "Share of tokens that are predicted.")
    held_out: float = argument(0.02, "Share of texts on which the accuracy is measured.")
    max_minutes: float = argument(
        45.0, "Processor time of all threads after which to stop, in minutes."
    )
    smallest_gain: float = argument(
        0.005, "Stop when the accuracy gained less than this between two evaluations."
    )


ARGUMENTS = (PretrainingArguments,)


def train(values: Recipe, words: Sequence[str]) -> int:
    """Run the task; print each accuracy, why training stopped, and last the folder."""
    from transformers import TrainingArguments

    task, args = parse([*ARGUMENTS, TrainingArguments], values, words, prog="hf-dp train")
    positive("max_minutes", task.max_minutes)
    in_unit_interval("mlm_probability", task.mlm_probability)
    in_unit_interval("held_out", task.held_out)
    trainer = build_trainer(task, args)
    trainer.evaluate()
    trainer.train()
    stop = trainer.stop
    if stop.evaluated_at != trainer.state.global_step:
        trainer.evaluate()
    trainer.save_model()
    first, last = stop.accuracies[0], stop.accuracies[-1]
    Path(args.output_dir, "pretraining.json").write_text(
        json.dumps({"held_out_accuracy": stop.accuracies, "stopped": stop.reason}, indent=1) + "\n"
    )
    print(
        f"held-out masked-token accuracy: {last:.4f} (before: {first:.4f}); stopped: {stop.reason}"
    )
    print(args.output_dir)
    return 0


def build_trainer(task: PretrainingArguments, args: TrainingArguments) -> MaskedLMTrainer:
    """Return a Trainer that computes vocabulary logits only where a token is predicted."""
    import datasets
    from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

    from hf_dp.tasks.masked_lm_trainer import MaskedLMTrainer, Stop
    from hf_dp.tasks.sources import loading, read_texts, resolve_model

    path = resolve_model(task.model_name_or_path)
    advice = "Give a Hub name, a folder, or package:NAME."
    with loading(f"The model {task.model_name_or_path!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForMaskedLM.from_pretrained(path)
    seen = getattr(model.config, "pretraining_sources", None) or []
    model.config.pretraining_sources = list(dict.fromkeys([*seen, *task.pretraining_sources]))
    lines = list(dict.fromkeys(read_texts(task.text_files, task.text_columns)))
    if len(lines) * task.held_out < 1 or len(lines) * (1 - task.held_out) < 1:
        raise DataError(
            f"`text_files` hold {len(lines)} different texts. With `held_out` {task.held_out:g}, "
            "none is left to train on or to measure. Give more text."
        )
    encoded = tokenizer(
        lines, truncation=True, max_length=task.max_length, return_special_tokens_mask=True
    )
    names = ("input_ids", "attention_mask", "special_tokens_mask")
    parts = datasets.Dataset.from_dict({name: encoded[name] for name in names}).train_test_split(
        task.held_out, seed=args.seed
    )
    args.remove_unused_columns = False  # the collator reads special_tokens_mask
    return MaskedLMTrainer(
        Stop(task.max_minutes, task.smallest_gain),
        model,
        args,
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=task.mlm_probability),
        parts["train"],
        parts["test"],
        processing_class=tokenizer,
    )
