"""Say before the first step, from the plan alone, why a run may learn little."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from hf_dp.accounting import Event, PoissonSampledGaussian, UserRowsGaussian, epsilon
from hf_dp.accounting.value import doubt_of_delta
from hf_dp.errors import AccountingRangeError, HfDpError, UnsupportedEventError
from hf_dp.planning import LEAST_SIGNAL, most_signal
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import MAX_ROWS

SLOW = 5e-5  # transformers' default learning rate
# Copies per unit of noise, from which nothing is left to protect, and the bound takes minutes.
_LARGE = 7


def doubts(
    plan: PrivacyPlan, *, parameters: int, learning_rate: float, optimizer: str
) -> Iterator[str]:
    """Yield why a run may learn little, or protect little, each with a next move. Args: parameters:
    how many numbers train."""
    if doubt := doubt_of_delta(plan.delta):
        yield doubt
    elif plan.delta > (1 + 1e-9) / (2 * plan.num_examples):
        yield (
            f"target_delta is {plan.delta:.3g}, above 1/(2N) = {1 / (2 * plan.num_examples):.3g}. "
            "It is roughly the chance that the guarantee fails. Leave it unset for 1/(2N)."
        )
    if not plan.mechanism.noises_gradients_alone:
        return
    if "adam" in optimizer and learning_rate <= SLOW:
        yield (
            f"learning_rate is {learning_rate:g}, transformers' default or less. With noise, Adam "
            "usually needs 10 to 50 times that (Li et al. 2022, section 3 and figure 2). Try 1e-3, "
            "or what `hf-dp suggest` names."
        )
    yield from drowned(plan, parameters)


def drowned(plan: PrivacyPlan, parameters: int) -> Iterator[str]:
    """Yield, where no run of ours has learned, that the noise will drown the gradients."""
    if (ratio := most_signal(plan, parameters)) < LEAST_SIGNAL:
        yield (
            "The noise will drown the gradients: if those of all steps had full length and the "
            f"same direction, they would add up to {ratio:.2g} of the noise, and below "
            f"{LEAST_SIGNAL:g} none of our runs learned (noise multiplier "
            f"{plan.noise_multiplier:.3g}, {plan.expected_batch_size:g} a step, {plan.steps:,} "
            f"steps, {parameters:,} numbers train). Use more rows or a larger "
            "expected_batch_size, train fewer numbers (LoRA, a head), or raise target_epsilon."
        )


def of_repeated_rows(plan: PrivacyPlan, most: int, compared: str) -> str:
    """Return what ``most`` equal rows mean for whoever is in them, for the local console only."""
    try:
        if most > min(MAX_ROWS, _LARGE * plan.noise_multiplier):
            raise AccountingRangeError(f"{most} rows of one record")
        # A record in so many rows is a user of that many, of whom each row is drawn by itself.
        of_record = _epsilon(tuple(_of_rows(each, most) for each in plan.events()), plan.delta)
        of_row = _epsilon(plan.events(), plan.delta)
        weaker = f"has epsilon {of_record:.4g} where a single row has {of_row:.4g}"
    except HfDpError:  # no bound is known for several rows of this plan
        weaker = f"is protected {most}-fold weaker"
    return (
        f"Up to {most:,} rows of the training set are equal, by {compared}: a record that is in "
        f"{most:,} of them {weaker} (this run; delta {plan.delta:.2g}). To count a row several "
        "times, leave its copies out and weight its loss (compute_per_example_loss). Where the "
        "copies are one person's, protect persons: privacy_unit='user'."
    )


def _of_rows(event: Event, rows: int) -> Event:
    """Return the event for a user of so many rows. Raises: UnsupportedEventError where no bound is
    known."""
    if type(event) is not PoissonSampledGaussian or event.beside:
        raise UnsupportedEventError(f"no bound is known for several rows in {event!r}")
    return UserRowsGaussian(event.noise_multiplier, event.sample_rate, event.steps, rows)


@cache
def _epsilon(events: tuple[Event, ...], delta: float) -> float:
    return epsilon(events, delta).rounded_up()
