"""Whether the private data is among what the base model was pretrained on: then epsilon says little
about those rows."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Data sets whose text is another's: GLUE's tasks and where their sentences come from.
_SAME_TEXT = {
    "qqp": {"quora", "quoraduplicates", "quoraquestionpairs"},
    "qnli": {"squad", "rajpurkarsquad"},
    "mnli": {"allnli", "multinli", "nli"},
    "sst2": {"sst", "stanfordsentiment", "stanfordsentimenttreebank"},
}

_NOT_A_NAME = {"default", "private", "train"}


def seen_in_pretraining(dataset: str | None, sources: Iterable[str]) -> list[str]:
    """Those of ``sources`` that seem to name ``dataset``, a collection it is part of, or a data set
    with the same text.

    Compared are the last two components of each name, letters and digits only, by their beginnings:
    "nyu-mll/glue/sst2", "SST-2 (train)" and "glue" are one. A needless warning costs less than a
    missing one.
    """
    wanted = _names(dataset or "")
    for task, same in _SAME_TEXT.items():
        if any(_alike(name, known) for name in wanted for known in (task, *same)):
            wanted |= {task, *same}
    return [
        source for source in sources if any(_alike(a, b) for a in wanted for b in _names(source))
    ]


def _names(name: str) -> set[str]:
    parts = [re.sub(r"[^a-z0-9]", "", part) for part in re.split(r"[/:]", name.lower())]
    parts = [part for part in parts if part and part not in _NOT_A_NAME]
    return set(parts[-2:] if len(parts) > 2 else parts[-1:] if "/" in name else parts)


def _alike(one: str, other: str) -> bool:
    return min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))
