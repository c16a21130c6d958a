"""The data of a classification task: the arguments of any, and texts with their evaluation sets
encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp.tasks.sources import SourceArguments


@dataclass
class ClassificationArguments(SourceArguments):
    """Which rows, and what their classes are called."""

    label_column: str = field(
        default="label", metadata={"help": "Column of class ids or class names."}
    )
    class_names: list[str] = field(
        default_factory=list,
        metadata={"help": "Class names by id; needed when the file declares none."},
    )
    metrics: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={"help": "accuracy, f1 (of class 1, for two classes)."},
    )


@dataclass
class DataArguments(ClassificationArguments):
    """Which rows, and which of their columns."""

    demo_name = "hf_dp demo sentences (synthetic)"

    text_columns: list[str] = field(
        default_factory=lambda: ["sentence"], metadata={"help": "One or two columns of text."}
    )
    max_length: int = field(
        default=128, metadata={"help": "Longest text, in tokens; longer ones are cut."}
    )

    def demo(self) -> Any:
        """Return the demonstration sentences."""
        from hf_dp.tasks.demo_sentences import demo_dataset

        return demo_dataset()

    def columns(
        self, tokenizer: Any, names: Sequence[str], keep: str | None = None
    ) -> tuple[Any, ...]:
        """Return the arguments of :func:`~hf_dp.tasks.classification.encode` after the rows."""
        return tokenizer, self.text_columns, self.label_column, names, self.max_length, keep


def encode_all(sets: dict[str, Any], columns: Sequence[Any]) -> Any:
    """Return the evaluation sets encoded, as the Trainer takes them."""
    from hf_dp.tasks.classification import encode

    return one_or_all({name: encode(rows, *columns) for name, rows in sets.items()})


def one_or_all(sets: dict[str, Any]) -> Any:
    """Return evaluation sets as the Trainer takes them: one, or several by name."""
    return next(iter(sets.values())) if len(sets) == 1 else sets
