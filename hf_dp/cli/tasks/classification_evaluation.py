"""Evaluate what a task that classifies has trained; for texts and images alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.summary import metric_lines
from hf_dp.cli.tasks.evaluation import EvalArguments
from hf_dp.errors import ConfigError
from hf_dp.tasks.models import kept_class_names

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
    given: bool,
    seed: int,
    base: Callable[[], tuple[Any, Any]],
    read: Callable[[str], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Return the model that ``hf-dp train`` wrote, and its tokenizer or image processor.

    Args:
        path: where it is; an adapter is put onto ``base()``.
        names: the classes of the data, in the order of their ids.
        given: whether the configuration names them, and not only the data.
        seed: that of the training.
        base: loads the model that the configuration names, with what reads its rows.
        read: loads a whole checkpoint from a folder, with what reads its rows.

    Raises: DataError for what cannot be loaded; ConfigError for a classifier with other classes.
    """
    from transformers import set_seed

    from hf_dp.tasks.files import loading, resolve_model

    folder = resolve_model(path)
    advice = "Train it first (hf-dp train), or give its folder or Hub name: --trained NAME."
    with loading(f"The classifier {path!r}", advice):
        if Path(folder, "adapter_config.json").exists():
            from peft import PeftModel

            _check_classes(path, _classes_of_adapter(folder, names, given), names)
            set_seed(seed)  # initializes what the base's checkpoint lacks, as in training
            model, processor = base()
            return PeftModel.from_pretrained(model, folder), processor
        model, processor = read(folder)
    known = [model.config.id2label[index] for index in range(model.config.num_labels)]
    _check_classes(path, known, names)
    return model, processor


def _classes_of_adapter(folder: str, names: Sequence[str], given: bool) -> Sequence[str]:
    """Return the classes that an adapter was trained with.

    Where its folder does not say them, they are those of the configuration that it was trained by:
    an evaluation file may declare others, or these in another order.

    Raises: ConfigError where neither does.
    """
    kept = kept_class_names(folder)
    if kept is None and not given:
        raise ConfigError(
            f"The adapter {Path(folder).name!r} does not say which classes it was trained with, "
            f"and the data declares {list(names)}. Set `class_names` to those of its training, in "
            "the order of their ids then."
        )
    return names if kept is None else kept


def _check_classes(path: str, known: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError unless a classifier has these classes, in this order."""
    if list(known) != list(names):
        raise ConfigError(
            f"The classifier {path!r} has the classes {list(known)}, and the data {list(names)}. "
            f"Evaluate on data with the same classes; set `class_names` to {list(known)} where it "
            "declares the same in another order."
        )
