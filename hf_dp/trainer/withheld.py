"""What a private run keeps out of its logs."""

from __future__ import annotations

from collections.abc import Collection

# Un-noised, or telling the size of a draw: kept out of logs, trackers, trainer_state.json and what
# train() returns.
WITHHELD = {
    "loss": "training_loss",
    "train_loss": "training_loss",
    "total_flos": None,
    "num_input_tokens_seen": None,
    "train_runtime": None,
    "train_samples_per_second": None,
    "train_steps_per_second": None,
    "train_tokens_per_second": None,
}


def withhold(
    logs: dict[str, float], released: Collection[str], *, gradients_are_noised: bool = True
) -> None:
    """Remove, in place, what the user did not ask to release."""
    if not gradients_are_noised:
        logs.pop("grad_norm", None)
    for name, released_as in WITHHELD.items():
        if released_as not in released:
            logs.pop(name, None)
