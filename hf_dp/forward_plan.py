"""What a DP-FP run releases of each record's representation: part of the
:class:`hf_dp.plan.PrivacyPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_dp import _validate
from hf_dp.accounting.events import (
    Event,
    PublishedForwardNoise,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
)
from hf_dp.errors import ConfigError

PUBLISHED, FROZEN, PRIVATE_ENCODER = "published", "frozen", "private_encoder"
VARIANTS = (PUBLISHED, FROZEN, PRIVATE_ENCODER)
ONCE, FRESH = "once", "fresh"
RELEASES = (ONCE, FRESH)
SEPARATE, SHARED = "separate", "shared"
DRAWS = (SEPARATE, SHARED)


@dataclass(frozen=True)
class ForwardPlan:
    """Noise on the representation that enters the last layer (Du and Mi 2021), and what of it is
    proven.

    Args:
        variant: ``published`` (everything trains; no epsilon is established), ``frozen`` (only the
            last layer trains, from released rows) or ``private_encoder`` (DP-SGD below the noise,
            released rows above it).
        num_micro_batches: M independent Poisson draws a step.
        release: of ``frozen``: ``once`` (one noisy row a record, used for all steps) or ``fresh``
            (a new one at each draw).
        draws: of ``private_encoder``: whether gradients and rows are of ``separate`` draws or of
            one ``shared`` one.
        record_clipping_norm, record_noise_multiplier: of the rows of ``private_encoder``, beside
            those of its gradients.
        budget_ratio: how much of the target the gradients of ``private_encoder`` leave to the rows;
            None with given noise.
        label_epsilon: of a randomised response that replaces the labels once; None: they are
            public, or in the vector.
        labels_in_vector: the released vector has a block for each class and the representation
            stands in that of its label.
        num_classes: K, for both.
    """

    variant: str
    num_micro_batches: int = 1
    release: str = FRESH
    draws: str = SEPARATE
    record_clipping_norm: float | None = None
    record_noise_multiplier: float | None = None
    budget_ratio: float | None = None
    label_epsilon: float | None = None
    labels_in_vector: bool = False
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _validate.one_of("dp_fp_variant", self.variant, VARIANTS)
        _validate.integer("num_micro_batches", self.num_micro_batches, 1)
        _validate.one_of("representation_release", self.release, RELEASES)
        _validate.one_of("representation_draws", self.draws, DRAWS)
        for name in ("record_clipping_norm", "record_noise_multiplier", "label_epsilon"):
            if getattr(self, name) is not None:
                _validate.positive(name, getattr(self, name))
        if self.budget_ratio is not None:
            _validate.in_unit_interval("representation_budget_ratio", self.budget_ratio)
        if not isinstance(self.labels_in_vector, bool):
            raise _validate.invalid(
                "labels_in_vector", self.labels_in_vector, "to be True or False"
            )
        if self.label_epsilon is not None and self.labels_in_vector:
            raise _validate.invalid(
                "label_epsilon",
                self.label_epsilon,
                "to be None with labels_in_vector=True",
                "Either protects the labels.",
            )
        if (self.label_epsilon is not None or self.labels_in_vector) and self.variant == PUBLISHED:
            raise _validate.invalid(
                "dp_fp_variant",
                self.variant,
                "to be 'frozen' or 'private_encoder' with `label_epsilon` or `labels_in_vector`",
                "The published variant protects no label, and nothing that is established.",
            )
        if self.label_epsilon is not None and self.variant == PRIVATE_ENCODER:
            raise _validate.invalid(
                "label_epsilon",
                self.label_epsilon,
                "to be None with a private encoder",
                "Its rows are drawn anew in each step; protect the labels with "
                "labels_in_vector=True, at no further cost.",
            )
        if self.protects_labels:
            _validate.integer(
                "num_classes", self.num_classes, 2, "Labels of one class tell nothing."
            )
        if self.variant == PRIVATE_ENCODER and self.num_micro_batches != 1:
            raise _validate.invalid(
                "num_micro_batches", self.num_micro_batches, "to be 1 with a private encoder"
            )

    @property
    def protects_labels(self) -> bool:
        """Whether epsilon covers the labels, too."""
        return self.label_epsilon is not None or self.labels_in_vector

    @property
    def releases_each_step(self) -> bool:
        """Whether steps release something; else all is released before the first one."""
        return self.variant != FROZEN or self.release == FRESH

    def step_event(self, noise_multiplier: float, sample_rate: float, steps: int) -> Event:
        """What ``steps`` optimizer steps release. Raises: ConfigError where they release
        nothing."""
        if self.variant == PUBLISHED:
            return PublishedForwardNoise(
                noise_multiplier, sample_rate, self.num_micro_batches, steps
            )
        if self.variant == PRIVATE_ENCODER:
            if self.record_noise_multiplier is None:
                raise ConfigError(
                    "This ForwardPlan has no noise for its rows yet; PrivacyPlan.create decides it."
                )
            one_draw = self.draws == SHARED
            return SumAndRows(
                noise_multiplier, self.record_noise_multiplier, sample_rate, steps, one_draw
            )
        if not self.releases_each_step:
            raise ConfigError(
                "The steps of this plan release nothing: each row was released before them."
            )
        return SampledRecordRelease(noise_multiplier, sample_rate, steps, self.num_micro_batches)

    def releases_before(self, noise_multiplier: float) -> tuple[Event, ...]:
        """What is released once, before the first step."""
        rows = () if self.releases_each_step else (RecordRelease(noise_multiplier, 1),)
        return (*rows, *self.label_release())

    def label_release(self) -> tuple[Event, ...]:
        """The randomised response of the labels, if there is one."""
        if self.label_epsilon is None or self.num_classes is None:
            return ()
        return (RandomizedResponse(self.label_epsilon, self.num_classes, 1),)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ForwardPlan:
        """Read back what :meth:`to_dict` wrote. Raises: ConfigError, InvalidArgumentError."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise ConfigError(
                f"The forward noise in the plan lacks or adds fields (expected {sorted(names)}): "
                "it was edited."
            )
        return cls(**values)
