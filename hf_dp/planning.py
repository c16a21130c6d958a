"""Plan before spending, without torch: the cost of a run, or of a range of settings, and settings
that learn. Nothing is run.

The rules of :func:`suggest` carry settings that are known to work to other data. They read public
numbers only: how many examples there are, epsilon, delta, and the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_dp._validate import integer, invalid, one_of, positive
from hf_dp.accounting import (
    Event,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RecordRelease,
    SampledRecordRelease,
    UserRowsGaussian,
    epsilon,
)
from hf_dp.accounting.accountants import Answer, compare, table
from hf_dp.accounting.composition import LARGE_DELTA
from hf_dp.errors import AccountingRangeError, HfDpError, UnsupportedEventError
from hf_dp.plans.bands import noise_of_sum, square_root_column
from hf_dp.plans.draws import POISSON
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import MAX_ROWS

# Of `most_signal`. Our runs of pretrained models at 0.06 to 0.29 stayed at chance. Those at 0.4
# (the quickstart), 0.5 and more learned, but for one at 1.7, of random partitions.
LEAST_SIGNAL = 0.35
_MOST_VALUES = 100  # of a sweep

NO_GUARANTEE = "it has NO differential privacy guarantee, no epsilon is known for it"
LI = "Li et al. 2022"
# SST-2 in Li et al. 2022, appendix H: B = 1024 of N = 67,349 for 3 epochs.
SAMPLE_RATE, STEPS, CLIPPING_NORM = 1024 / 67_349, 198, 0.1
# On few examples a step takes this many, or this share of them if that is less. `make demo` takes
# 512 of 8,000.
SMALLEST_BATCH, LARGEST_RATE = 512, 1 / 8
# Learning rate x sqrt(steps) at the best cells of our grids (recipes/sst2/README.md), and the
# rates beyond which nothing was tried.
WALK, LEARNING_RATES = 0.02, (3e-4, 5e-3)
ADAPTER_FACTOR = 5  # LoRA beside all weights: 10 on MiniLM (ibid.), 6 on SmolLM2 (recipes/e2e)
# What trains the model's own matrices ran at the rate of all weights (ibid.).
OWN_MATRICES = ("frost", "random", "pval", "param", "rgp", "top_blocks")
Block = dict[str, object]  # the recipe's ``peft``
LORA: Block = {"peft_type": "lora", "r": 8}


@dataclass(frozen=True)
class Forecast:
    """What a plan will cost: epsilon after all steps, by accountant; :func:`most_signal` (None
    without the number of parameters, or for DP-FP); and how many examples are expected to pass the
    model."""

    plan: PrivacyPlan
    answers: tuple[Answer, ...]
    most_signal: float | None
    examples: float
    parameters: int | None = None

    def __str__(self) -> str:
        """Return a plan to read, with the table of its accountants, and a warning where the noise
        will drown the gradients."""
        plan, lines = self.plan, list(_lines(self))
        if plan.mechanism.established:
            lines += ["", table(self.answers, plan.delta, plan.of_delta)]
            if self.most_signal is not None and self.parameters is not None:
                lines += (f"\n{doubt}" for doubt in drowned(plan, self.parameters))
            return "\n".join(lines)
        lines.append(f"{plan.words.name}: {NO_GUARANTEE}.")
        lines += [f"{answer.accountant}: {answer.note}" for answer in self.answers]
        for event in plan.events():
            if isinstance(event, PublishedForwardNoise):
                lines += _assumed(event, plan.delta)
        return "\n".join(lines)

    @property
    def effective_noise_multiplier(self) -> float | None:
        """Return sigma / q, to which the noise on the mean gradient is proportional (Li et al.
        2022, section 3.1.1); None for DP-FP, and where noise is correlated over steps."""
        plan = self.plan
        if not plan.mechanism.noises_gradients_alone or plan.correlated_steps > 1:
            return None
        return plan.noise_multiplier / plan.sample_rate

    @property
    def epochs(self) -> float:
        """Return the expected number of times that an example is used."""
        return self.examples / self.plan.drawn_from


def forecast(
    plan: PrivacyPlan, accountants: Sequence[str] | None = None, *, parameters: int | None = None
) -> Forecast:
    """Forecast what ``plan`` will cost, by the plan's own accountant unless others are named."""
    count = None if parameters is None else integer("parameters", parameters, 1)
    examples = plan.mechanism.forwarded(plan)
    if plan.selection is not None:
        examples += plan.selection.iterations * plan.selection.sample_rate * plan.num_examples
    gradients_alone = plan.mechanism.noises_gradients_alone
    return Forecast(
        plan=plan,
        answers=compare(plan.events(), plan.delta, accountants or (plan.accountant,)),
        most_signal=most_signal(plan, count) if count and gradients_alone else None,
        examples=examples,
        parameters=count,
    )


def _lines(found: Forecast) -> Iterator[str]:
    plan, mechanism = found.plan, found.plan.mechanism
    what = "examples" if mechanism.draw.group_size == 1 else "groups"
    if plan.users is not None:
        what = "rows" if plan.users.by_row else "users"
    most = mechanism.draw.most(plan)
    capped = "" if most == plan.drawn_from else f", of which at most {most} are used"
    drawn = "" if plan.words.sampling_code == POISSON else f", {plan.words.drawn}"
    yield (
        f"{plan.drawn_from:,} {what}, {plan.expected_batch_size:g} expected in a step{capped}: "
        f"sample rate {plan.sample_rate:.6g}{drawn}"
    )
    yield f"{plan.steps:,} steps, {found.epochs:.4g} epochs, {found.examples:,.0f} {what} in all"
    effective = found.effective_noise_multiplier
    ratio = "" if effective is None else f", effective {effective:.5g} (/ sample rate)"
    yield f"noise multiplier {plan.noise_multiplier:.6g}{ratio}"
    yield from mechanism.outline(plan)
    if found.most_signal is not None:
        yield f"the gradients of all steps add up to at most {found.most_signal:.3g} of their noise"
    elif plan.selection is not None:
        yield "signal to noise: not known before the selection decides what trains"
    elif mechanism.noises_gradients_alone:
        yield "signal to noise: not known without --parameters, how many numbers train"
    if plan.selection is not None:
        yield (
            f"before the steps, at most {plan.selection.iterations} releases to select what "
            f"trains, sample rate {plan.selection.sample_rate:g}, noise multiplier "
            f"{plan.selection.noise_multiplier:.6g}"
        )


def _assumed(published: PublishedForwardNoise, delta: float) -> Iterator[str]:
    """Yield what a bound says of the noise of DP-FP as published if its assumptions were right.

    The paper's figure rests on assumptions that do not hold for what runs: everything below the
    noise would have to be out of reach, and who took part in which step a secret. Each row takes
    assumptions that come nearer to what runs.
    """
    sigma, rate = published.noise_multiplier, published.sample_rate
    draws, steps = published.num_micro_batches, published.steps
    trains_above = "nothing trains below the noise, and"
    assumptions = {
        "all of the paper's, with a bound in place of its limit theorem's estimate": (
            PoissonSampledGaussian(sigma, rate, steps * draws)
        ),
        f"{trains_above} who took part in which step is visible": (
            SampledRecordRelease(sigma, rate, steps, draws)
        ),
        f"{trains_above} each row is released once": RecordRelease(sigma, 1),
    }
    yield f"\n{'epsilon':<10}if this were so (a bound, PLD, at delta {delta:g})"
    for words, assumed in assumptions.items():
        (answer,) = compare(assumed, delta, ["pld"])
        said = "-" if answer.epsilon is None else f"{answer.epsilon.rounded_up(2):.2f}"
        yield f"{said:<10}{words}"
    yield f"{'unknown':<10}none: what is below the noise trains"


def most_signal(plan: PrivacyPlan, parameters: int) -> float:
    """Return the largest possible ratio of all steps' gradients to all steps' noise, in norms.

    A step's mean gradient has norm C at most, so T of them add up to T C. Their noise has a
    standard deviation of noise_std / B a coordinate and step, so its sum has the norm sqrt(T p)
    noise_std / B (correlated: less than sqrt(T)).
    """
    of_steps = noise_of_sum(square_root_column(plan.correlated_steps), [1.0] * plan.steps)
    of_noise = of_steps * plan.noise_std * math.sqrt(parameters) / plan.expected_batch_size
    return plan.steps * plan.clipping_norm / of_noise


def parse_sweep(text: str, keys: Collection[str]) -> tuple[str, list[float]]:
    """Return the key and the values of ``key=64..4096``, a range by doubling with both ends, or
    ``key=1,2,4``.

    Raises: InvalidArgumentError.
    """
    name, _, values = text.partition("=")
    key = one_of("sweep", name.strip().replace("-", "_"), keys, "Write KEY=64..4096 or KEY=1,2.")
    low, dots, high = values.partition("..")
    try:
        numbers = [_number(value) for value in ((low, high) if dots else values.split(","))]
    except ValueError as error:
        expected = "to have numbers, like 64..4096 or 64,128"
        raise invalid("sweep", text, expected, f"{str(error).capitalize()}.") from error
    if dots:
        least, most = numbers
        if not 0 < least <= most <= least * 2**_MOST_VALUES:
            hint = "A range goes from a positive number to one that is not smaller."
            raise invalid("sweep", text, "to be a range like 64..4096", hint)
        numbers = [least]
        while numbers[-1] * 2 < most:
            numbers.append(numbers[-1] * 2)
        numbers += [most] if most > numbers[-1] else []
    return key, numbers


def _number(text: str) -> float:
    return int(text) if text.strip().isdecimal() else float(text)


@dataclass(frozen=True)
class Choice:
    """One setting: a key of a recipe, as the recipe takes it, and why, with its source."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class Suggestion:
    """Settings for a run, each with its reason, the run with them, and how many numbers train (None
    where that is not known). Nothing has been run."""

    plan: PrivacyPlan
    choices: tuple[Choice, ...]
    parameters: int | None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as a recipe has them."""
        return {choice.name: choice.value for choice in self.choices}


def suggest(
    num_examples: int,
    target_epsilon: float,
    *,
    epochs: float | None = None,
    parameters: int | None = None,
    peft: Block | None = None,
    **request: Any,
) -> Suggestion:
    """Suggest settings for a run with DP-Adam.

    Args:
        num_examples: N, rows (or users) of the training set, at least 16.
        target_epsilon: the epsilon to stay within.
        epochs: passes over the data that there is time for; None: as many as the rules ask for.
        parameters: how many numbers train with ``peft``; None: not known.
        peft: the recipe's choice of what trains, which stays; None: everything, or LoRA where the
            noise would drown that.
        request: further arguments of :meth:`PrivacyPlan.create`, such as ``target_delta``. Where
            ``users`` draws rows, batch and steps are those of rows.

    Raises:
        InvalidArgumentError: names the argument.
        CalibrationError: no noise meets the target.
    """
    count = integer("num_examples", num_examples, 16)
    if epochs is not None:
        epochs = positive("epochs", epochs)
    if parameters is not None:
        parameters = integer("parameters", parameters, 1)
    users = request.get("users")
    drawn_from = users.num_rows if users is not None and users.by_row else count
    batch, steps, why_batch, why_steps = _batch_and_steps(drawn_from, epochs)
    plan = PrivacyPlan.create(
        num_examples=count,
        expected_batch_size=batch,
        max_steps=steps,
        target_epsilon=target_epsilon,
        clipping_norm=CLIPPING_NORM,
        **request,
    )
    trains, why_trains = (peft, "as it was chosen") if peft else _what_trains(plan, parameters)
    decay = "with a decay the last, noisy steps move the weights less; our sweeps on text used it"
    clip = (
        f"clip nearly every gradient ({LI}, section 3.1.2 and figure 4). Adam divides the scale "
        "out again, so a smaller norm changes nothing"
    )
    choices = (
        Choice("expected_batch_size", batch, why_batch),
        Choice("max_steps", steps, why_steps),
        Choice("learning_rate", *_learning_rate(steps, trains)),
        Choice("lr_scheduler_type", "linear", decay),
        Choice("per_example_max_grad_norm", CLIPPING_NORM, clip),
        Choice("peft", trains, why_trains),
    )
    return Suggestion(plan, choices, parameters if trains == peft else None)


def _batch_and_steps(count: int, epochs: float | None) -> tuple[int, int, str, str]:
    """Return B and the number of steps, and why each."""
    usual = SAMPLE_RATE * count
    wanted = max(usual, min(SMALLEST_BATCH, LARGEST_RATE * count))
    steps, needed = STEPS, STEPS * wanted / count
    why = (
        f"the sample rate of SST-2, 1024 / 67,349 ({LI}, appendix L: sample rate and steps carry "
        "over to other data, batch size and epochs do not)"
        if wanted == usual
        else f"more than the sample rate of SST-2 gives ({usual:.0f}), since on few examples the "
        f"noise of a small batch drowns its gradient ({LI}, figure 3)"
    )
    why_steps = f"as many as on SST-2 ({LI}, appendices H and L)"
    if epochs is not None and epochs < needed:
        # The number of examples that pass, B x steps, is fixed. Both shrink by the same factor.
        share = math.sqrt(epochs / needed)
        wanted, steps = wanted * share, max(1, round(STEPS * share))
        why += f". {epochs:g} epochs are fewer than the best {needed:.3g}: batch and steps shrink"
        why_steps = f"about {epochs:g} epochs at this batch size"
    elif epochs is not None:
        wanted = min(wanted * epochs / needed, count)
        why = (
            f"{min(epochs, STEPS * wanted / count):.4g} epochs in {STEPS} steps: at a fixed number "
            f"of steps a larger batch is always better ({LI}, section 3.1.1 and figure 3)"
        )
    return max(1, round(wanted)), steps, why, why_steps


def _learning_rate(steps: int, trains: Block | None) -> tuple[float, str]:
    """Return the peak learning rate, one digit, and why.

    Under noise, Adam moves each number by about the learning rate in a random direction in each
    step, so over S steps by about sqrt(S) times that. What a pretrained model bears of it is taken
    as the same for all runs.
    """
    low, high = LEARNING_RATES
    exact = min(max(WALK / math.sqrt(steps), low), high)
    reason = (
        "under noise Adam makes a random walk of length about learning rate x sqrt(steps); our "
        f"sweeps were best near {WALK:g}. Large batches need large rates ({LI}, figure 2). If you "
        "can tune on public data, try half and double"
    )
    if trains is not None and str(trains.get("peft_type")).lower() not in OWN_MATRICES:
        exact *= ADAPTER_FACTOR
        reason += (
            f". This is {ADAPTER_FACTOR} times the rate for all weights: our best runs of LoRA "
            "had 6 to 10 times theirs (recipes/e2e, recipes/sst2), and few other rates were tried"
        )
    return float(f"{exact:.0e}"), reason


def _what_trains(plan: PrivacyPlan, parameters: int | None) -> tuple[Block | None, str]:
    """Return the block ``peft``, None for everything, and why."""
    full = (
        f"train everything: with ghost clipping it is as good as LoRA or better ({LI}, table 2). "
        "In our runs it was so on E2E, and LoRA was ahead on SST-2. RGP (peft_type rgp) may be "
        "better: on short texts of SST-2 it had 3 points more (recipes/sst2)"
    )
    if parameters is None:
        return None, full + ". Whether the noise allows it depends on `parameters`, not given"
    ratio = most_signal(plan, parameters)
    if ratio >= LEAST_SIGNAL:
        return None, f"{full}. At best the gradients add up to {ratio:.2g} of the noise"
    return LORA, (
        f"noise grows with the numbers that train: for all {parameters:,} the gradients add up to "
        f"{ratio:.2g} of the noise at best, and below {LEAST_SIGNAL:g} none of our runs learned"
    )


# -- why a run may learn, or protect, little --

SLOW = 5e-5  # transformers' default learning rate
# Copies per unit of noise, from which nothing is left to protect, and the bound takes minutes.
_LARGE = 7


def doubts(
    plan: PrivacyPlan, *, parameters: int, learning_rate: float, optimizer: str
) -> Iterator[str]:
    """Yield why a run may learn little, or protect less than it could, each with a next move.

    Args: parameters: how many numbers train. optimizer: the name of its class, in small letters.
    """
    if (1 + 1e-9) / (2 * plan.num_examples) < plan.delta < LARGE_DELTA:
        yield (
            f"target_delta is {plan.delta:.3g}, above 1/(2N) = {1 / (2 * plan.num_examples):.3g}. "
            "It is roughly the chance that the guarantee fails. Leave it unset for 1/(2N)."
        )
    if not plan.mechanism.noises_gradients_alone:
        return
    if "adam" in optimizer and learning_rate <= SLOW:
        yield (
            f"The learning rate is {learning_rate:g}, transformers' default or less. With noise, "
            "Adam usually needs 10 to 50 times that (Li et al. 2022, section 3 and figure 2). Try "
            "1e-3, or what `hf-dp suggest` proposes."
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
            "expected_batch_size, train fewer numbers (a head, LoRA of fewer modules), or spend a "
            "larger epsilon."
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
        f"{most:,} of them {weaker} (this run; delta {plan.delta:.2g}). Leave the copies out, or, "
        "where they belong to one person, protect persons: privacy_unit='user'."
    )


def _of_rows(event: Event, rows: int) -> Event:
    """Return the event for a user of so many rows.

    Raises: UnsupportedEventError where no bound is known.
    """
    if type(event) is not PoissonSampledGaussian or event.beside:
        raise UnsupportedEventError(f"no bound is known for several rows in {event!r}")
    return UserRowsGaussian(event.noise_multiplier, event.sample_rate, event.steps, rows)


@cache
def _epsilon(events: tuple[Event, ...], delta: float) -> float:
    return epsilon(events, delta).rounded_up()
