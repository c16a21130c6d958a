"""Audits of whole runs that read shards: they tell no more of a row than the ledger says, and would
with steps, shards or rows that are read twice.

That a row is in two shards, and a step or a folder is read again, is also tested exactly, in
test_shards.py and test_reading.py.
"""

import os
import shutil

import numpy as np
import pytest
from coordinates import COUNT, DELTA, power, refutes, rows, trainer

from hf_dp.batches import when_drawn
from hf_dp.streams import reading
from hf_dp.streams.reading import Stream, load
from hf_dp.streams.shards import shard

pytestmark = pytest.mark.usefixtures("unchecked")

SIGMA, STEPS, LAST = 0.7, 16, 15
ONCE = [{(step,): 1 / STEPS for step in range(STEPS)}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Rows that are sharded by the same keys each time, for a test not to depend on chance."""
    monkeypatch.setattr(when_drawn, "FIRST", 8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", np.random.default_rng(1).bytes)
        return shard(rows(), tmp_path / "shards", expected_batch_size=COUNT / STEPS)


def run(out, folder, seen, dies=None, **options):
    return trainer(
        out, load(folder), seen, dies, sampling="random_allocation", max_steps=STEPS,
        expected_batch_size=COUNT / STEPS, noise_multiplier=SIGMA, look_over="when_drawn", **options,
    )  # fmt: skip


def claimed(made) -> float:
    return made.ledger.epsilon(DELTA, "pld").value


def killed_and_resumed(out, folder, forget=lambda: None):
    """What a run lets out that dies after its last step and goes on from its first checkpoint."""
    seen, saved = [], {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    with pytest.raises(KeyboardInterrupt):
        run(out, folder, seen, STEPS, **saved).train()
    forget()
    made = run(out, folder, seen)
    made.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    return seen, claimed(made)


def test_a_run_that_was_killed_and_resumed_is_not_refuted(folder, tmp_path):
    seen, claim = killed_and_resumed(tmp_path / "one", folder)
    assert len(seen) == STEPS and not refutes(seen, ONCE, SIGMA, claim)
    assert power([{(0, 1): 1.0}], SIGMA, claim) > 0.9 > 1e-3 > power(ONCE, SIGMA, claim)


def again_after_a_resume(out, folder, patch):
    """The run and the folder forget all steps after the checkpoint."""

    def forget():
        os.truncate(folder / "epoch-0" / reading.READ, 1)
        (out / reading.OF_RUN).unlink()

    return killed_and_resumed(out, folder, forget)


def in_four_runs(out, folder, patch):
    """Each names those before, and reads a copy of the folder."""
    seen, earlier = [], []
    for number in range(4):
        copy = shutil.copytree(folder, out / f"copy-{number}")
        made = run(out / f"run-{number}", copy, seen, earlier_runs=earlier)
        made.train()
        earlier = [str(made.args.output_dir)]
    return seen, claimed(made)


def in_two_shards(out, folder, patch):
    """Each step reads the rows of the one before, too."""
    honest, seen = Stream.rows_of, []

    def both(self, epoch, step):
        return [row for each in {max(0, step - 1), step} for row in honest(self, epoch, each)]

    patch.setattr(Stream, "rows_of", both)
    made = run(out, folder, seen)
    made.train()
    return seen, claimed(made)


PLANTED = {
    again_after_a_resume: [(0,), *((step, step + LAST) for step in range(1, STEPS))],
    in_four_runs: [tuple(range(step, 4 * STEPS, STEPS)) for step in range(STEPS)],
    in_two_shards: [*((step, step + 1) for step in range(LAST)), (LAST,)],
}
SLOW = {in_four_runs: pytest.mark.slow}  # test_reading.py has the exact test


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=SLOW.get(f, []), id=f.__name__) for f in PLANTED]
)
def test_planted_steps_that_are_read_twice_are_refuted(fault, folder, tmp_path, monkeypatch):
    seen, claim = fault(tmp_path / "run", folder, monkeypatch)
    ways = [dict.fromkeys(PLANTED[fault], 1 / STEPS)]
    assert power(ways, SIGMA, claim) > 0.9 and refutes(seen, ways, SIGMA, claim)
