"""What the variants of DP-FP share: one clipped vector per example, with noise in each coordinate
(Du and Mi 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import VECTORS
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_sgd import check_noise
from hf_dp.plans.draws import Sampler
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.selection import SelectionPlan
from hf_dp.plans.units import EXAMPLE, FEATURES, RECORD_ZERO_OUT, USER, Users

DP_FP = "dp_fp"
PUBLISHED, FROZEN, PRIVATE_ENCODER = "published", "frozen", "private_encoder"
VARIANTS = (FROZEN, PRIVATE_ENCODER, PUBLISHED)

PROOF = (
    "what trains above the noise is a function of clipped and noised representations; below it "
    "nothing trains, or DP-SGD does; composed over the releases in the ledger"
)
SHOWN = "The rows that are released show who was drawn, so the sampling amplifies nothing"


@dataclass(frozen=True)
class ForwardPlan(MechanismPlan):
    """What the variants share: one clipped vector per example, with noise in each coordinate.

    Args: clipping_norm: C of a representation (equation 8). noise_multiplier: of the noise on it.
    """

    privacy_mode: ClassVar[str] = DP_FP
    variant: ClassVar[str]

    @property
    def vector_clipping_norm(self) -> float:
        """C of a representation."""
        return self.clipping_norm

    @property
    def vector_noise_multiplier(self) -> float:
        """The noise multiplier of a representation."""
        return self.sigma

    @property
    def vector_sensitivity(self) -> float:
        """How far one example can move its own vector, the rounding of float32 included."""
        return self.vector_clipping_norm * (1 + ROUNDING_MARGIN)

    @property
    def protects_labels(self) -> bool:
        """Whether epsilon covers the labels."""
        return False

    @property
    def labels_in_vector(self) -> bool:
        """Whether the vector has a block for each class, and the representation is in its own."""
        return False

    @property
    def num_classes(self) -> int | None:
        """K, where labels are protected."""
        return None

    @property
    def unit(self) -> str:
        return EXAMPLE if self.protects_labels else FEATURES

    @property
    def relation(self) -> str:
        return RECORD_ZERO_OUT

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {VECTORS: self.vector_sensitivity}

    def check_users(self, users: Users | None) -> None:
        if users is None:
            return
        raise _validate.invalid(
            "privacy_unit",
            USER,
            f"to be {EXAMPLE!r} with privacy_mode={DP_FP!r}",
            f"DP-FP releases a vector for each row, so a {users.name} of k rows would be released "
            "k times. Use privacy_mode='dp_sgd'.",
            UnsupportedArgumentError,
        )

    def check(self, schedule: Schedule, selection: SelectionPlan | None) -> None:
        if (rate := self.sample_rate(schedule)) > 1:
            raise _validate.invalid(
                "num_micro_batches",
                getattr(self, "num_micro_batches", 1),
                f"to give B / (M N) <= 1, not {rate:g}",
                "Raise it, or lower `expected_batch_size`.",
            )
        self._check_selection(selection)
        self._check_accountant(schedule)

    def _check_selection(self, selection: SelectionPlan | None, draws: str = "separate") -> None:
        if selection is not None:
            raise _validate.invalid(
                "peft_config",
                "a private selection",
                f"to be None with dp_fp_variant={self.variant!r} and "
                f"representation_draws={draws!r}",
                "A selection goes with 'private_encoder' and 'separate'.",
            )

    def _check_accountant(self, schedule: Schedule) -> None:
        if schedule.accountant == "gdp_clt":
            raise _validate.invalid(
                "accountant",
                schedule.accountant,
                f"to be a bound with dp_fp_variant={self.variant!r}",
                "The published variant has no bound, only the paper's own figure; the others have "
                "one.",
            )

    def _vectors_in_words(self) -> str:
        in_block = " and put into the block of its class in a vector of all classes"
        std = self.vector_noise_multiplier * self.vector_sensitivity
        return (
            "the representation that enters the last layer is clipped to an L2 norm of at most "
            f"{self.vector_clipping_norm!r}{in_block if self.labels_in_vector else ''}, and "
            f"Gaussian noise with standard deviation {std:.6g} is added to each coordinate"
        )


@dataclass(frozen=True)
class MicroBatchSampler(Sampler):
    """Joins ``num_micro_batches`` independent Poisson draws per step (Du and Mi 2021, section 3.2).

    An example may occur more than once in a step. The M N Bernoulli trials of a step are made by
    drawing the gaps between successes, which are geometric. This takes about as many random numbers
    as examples drawn, not as trials. A gap is ``floor(log(u) / log(1 - p))`` for u uniform on
    multiples of 2^-64, so the relative error of probabilities is about 2^-53 / p.

    Args:
        num_examples: N >= 1.
        sample_rate: p in (0, 1], of each draw.
        steps: how many joined draws one iteration makes, >= 1.
        num_micro_batches: M >= 1.
    """

    num_examples: int
    sample_rate: float
    steps: int
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        _validate.integer("num_examples", self.num_examples, 1)
        _validate.in_unit_interval(
            "sample_rate",
            self.sample_rate,
            "It is B / (M N): lower expected_batch_size or raise M.",
            one=True,
        )
        _validate.integer("steps", self.steps, 1)
        _validate.integer("num_micro_batches", self.num_micro_batches, 1)

    def micro_batches(self) -> list[list[int]]:
        """Draw M lists of indices, each in increasing order and possibly empty."""
        examples = self.share.of(self.num_examples)
        drawn = self._successes(len(examples) * self.num_micro_batches)
        which, place = np.divmod(drawn, max(1, len(examples)))
        return [examples[place[which == micro]].tolist() for micro in range(self.num_micro_batches)]

    def draw(self) -> list[int]:
        """Draw the indices of one step's micro-batches, one after the other."""
        return [index for drawn in self.micro_batches() for index in drawn]

    def _successes(self, trials: int) -> np.ndarray:
        """Draw which of ``trials`` independent trials succeed, in increasing order."""
        if self.sample_rate == 1:
            return np.arange(trials)
        found: list[np.ndarray] = []
        last = -1
        while last < trials:
            count = int(1.2 * (trials - last) * self.sample_rate) + 20
            uniform = (
                np.frombuffer(self.random_bytes(8 * count), dtype=np.uint64).astype(np.float64) + 1
            ) / 2**64
            gaps = np.floor(np.log(uniform) / np.log1p(-self.sample_rate))
            positions = last + np.cumsum(gaps + 1)
            found.append(positions[positions < trials].astype(np.int64))
            last = positions[-1]
        return np.concatenate(found)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield self.draw()

    def __len__(self) -> int:
        return self.steps


@dataclass(frozen=True)
class MicroBatchPlan(ForwardPlan):
    """Rows of M independent Poisson draws a step (section 3.2), each at the rate B / (M N)."""

    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        check_noise(self)
        draws = _validate.integer("num_micro_batches", self.num_micro_batches, 1)
        object.__setattr__(self, "num_micro_batches", draws)

    def sample_rate(self, schedule: Schedule) -> float:
        return schedule.expected_batch_size / (self.num_micro_batches * schedule.num_examples)

    def sampler(self, schedule: Schedule, steps: int) -> MicroBatchSampler:
        rate = self.sample_rate(schedule)
        return MicroBatchSampler(schedule.num_examples, rate, steps, self.num_micro_batches)

    def _draws_in_words(self) -> str:
        many = self.num_micro_batches > 1
        draws = f"{self.num_micro_batches} independent Poisson draws a step" if many else "Poisson"
        return (
            f"{draws}: each row joins each draw independently with the probability sample_rate; an "
            "empty draw counts"
        )


def check_labels(plan: Any) -> None:
    """Raise InvalidArgumentError for a protection of labels that is not well formed."""
    if not isinstance(plan.labels_in_vector, bool):
        raise _validate.invalid("labels_in_vector", plan.labels_in_vector, "to be True or False")
    if plan.protects_labels:
        _validate.integer("num_classes", plan.num_classes, 2, "Labels of one class tell nothing.")
