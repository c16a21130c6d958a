"""What the ledger does not know about a run: what weakens its claim, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_dp.statement.weaknesses import Weaknesses


@dataclass(frozen=True)
class RunFacts(Weaknesses):
    """What weakens the claim (:class:`Weaknesses`), and how the run was made.

    Args:
        trained: which parameters were trained, in words and numbers.
        precision: that of gradient sums and noise, for example "float32".
        noise_generator, sampling_generator: their kind and how they were seeded, never a seed.
        versions: library -> version.

    Raises: InvalidArgumentError.
    """

    trained: str
    precision: str
    noise_generator: str
    sampling_generator: str
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "versions", dict(self.versions))
