"""Suggest settings that learn: batch size, steps, learning rate and what trains, with reasons.

The rules carry settings that are known to work to other data. They read public numbers only: how
many examples there are, epsilon, delta, and the size of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_dp import _validate
from hf_dp.planning.forecast import LEAST_SIGNAL, most_signal
from hf_dp.plans.privacy import PrivacyPlan

LI = "Li et al. 2022"
# SST-2 in Li et al. 2022, appendix H: B = 1024 of N = 67,349 for 3 epochs.
SAMPLE_RATE, STEPS, CLIPPING_NORM = 1024 / 67_349, 198, 0.1
# On few examples a step takes this many, or this share of them if that is less. `make demo` takes
# 512 of 8,000.
SMALLEST_BATCH, LARGEST_RATE = 512, 1 / 8
# Learning rate x sqrt(steps) at the best cells of our grids (recipes/sst2/README.md), and the
# rates beyond which nothing was tried.
WALK, LEARNING_RATES = 0.02, (3e-4, 5e-3)
ADAPTER_FACTOR = 3  # LoRA beside all weights (ibid., "What trains")
# What trains the model's own matrices ran at the rate of all weights (ibid.).
OWN_MATRICES = ("frost", "random", "pval", "param", "rgp", "top_blocks")
Block = dict[str, object]  # the recipe's ``peft``
LORA: Block = {"peft_type": "lora", "r": 8}


@dataclass(frozen=True)
class Choice:
    """One setting: a key of a recipe, as the recipe takes it, and why, with its source."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class Suggestion:
    """Settings for a run, and what they mean. Nothing has been run.

    Attributes:
        plan: the run with these settings.
        choices: the settings, each with its reason.
        parameters: how many numbers train; None where that is not known.
    """

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

    Raises: InvalidArgumentError naming the argument; CalibrationError if no noise meets the target.
    """
    count = _validate.integer("num_examples", num_examples, 16)
    if epochs is not None:
        epochs = _validate.positive("epochs", epochs)
    if parameters is not None:
        parameters = _validate.integer("parameters", parameters, 1)
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
    decay = "with a decay the last, noisy steps move the weights less; all our own sweeps used it"
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
    if epochs is None:
        why_steps += f"; {needed:.3g} epochs"
    elif epochs < needed:
        # The number of examples that pass, B x steps, is fixed. Both shrink by the same factor.
        share = math.sqrt(epochs / needed)
        wanted, steps = wanted * share, max(1, round(STEPS * share))
        why += f". {epochs:g} epochs are fewer than the {needed:.3g} wanted: batch and steps shrink"
        why_steps = f"{epochs:g} epochs at this batch size"
    else:
        wanted = min(wanted * epochs / needed, count)
        why = (
            f"{epochs:g} epochs in {STEPS} steps: at a fixed number of steps a larger batch is "
            f"always better ({LI}, section 3.1.1 and figure 3)"
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
        "under noise Adam makes a random walk of about learning rate x sqrt(steps); our sweeps "
        f"were best near {WALK:g}. Large batches need large rates ({LI}, figure 2). If you can "
        "tune on public data, try half and double"
    )
    if trains is not None and str(trains.get("peft_type")).lower() not in OWN_MATRICES:
        exact *= ADAPTER_FACTOR
        reason += (
            f". An adapter takes {ADAPTER_FACTOR} times the rate of all weights (recipes/sst2)"
        )
    return float(f"{exact:.0e}"), reason


def _what_trains(plan: PrivacyPlan, parameters: int | None) -> tuple[Block | None, str]:
    """Return the block ``peft``, None for everything, and why."""
    full = (
        f"train everything: with ghost clipping it is as good as LoRA or better ({LI}, table 2)"
        ", and it was in our runs. RGP (peft_type rgp) may be better: on short texts of SST-2 it "
        "had 3 points more (recipes/sst2)"
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
