"""dp-accounting's private fields: read in one module, and as they are named today."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from hf_dp.accounting import grid

FIELDS = ("_pmf_remove", "_pmf_add", "_symmetric", "_lower_loss", "_discretization", "_probs",
          "_infinity_mass", "_pessimistic_estimate", "_pld")  # fmt: skip
LOSS = google_pld.from_gaussian_mechanism(
    1.0, sampling_prob=0.1, value_discretization_interval=0.01
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_private_field_has_its_name(name):
    accountant = PLDAccountant().compose(GaussianDpEvent(1.0))
    owners = (LOSS, LOSS._pmf_remove.to_dense_pmf(), accountant)
    assert any(hasattr(owner, name) for owner in owners), f"dp-accounting has no {name} any more"


def test_no_other_module_reads_one():
    folder = Path(grid.__file__).parent
    pattern = re.compile(rf"\w\.({'|'.join(FIELDS)})\b")
    readers = {path.name for path in folder.glob("*.py") if pattern.search(path.read_text())}
    assert readers == {"grid.py"}


def test_they_mean_what_they_meant():
    removal = grid.on_grid(grid.directions(LOSS)[0])
    assert removal.interval == 0.01 and len(grid.directions(LOSS)) == 2
    assert removal.probabilities.sum() + removal.infinite == pytest.approx(1.0)
    for value in (0.1, 0.5):
        above = removal.losses > value
        hidden = removal.probabilities[above] @ -np.expm1(value - removal.losses[above])
        delta = LOSS._pmf_remove.get_delta_for_epsilon(value)
        assert hidden + removal.infinite == pytest.approx(delta, rel=1e-9)
