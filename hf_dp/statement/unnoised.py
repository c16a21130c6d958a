"""What a Trainer computes from training rows without noise.

It is kept out of logs and cards unless the user releases it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
# The name in logs for the figure that the paper gives for DP-FP as published.
NO_EPSILON = "papers_figure_not_established"
# What else a private run logs: functions of what was released and of public numbers.
_RELEASED_ANYWAY = frozenset(
    {"learning_rate", "signal_to_noise", "noised_loss", "epsilon", NO_EPSILON, "epoch", "step"}
)
_OF_OTHER_ROWS = ("eval_", "test_")
# What may be released at all.
TRAINING_LOSS, CLIPPED_GRADIENT_NORM = RELEASABLE = ("training_loss", "clipped_gradient_norm")


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


def unknown_names(logs: Iterable[str], also_known: Collection[str] = ()) -> list[str]:
    """Return the names of what may be anything, an un-noised loss, too."""
    known = {*UNNOISED, *_RELEASED_ANYWAY, *also_known}
    return [name for name in logs if name not in known and not name.startswith(_OF_OTHER_ROWS)]
