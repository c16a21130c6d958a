"""What a Trainer computes from training rows without noise.

It is kept out of logs and cards unless the user releases it.
"""

from __future__ import annotations

from collections.abc import Collection

# Name in logs, trackers, trainer_state.json and metrics -> name under which a user may release it.
# Runtimes and counts reveal the sizes of draws.
UNNOISED = {
    "loss": "training_loss",
    "train_loss": "training_loss",
    "training_loss": "training_loss",
    "grad_norm": "grad_norm",
    "clipped_gradient_norm": "clipped_gradient_norm",
    "measured_signal_to_noise": "clipped_gradient_norm",
    "total_flos": "total_flos",
    "num_input_tokens_seen": "num_input_tokens_seen",
    "train_runtime": "train_runtime",
    "train_samples_per_second": "train_samples_per_second",
    "train_steps_per_second": "train_steps_per_second",
    "train_tokens_per_second": "train_tokens_per_second",
}
# What may be released at all.
CLIPPED_GRADIENT_NORM = "clipped_gradient_norm"
RELEASABLE = ("training_loss", CLIPPED_GRADIENT_NORM)


def withhold(
    logs: dict[str, float], released: Collection[str], *, gradients_are_noised: bool = True
) -> None:
    """Remove from ``logs``, in place, what the user did not ask to release.

    Args:
        gradients_are_noised: whether ``grad_norm`` is the norm of a noised gradient, which may be
            logged.
    """
    for name, quantity in UNNOISED.items():
        if quantity == "grad_norm" and gradients_are_noised:
            continue
        if quantity not in released:
            logs.pop(name, None)
