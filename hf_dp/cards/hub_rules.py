"""What the Hub takes for a repository, and which scores it can compare.

Licenses, languages and tasks are checked by the Hub's own validator, when a card is pushed.
"""

from __future__ import annotations

from huggingface_hub.utils import HFValidationError, validate_repo_id

# Metrics of `evaluate` that a leaderboard can compare.
METRICS = frozenset(
    "accuracy bertscore bleu exact_match f1 matthews_correlation mean_iou meteor nist pearsonr "
    "perplexity precision recall rouge rouge1 rouge2 rougeL rougeLsum sacrebleu spearmanr ter "
    "wer".split()
)


def is_repository(value: str | None) -> bool:
    """Return whether a text can be the id of a repository on the Hub."""
    if not value:
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return not value.startswith(("~", "."))
