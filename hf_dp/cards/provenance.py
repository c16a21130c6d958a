"""Whether the private data is among what the base model was pretrained on: then epsilon says little about those rows."""

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


def seen_in_pretraining(dataset: str | None, sources: Iterable[str]) -> list[str]:
    """Those of ``sources`` that name ``dataset``, or a data set with the same text.

    Names are compared by their last component, letters and digits only: "nyu-mll/glue/sst2", "SST-2" and "glue:sst2" are one.
    """
    if dataset is None:
        return []
    name = _plain(dataset)
    names = {name} | _SAME_TEXT.get(name, set()) | {task for task, same in _SAME_TEXT.items() if name in same}
    return [source for source in sources if _plain(source) in names]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.split(r"[/:]", name.lower().rstrip("/"))[-1])
