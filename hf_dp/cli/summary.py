"""What a task prints at its end, whichever the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def metric_lines(
    metrics: Mapping[str, float], evaluation: Any, names: Sequence[str] = ("accuracy", "f1")
) -> list[str]:
    """Return ``accuracy on the 872 evaluation rows: 0.9`` for each metric of each evaluation set.

    Args:
        metrics: by the Trainer's names, ``eval_accuracy`` or ``eval_matched_accuracy``.
        evaluation: one data set, or several by name.
        names: which metrics to print, in this order.
    """
    sets = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    lines = []
    for name, rows in sets.items():
        prefix = f"eval_{name}_" if name else "eval_"
        found = {
            key.removeprefix(prefix): value
            for key, value in metrics.items()
            if key.startswith(prefix)
        }
        where = f"{len(rows)} {name + ' ' if name else ''}evaluation rows"
        lines += [
            f"{metric} on the {where}: {found[metric]:.4f}" for metric in names if metric in found
        ]
    return lines


def print_summary(trainer: Any, lines: Sequence[str]) -> None:
    """Print the metrics, epsilon by every accountant, and last the folder of the checkpoint.

    Of several processes, only the main one prints.
    """
    if not trainer.is_world_process_zero():
        return
    print()
    print("\n".join(lines))
    if trainer.args.is_private:
        print(trainer.privacy_statement())
    print(trainer.args.output_dir)


# As many first steps as Li et al. average over (figure 3, right).
SIGNAL_STEPS = 30
# What stands beside the metrics of the evaluation rows, and is no score.
SIGNALS = ("signal_to_noise", "measured_signal_to_noise")


def signal_to_noise(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean ``signal_to_noise`` of the logs of the first 30 steps; nothing without one.

    The measured one, where it is released, has a mean of its own. It tells most with a log of every
    step (``logging_steps: 1``).
    """
    means = {}
    for name in SIGNALS:
        found = [log[name] for log in logs if name in log and log.get("step", 0) <= SIGNAL_STEPS]
        if found:
            means[name] = sum(found) / len(found)
    return means
