"""Evaluate what a task that classifies has trained; for texts and images alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.summary import metric_lines
from hf_dp.cli.tasks.evaluation import EvalArguments
from hf_dp.errors import ConfigError

_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_loss")


def scores(
    model: Any, args: EvalArguments, eval_dataset: Any, *, keep_columns: bool = False, **others: Any
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics by the Trainer's names, and as lines to read.

    Args:
        keep_columns: whether a transform of the rows needs columns that the model does not take.
        others: further arguments of Trainer.
    """
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        model,
        TrainingArguments(
            per_device_eval_batch_size=args.per_device_eval_batch_size,
            use_cpu=args.use_cpu,
            report_to="none",
            remove_unused_columns=not keep_columns,
        ),
        eval_dataset=eval_dataset,
        **others,
    )
    found = trainer.evaluate()
    kept = {
        name: value
        for name, value in found.items()
        if name != "epoch" and not name.endswith(_TIMINGS)
    }
    return kept, metric_lines(found, eval_dataset)


def load_trained(
    path: str,
    names: Sequence[str],
    seed: int,
    base: Callable[[], tuple[Any, Any]],
    read: Callable[[str], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Return the model that ``hf-dp train`` wrote, and its tokenizer or image processor.

    Args:
        path: where it is; an adapter is put onto ``base()``.
        names: the classes of the data, in the order of their ids.
        seed: that of the training.
        base: loads the model that the configuration names, with what reads its rows.
        read: loads a whole checkpoint from a folder, with what reads its rows.

    Raises: ConfigError when the classifier cannot be loaded, or has other classes.
    """
    from transformers import set_seed

    from hf_dp.tasks.files import resolve_model

    folder = resolve_model(path)
    try:
        if Path(folder, "adapter_config.json").exists():
            from peft import PeftModel

            set_seed(seed)  # initializes what the base's checkpoint lacks, as in training
            model, processor = base()
            return PeftModel.from_pretrained(model, folder), processor
        model, processor = read(folder)
    except (OSError, ValueError, RuntimeError) as problem:
        raise ConfigError(
            f"The classifier {path!r} could not be loaded: {str(problem).splitlines()[0]} Train it "
            "first (hf-dp train), or give its folder or Hub name: --trained NAME."
        ) from problem
    known = [model.config.id2label[index] for index in range(model.config.num_labels)]
    if known != list(names):
        raise ConfigError(
            f"The classifier {path!r} has the classes {known}, and the data {list(names)}. "
            "Evaluate on data with the same classes in the same order, or set `class_names`."
        )
    return model, processor
