"""Hyperparameters for a data set of another size (Li et al. 2022, appendix L).

Batch size and epochs do not carry over: on more examples the same batch size is a smaller sample
rate and a larger effective noise multiplier. What carries over is the sample rate q and the number
of steps S, and with them the noise multiplier at nearly the same (epsilon, delta).
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_dp._validate import in_unit_interval, integer, invalid, positive


@dataclass(frozen=True)
class Transfer:
    """Settings for the new data set.

    Attributes:
        num_examples: N of the new data set.
        expected_batch_size: q N, rounded to a whole number, at least 1.
        steps: as tuned.
        num_train_epochs: the epochs that give this number of steps at this batch size, for a
            trainer that counts epochs.
        sample_rate: expected_batch_size / num_examples: as tuned, up to the rounding.
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    num_train_epochs: float
    sample_rate: float


def transfer(*, sample_rate: float, steps: int, num_examples: int) -> Transfer:
    """Return settings with which ``num_examples`` examples get the same sample rate and steps.

    Args:
        sample_rate: q of the tuned run, batch size / number of its examples.
        steps: those of the tuned run.

    Raises: InvalidArgumentError; also where rounding a batch size would change q by more than a
        tenth.
    """
    q = in_unit_interval(
        "sample_rate", sample_rate, "It is expected_batch_size / num_examples.", one=True
    )
    steps, n = integer("steps", steps, 1), integer("num_examples", num_examples, 2)
    exact = positive("expected_batch_size", q * n)
    batch = max(1, round(exact))
    if abs(batch / exact - 1) > 0.1:
        raise invalid(
            "num_examples",
            n,
            f"to be large enough for sample rate {q:g}",
            f"It gives a batch size of {exact:.3g}.",
        )
    # Half a step less: the trainer rounds epochs * N / B up to whole steps.
    return Transfer(n, batch, steps, (steps - 0.5) * batch / n, batch / n)
