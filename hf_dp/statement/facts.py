"""What the ledger does not know about a run: what weakens its claim, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from hf_dp.errors import LedgerError
from hf_dp.statement.audited import AuditResult, as_fields, audit_of
from hf_dp.statement.weaknesses import Weaknesses


@dataclass(frozen=True)
class RunFacts(Weaknesses):
    """What weakens the claim (:class:`Weaknesses`), and how the run was made.

    Args:
        trained: which parameters were trained, in words and numbers.
        precision: that of gradient sums and noise, for example "float32".
        noise_generator, sampling_generator: their kind and how they were seeded, never a seed.
        versions: library -> version.
        audit: what an audit of the run found, if there was one.

    Raises: InvalidArgumentError.
    """

    trained: str
    precision: str
    noise_generator: str
    sampling_generator: str
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    audit: AuditResult | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "versions", dict(self.versions))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; without an audit, none is named."""
        values = super().to_dict()
        del values["audit"]
        return {**values, **as_fields(self.audit)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        if not isinstance(values, Mapping):
            raise LedgerError(f"{cls.__name__} cannot be read: expected a mapping.")
        return super().from_dict({**values, "audit": audit_of(values)})
