"""Whether the base model was pretrained on the private data.

If so, epsilon says little about those rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Data sets that share their text: the tasks of GLUE, and where their sentences come from.
_SAME_TEXT = {
    "qqp": {"quora", "quoraduplicates", "quoraquestionpairs"},
    "qnli": {"squad", "rajpurkarsquad"},
    "mnli": {"allnli", "multinli", "nli"},
    "sst2": {"sst", "stanfordsentiment", "stanfordsentimenttreebank"},
}

_NOT_A_NAME = {"default", "private", "train"}


def seen_in_pretraining(dataset: str | None, sources: Iterable[str]) -> list[str]:
    """List the ``sources`` that seem to hold the text of ``dataset``.

    A source may name the data set, a collection that contains it, or a data set with the same text.
    Names are compared by the beginnings of their last two components, letters and digits only:
    "nyu-mll/glue/sst2", "SST-2 (train)" and "glue" match. A needless warning costs less than a
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
