"""The warning that the base has seen the private data before."""

from __future__ import annotations

import pytest

from hf_dp.statement.provenance import seen_in_pretraining


@pytest.mark.parametrize(
    ("dataset", "sources", "seen"),
    [
        ("nyu-mll/glue/sst2", ["wikipedia", "SST-2"], ["SST-2"]),
        ("sst2", ["glue:sst2", "qqp"], ["glue:sst2"]),
        ("nyu-mll/glue/qqp", ["Quora", "squad"], ["Quora"]),
        ("quora", ["qqp"], ["qqp"]),
        ("qnli", ["rajpurkar/SQuAD"], ["rajpurkar/SQuAD"]),
        ("mnli", ["AllNLI"], ["AllNLI"]),
        ("sst2", ["qqp", "qnli", "dart"], []),
        ("nyu-mll/glue/sst2", ["glue"], ["glue"]),
        ("nyu-mll/glue/sst2", ["nyu-mll/glue"], ["nyu-mll/glue"]),
        ("qnli", ["squad_v2"], ["squad_v2"]),
        ("nyu-mll/glue/mnli_matched", ["mnli"], ["mnli"]),
        ("stanfordnlp/sst2/default", ["sst2"], ["sst2"]),
        ("SST-2 (train)", ["sst2"], ["sst2"]),
        ("private", ["private"], []),
        ("private", ["qqp"], []),
        (None, ["qqp"], []),
        ("sst2", [], []),
    ],
)
def test_names_are_compared_by_what_they_name(dataset, sources, seen):
    assert seen_in_pretraining(dataset, sources) == seen
