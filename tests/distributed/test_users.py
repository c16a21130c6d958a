"""Users in runs of several processes: each drawn user is one process's, clipped once."""

from __future__ import annotations

import functools
import tempfile

import pytest
import tiny
import torch
import users
from processes import results
from silence import PLAIN_STEPS, distance, plant_a_unit_that_all_processes_draw, silenced, weights

from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.evidence import disagreements, read

COUNT = len(set(users.owners()))


def trained(folder, **options):
    """The weights after steps that draw every user, without noise, in float64."""
    labeled = users.by_user().map(lambda row: {"label": 1})  # so that gradients do not cancel
    made = users.trainer(
        folder,
        given={"model": tiny.model().double(), "train_dataset": labeled},
        expected_batch_size=COUNT,
        max_steps=2,
        **PLAIN_STEPS,
        **options,
    )
    silenced(made).train()
    return weights(made)


@functools.cache
def alone():
    with tempfile.TemporaryDirectory() as folder:
        return trained(folder, per_device_train_batch_size=40)


def test_the_update_does_not_depend_on_the_processes(tmp_path):
    """Three processes take physical batches of 2 rows, so users of up to 7 rows come in parts."""
    found = results(3, lambda: trained(tmp_path / "t", per_device_train_batch_size=2))
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in found[0])
    assert distance(found[0], alone(), "bert") < 1e-9
    record = read(tmp_path / "t")
    assert record.plan.num_examples == COUNT and record.ledger.steps() == 2
    assert not disagreements(record)


def test_no_process_counts_a_run_of_other_users(tmp_path):
    """Every process refuses before it could wait for the others."""
    options = {"max_steps": 1, "accountant": "rdp"}
    users.trainer(tmp_path / "t", **options).train()
    who = users.owners()
    regrouped = [*who[1:], who[0]]  # as many users

    def start(values):
        earlier = [str(tmp_path / "t")]
        made = users.trainer(tmp_path / "u", values, earlier_runs=earlier, **options)
        made.train()
        return made.ledger.steps()

    def start_twice():
        with pytest.raises(InvalidArgumentError, match="grouped the rows as it does now"):
            start(regrouped)
        return start(who)

    assert results(2, start_twice) == [2, 2]


def test_planted_user_that_two_processes_draw_is_seen(tmp_path, monkeypatch):
    expected = alone()
    plant_a_unit_that_all_processes_draw(monkeypatch)
    found = results(2, lambda: trained(tmp_path / "two"))
    assert distance(found[0], expected, "bert") > 1e-3
