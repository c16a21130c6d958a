"""The arguments of ``hf-dp eval``, whatever the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import integer
from hf_dp.cli.config import check_keys, parse


@dataclass
class EvalArguments:
    """How the evaluation runs."""

    trained: str | None = field(
        default=None,
        metadata={
            "help": "What to evaluate, a folder or Hub name. Default: the output_dir of the "
            "configuration."
        },
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Rows at a time."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave a GPU alone."})

    def __post_init__(self) -> None:
        integer("per_device_eval_batch_size", self.per_device_eval_batch_size, 1)


def parse_evaluation(
    kinds: Sequence[type], values: dict[str, Any], words: Sequence[str], prog: str = "hf-dp eval"
) -> tuple[Any, ...]:
    """Return instances of the dataclasses; leave out the keys that only concern training.

    Args: kinds: the dataclasses of the command.

    Raises: ConfigError.
    """
    from hf_dp.trainer.arguments import DPTrainingArguments

    ours = {item.name for kind in kinds for item in dataclasses.fields(kind)}
    training = {item.name for item in dataclasses.fields(DPTrainingArguments)}
    check_keys(values, ours | training | {"task", "peft", "card"})
    known = {key: value for key, value in values.items() if key in ours}
    return parse(kinds, known, words, prog=prog)
