"""One release: what the accountant is told, and the noise that makes it true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_dp._validate import one_of, positive
from hf_dp.accounting import RELEASE, SELECTION, TRAINING, Event
from hf_dp.errors import ConfigError

PURPOSES = (TRAINING, SELECTION, RELEASE)


@dataclass(frozen=True)
class PlannedRelease:
    """One event and the sensitivity of each part that it lets out.

    The noise is derived from the event itself, so what is drawn and what is accounted cannot
    differ.

    Args:
        event: what the ledger records.
        purpose: why, as the ledger names it: one of :data:`PURPOSES`.
        sensitivities: by part of the event (:data:`hf_dp.accounting.SUM`,
            :data:`hf_dp.accounting.VECTORS`, :data:`hf_dp.accounting.LOSS`), the largest L2
            distance by which one example can move what is noised, above 0.

    Raises: ConfigError when the parts are not those of the event; InvalidArgumentError.
    """

    event: Event
    purpose: str
    sensitivities: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("purpose", self.purpose, PURPOSES)
        if set(self.sensitivities) != set(self.event.noise_multipliers):
            raise ConfigError(
                f"Expected the sensitivities of {sorted(self.event.noise_multipliers)}, which "
                f"{type(self.event).__name__} releases, got those of {sorted(self.sensitivities)}. "
                "Plan one release for each event."
            )
        checked = {part: positive(part, value) for part, value in self.sensitivities.items()}
        object.__setattr__(self, "sensitivities", MappingProxyType(checked))

    def noise_std(self, part: str) -> float:
        """Return the standard deviation of the noise on a part: noise multiplier x sensitivity.

        Raises: ConfigError for a part that the event does not release.
        """
        if part not in self.sensitivities:
            raise ConfigError(
                f"Expected a part that {type(self.event).__name__} releases "
                f"({sorted(self.sensitivities)}), got {part!r}."
            )
        return self.event.noise_multipliers[part] * self.sensitivities[part]
