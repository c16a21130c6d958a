"""The privacy plan: the one place where sample rate, steps, noise and delta are decided and
coupled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hf_dp import _validate
from hf_dp.accounting import ACCOUNTANTS, Event, calibrate_noise_multiplier, gdp_clt
from hf_dp.accounting.budget import compute_sigma
from hf_dp.accounting.events import RecordRelease, SampledRecordRelease
from hf_dp.errors import ConfigError
from hf_dp.forward_plan import FROZEN, PRIVATE_ENCODER, PUBLISHED, SHARED, ForwardPlan
from hf_dp.sampling import MicroBatchSampler, PoissonSampler, RandomBytes
from hf_dp.selection_plan import SelectionPlan

MAX_STEPS = 10**9
CLIPPINGS = ("flat", "automatic", "per_layer")
# By how much, of C, rounding of float32 sums can move them beyond C when one example is added;
# noise is scaled to this. Measured with 1,024 aligned examples: 1e-5
# (tests/clipping/test_sensitivity.py). At most for a draw of 2,048.
ROUNDING_MARGIN = 2.0**-12


def rounding_margin(expected_draw: float, most: float = math.inf) -> float:
    """The margin for sums over draws of ``expected_draw`` examples on average and ``most`` at the
    most.

    Beside a sum of n aligned examples of norm C, float32 numbers are at most 2^-23 n C apart, so
    one example's part is rounded by no more. A Poisson draw exceeds its mean m by 12 sqrt(m) with a
    probability below exp(-60) (Bernstein, from m = 1,000 on, below which the constant is larger).
    """
    largest = min(most, expected_draw + 12 * math.sqrt(expected_draw))
    return max(ROUNDING_MARGIN, largest * 2.0**-23)


@dataclass(frozen=True)
class PrivacyPlan:
    """What a private run will do. Sampler, noise and accountant all read it; nothing else computes
    these numbers.

    Args:
        num_examples: N, the rows of the training set, stated as public.
        expected_batch_size: B, the expected logical batch; also the divisor of the noisy sum.
        steps: optimizer steps, each one release of a noisy sum.
        noise_multiplier: standard deviation of the noise on the sum / its sensitivity, which is
            ``clipping_norm``; of DP-FP (published, frozen): of the noise on a representation / its
            clipping norm.
        clipping_norm: C, the largest L2 norm of one example's contribution; of DP-FP: of its
            representation.
        delta: of the (epsilon, delta) guarantee.
        accountant: the one whose epsilon is the headline.
        target_epsilon: what the noise was calibrated to, or None when the noise was given.
        max_batch_size: the most examples of a draw that a step uses, a random part of a larger one;
            None: all.
        selection: what is released before training to choose what trains; None: nothing.
        forward: what DP-FP releases of representations; None: nothing, the mode is DP-SGD.
    """

    num_examples: int
    expected_batch_size: float
    steps: int
    noise_multiplier: float
    clipping_norm: float
    delta: float
    accountant: str = "pld"
    target_epsilon: float | None = None
    clipping: str = "flat"
    max_batch_size: int | None = None
    privacy_unit: str = "example"
    neighboring_relation: str = "zero_out"
    selection: SelectionPlan | None = None
    forward: ForwardPlan | None = None

    @property
    def sample_rate(self) -> float:
        """q = B / N: the probability with which each example joins a logical batch; of each of M
        micro-batches, B / (M N)."""
        draws = 1 if self.forward is None else self.forward.num_micro_batches
        return self.expected_batch_size / (draws * self.num_examples)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise added to the sum of clipped gradients (DP-FP: to a
        representation), in its units."""
        return self.noise_multiplier * self.sensitivity

    @property
    def sensitivity(self) -> float:
        """How far one example can move what is noised: C, and what the rounding of float32 numbers
        can add to it."""
        return self.clipping_norm * (1 + self.margin)

    @property
    def record_clipping_norm(self) -> float:
        """C of a representation, in DP-FP."""
        own = None if self.forward is None else self.forward.record_clipping_norm
        return self.clipping_norm if own is None else own

    @property
    def record_noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of a representation, in DP-FP."""
        own = None if self.forward is None else self.forward.record_noise_multiplier
        return (
            (self.noise_multiplier if own is None else own)
            * self.record_clipping_norm
            * (1 + ROUNDING_MARGIN)
        )

    @property
    def releases_each_step(self) -> bool:
        """Whether steps release something of the private rows; else the ledger counts none of
        them."""
        return self.forward is None or self.forward.releases_each_step

    @property
    def margin(self) -> float:
        """What the rounding of float32 sums can add to C, in units of it."""
        most = (
            self.num_examples
            if self.max_batch_size is None
            else min(self.max_batch_size, self.num_examples)
        )
        return rounding_margin(self.expected_batch_size, most)

    def sampler(self, steps: int | None = None, **source: RandomBytes) -> PoissonSampler:
        """A sampler of this plan; ``random_bytes=`` replaces the operating system's source (tests
        only)."""
        count = self.steps if steps is None else steps
        return PoissonSampler(
            self.num_examples, self.sample_rate, count, max_batch_size=self.max_batch_size, **source
        )

    def micro_batch_sampler(
        self, steps: int | None = None, **source: RandomBytes
    ) -> MicroBatchSampler:
        """The sampler of DP-FP's rows: M draws a step, joined."""
        draws = 1 if self.forward is None else self.forward.num_micro_batches
        count = self.steps if steps is None else steps
        return MicroBatchSampler(self.num_examples, self.sample_rate, count, draws, **source)

    def step_event(self, noise_multiplier: float, steps: int) -> Event:
        """What ``steps`` training steps of this plan with this noise would release."""
        if self.forward is not None:
            return self.forward.step_event(noise_multiplier, self.sample_rate, steps)
        return self.sampler().event(noise_multiplier, steps)

    def event(self, steps: int | None = None) -> Event:
        """What the accountant is told about ``steps`` (default: all) training steps of this
        plan."""
        return self.step_event(self.noise_multiplier, self.steps if steps is None else steps)

    def releases_before(self) -> tuple[Event, ...]:
        """What is released once, before the first step, other than by a selection."""
        return () if self.forward is None else self.forward.releases_before(self.noise_multiplier)

    def events(self, steps: int | None = None) -> tuple[Event, ...]:
        """All that the plan will release with ``steps`` (default: all) training steps: selection,
        rows, steps."""
        selected = () if self.selection is None else (self.selection.event(),)
        trained = (self.event(steps),) if self.releases_each_step else ()
        return (*selected, *self.releases_before(), *trained)

    @classmethod
    def create(
        cls,
        *,
        num_examples: int,
        expected_batch_size: float | None,
        clipping_norm: float,
        num_train_epochs: float = 3.0,
        max_steps: int = -1,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        accountant: str = "pld",
        clipping: str = "flat",
        max_batch_size: int | None = None,
        prior_events: Sequence[Event] = (),
        selection: SelectionPlan | None = None,
        forward: ForwardPlan | None = None,
    ) -> PrivacyPlan:
        """Derive a plan from what users give.

        ``steps`` is ``max_steps`` if positive, else ``ceil(num_train_epochs * N / B)``; delta
        defaults to 1/(2N) as in Li et al.; exactly one of ``target_epsilon`` (calibrated here) and
        ``noise_multiplier`` is given. A ``selection`` gets its noise from the same target, or has
        its own beside ``noise_multiplier``.

        Raises: InvalidArgumentError, naming the argument; CalibrationError when no noise meets the
            target.
        """
        n = _validate.integer(
            "num_examples", num_examples, 2, "A private training set has at least two rows."
        )
        if expected_batch_size is None:
            raise _validate.invalid(
                "expected_batch_size",
                None,
                "to be given",
                "It is the logical batch size; 1024 suits many tasks.",
            )
        b = _validate.positive("expected_batch_size", expected_batch_size)
        if b > n:
            raise _validate.invalid(
                "expected_batch_size",
                expected_batch_size,
                f"to be at most num_examples ({n})",
                "Lower it.",
            )
        if (target_epsilon is None) == (noise_multiplier is None):
            raise _validate.invalid(
                "target_epsilon",
                target_epsilon,
                f"or `noise_multiplier` ({noise_multiplier!r}) to be given, exactly one of them",
            )
        delta = 1 / (2 * n) if target_delta is None else target_delta
        _check_delta(delta, n)
        steps = (
            _validate.integer("max_steps", max_steps, 1)
            if max_steps > 0
            else _steps_of(num_train_epochs, n, b)
        )
        c = _validate.positive("per_example_max_grad_norm", clipping_norm)
        _validate.one_of("accountant", accountant, ACCOUNTANTS)
        _validate.one_of("clipping", clipping, CLIPPINGS)
        if max_batch_size is not None:
            max_batch_size = _validate.integer("max_logical_batch_size", max_batch_size, 1)
            if max_batch_size < b:
                raise _validate.invalid(
                    "max_logical_batch_size",
                    max_batch_size,
                    f"to be at least expected_batch_size ({b:g})",
                    "Most draws would be cut, which costs privacy; 1.2 times expected_batch_size "
                    "costs little at 1024.",
                )
        plan = cls(
            n,
            b,
            steps,
            1.0,
            c,
            delta,
            accountant,
            target_epsilon,
            clipping,
            max_batch_size,
            selection=selection,
            forward=forward,
        )
        plan._check_forward()
        if noise_multiplier is None:
            return plan._calibrated(
                _validate.positive("target_epsilon", target_epsilon), prior_events
            )
        if selection is not None and selection.noise_multiplier is None:
            raise _validate.invalid(
                "selection_noise_multiplier",
                None,
                "to be given beside `noise_multiplier`",
                "Only a target_epsilon can decide it.",
            )
        if (
            forward is not None
            and forward.variant == PRIVATE_ENCODER
            and forward.record_noise_multiplier is None
        ):
            raise _validate.invalid(
                "representation_noise_multiplier",
                None,
                "to be given beside `noise_multiplier`",
                "Only a target_epsilon can decide it.",
            )
        sigma = _validate.positive(
            "noise_multiplier", noise_multiplier, "Noise 0 gives no privacy."
        )
        return replace(plan, noise_multiplier=sigma)

    def _check_forward(self) -> None:
        """What DP-FP adds to the conditions of a plan."""
        forward = self.forward
        if forward is None:
            if self.accountant == "gdp_clt" and self.target_epsilon is not None:
                raise _validate.invalid(
                    "accountant", "gdp_clt", "to be a bound when `target_epsilon` is given"
                )
            return
        if self.sample_rate > 1:
            raise _validate.invalid(
                "num_micro_batches",
                forward.num_micro_batches,
                f"to give B / (M N) <= 1, not {self.sample_rate:g}",
                "Raise it, or lower `expected_batch_size`.",
            )
        if self.max_batch_size is not None:
            raise _validate.invalid(
                "max_logical_batch_size", self.max_batch_size, "to be None with dp_fp"
            )
        if self.selection is not None and (
            forward.variant != PRIVATE_ENCODER or forward.draws == SHARED
        ):
            raise _validate.invalid(
                "peft_config",
                "a private selection",
                f"to be None with dp_fp_variant={forward.variant!r} and "
                f"representation_draws={forward.draws!r}",
                "A selection goes with 'private_encoder' and 'separate'.",
            )
        if (self.accountant == "gdp_clt") != (forward.variant == PUBLISHED):
            raise _validate.invalid(
                "accountant",
                self.accountant,
                f"to be {'gdp_clt' if forward.variant == PUBLISHED else 'a bound'} with "
                f"dp_fp_variant={forward.variant!r}",
                "The published variant has no bound, only the paper's own figure; the others have "
                "one.",
            )

    def _calibrated(self, target_epsilon: float, prior_events: Sequence[Event]) -> PrivacyPlan:
        """This plan with the noise that meets the target, of its selection, too."""
        forward = self.forward
        if forward is None:
            return self._with_sums(target_epsilon, prior_events)
        if forward.variant == PUBLISHED:
            draws = self.steps * forward.num_micro_batches
            sigma = gdp_clt.noise_multiplier(target_epsilon, self.delta, self.sample_rate, draws)
            return replace(self, noise_multiplier=sigma)
        prior = (*prior_events, *forward.label_release())
        if forward.variant == FROZEN:
            sigma = self._noise(target_epsilon, prior, self._released_rows)
            return replace(self, noise_multiplier=sigma)
        if forward.record_noise_multiplier is not None or forward.budget_ratio is None:
            raise _validate.invalid(
                "representation_noise_multiplier",
                forward.record_noise_multiplier,
                "to be None with a target_epsilon, which decides it",
                "Set `representation_budget_ratio`, or give `noise_multiplier` instead of the "
                "target.",
            )
        # As ComputeSigma of DP-FROST: the gradients' noise for their part of epsilon alone, then
        # the rows' for the whole.
        for_sums = (1 - forward.budget_ratio) * target_epsilon
        if forward.draws == SHARED:  # the rows show whose gradients the sum is of
            sigma = self._noise(
                for_sums,
                prior,
                lambda noise, steps: SampledRecordRelease(noise, self.sample_rate, steps),
            )
            sums = replace(self, noise_multiplier=sigma)
        else:
            sums = replace(self, forward=None)._with_sums(for_sums, prior)
        if sums.selection is not None:
            prior = (*prior, sums.selection.event())

        def rows(noise_multiplier: float, steps: int) -> Event:
            noised = replace(forward, record_noise_multiplier=noise_multiplier)
            return noised.step_event(sums.noise_multiplier, self.sample_rate, steps)

        noised = replace(forward, record_noise_multiplier=self._noise(target_epsilon, prior, rows))
        return replace(sums, forward=noised, target_epsilon=self.target_epsilon)

    def _released_rows(self, noise_multiplier: float, steps: int) -> Event:
        """The rows of ``frozen``: released once, or in each of the steps."""
        if self.releases_each_step:
            return self.step_event(noise_multiplier, steps)
        return RecordRelease(noise_multiplier, 1)

    def _noise(
        self, target_epsilon: float, prior: Sequence[Event], event: Callable[[float, int], Event]
    ) -> float:
        return calibrate_noise_multiplier(
            target_epsilon,
            self.delta,
            self.sample_rate,
            self.steps,
            accountant=self.accountant,
            prior_events=prior,
            event=event,
        )

    def _with_sums(self, target_epsilon: float, prior_events: Sequence[Event]) -> PrivacyPlan:
        """This plan with the noise on sums that meets the target, of its selection, too."""
        chosen, event = self.selection, self.step_event
        if chosen is None:
            return replace(self, noise_multiplier=self._noise(target_epsilon, prior_events, event))
        if chosen.noise_multiplier is not None or chosen.budget_ratio is None:
            raise _validate.invalid(
                "selection_noise_multiplier",
                chosen.noise_multiplier,
                "to be None with a target_epsilon, which decides it",
                "Leave it out and set `selection_budget_ratio`, or give `noise_multiplier` instead "
                "of the target.",
            )
        sigma, selection_sigma = compute_sigma(
            target_epsilon,
            self.delta,
            sample_rate=self.sample_rate,
            steps=self.steps,
            selection_sample_rate=chosen.sample_rate,
            selection_iterations=chosen.iterations,
            selection_budget_ratio=chosen.budget_ratio,
            accountant=self.accountant,
            prior_events=prior_events,
            event=event,
        )
        return replace(
            self,
            noise_multiplier=sigma,
            selection=replace(chosen, noise_multiplier=selection_sigma),
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields and what is derived from them, for ``privacy.json``."""
        return {**asdict(self), "sample_rate": self.sample_rate, "noise_std": self.noise_std}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Read back what :meth:`to_dict` wrote.

        Raises: ConfigError when a field is missing; InvalidArgumentError when one could not have
            been written.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ConfigError(
                f"The plan lacks {missing}: it was not written by this version of hf_dp, or was "
                "edited."
            )
        given = {name: values[name] for name in names}
        if given["selection"] is not None:
            given["selection"] = SelectionPlan.from_dict(given["selection"])
        if given["forward"] is not None:
            given["forward"] = ForwardPlan.from_dict(given["forward"])
        plan = cls(**given)
        _validate.integer("num_examples", plan.num_examples, 2)
        _validate.positive("expected_batch_size", plan.expected_batch_size)
        _validate.integer("steps", plan.steps, 1)
        _validate.positive("noise_multiplier", plan.noise_multiplier)
        _validate.positive("clipping_norm", plan.clipping_norm)
        _check_delta(plan.delta, plan.num_examples)
        _validate.one_of("accountant", plan.accountant, ACCOUNTANTS)
        _validate.one_of("clipping", plan.clipping, CLIPPINGS)
        if plan.target_epsilon is not None:
            _validate.positive("target_epsilon", plan.target_epsilon)
        if plan.max_batch_size is not None:
            _validate.integer("max_batch_size", plan.max_batch_size, 1)
        return plan


def _check_delta(delta: float, num_examples: int) -> None:
    if _validate.in_unit_interval("target_delta", delta) >= 1 / num_examples:
        raise _validate.invalid(
            "target_delta",
            delta,
            f"to be < 1/num_examples ({1 / num_examples:.3g})",
            "At 1/N publishing one random row would count as private. Leave it unset for 1/(2N).",
        )


def _steps_of(num_train_epochs: float, num_examples: int, expected_batch_size: float) -> int:
    steps = (
        _validate.positive("num_train_epochs", num_train_epochs)
        * num_examples
        / expected_batch_size
    )
    if steps > MAX_STEPS:
        raise _validate.invalid(
            "num_train_epochs",
            num_train_epochs,
            f"to give at most {MAX_STEPS:,} steps",
            "Lower it.",
        )
    return math.ceil(steps)
