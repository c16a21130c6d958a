"""The main of each task: what ``hf-dp train`` runs in process and ``recipes/*.py`` call."""

from __future__ import annotations

TASKS = {
    "text_classification": "hf_dp.cli.tasks.text_classification",
    "masked_lm": "hf_dp.cli.tasks.masked_lm",
}
