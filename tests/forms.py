"""Forcing the form in which the engine holds per-example gradients."""

import pytest

from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.forms import Weight

# Whether a gradient is made explicit as soon as it is seen, and whether after the backward pass.
FORMS = {
    "factors": (False, False),
    "explicit as seen": (True, False),
    "explicit at the end": (False, True),
}


def force(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every weight have gradients of this form, whatever it costs."""
    as_seen, at_the_end = FORMS[form]
    monkeypatch.setattr(Weight, "smaller", as_seen)
    monkeypatch.setattr(Weight, "saved", 1.0 if at_the_end else -1.0)
    monkeypatch.setattr(ClippedSum, "spare", lambda self, activations: float("inf"))
