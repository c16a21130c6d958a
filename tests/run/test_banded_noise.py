"""What banded noise is when it leaves the gate: its covariance, its blocks, its units, its draws.
Each property has the bug it guards against planted."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from banded import BANDS, COLUMN, LIMIT, covariance, is_banded, matrix, power
from processes import on_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from users import flat

from hf_dp.accounting import Ledger
from hf_dp.accounting.events import BandedGaussian, PoissonSampledGaussian
from hf_dp.distributed.processes import Processes, add_up_with_noise
from hf_dp.errors import BudgetExceededError, ConfigError, LedgerError
from hf_dp.noise import SecretRandomness
from hf_dp.plans import PlannedRelease, PrivacyPlan
from hf_dp.plans.bands import square_root_column
from hf_dp.run.banded_noise import BandedNoise, _Row
from hf_dp.run.budget import Budget
from hf_dp.run.gate import Gate, IndependentNoise
from hf_dp.run.ledger import RunLedger

STEPS, SIZE = 7, 40_000
PLAN = PrivacyPlan.create(
    num_examples=1000, expected_batch_size=100, clipping_norm=0.5, noise_multiplier=2.0,
    max_steps=20, bands=BANDS, noised_loss_bound=3.0, noised_loss_budget_ratio=0.1,
)  # fmt: skip
STD = PLAN.noise_std


def gate_of(book: RunLedger, column=COLUMN) -> Gate:
    return Gate(book, BandedNoise(SecretRandomness(), column))


def zeros() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(SIZE // 2, 1), "v": torch.zeros(SIZE // 2)}


def step(made: Gate, book: RunLedger, planned: PlannedRelease | None = None) -> np.ndarray:
    """The noise of one step on sums of zeros, (SIZE,)."""
    with made.release(planned or PLAN.step_release(), book.steps_made) as release:
        return flat(release.sum(zeros())).numpy()


def released(made: Gate, book: RunLedger, steps: int = STEPS) -> np.ndarray:
    return np.stack([step(made, book) for _ in range(steps)]) / STD


# -- the covariance --


def test_the_covariance_is_that_of_the_inverse(book):
    assert is_banded(released(gate_of(book), book), [STEPS])
    assert book.ledger.events == (PLAN.event(STEPS),)


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_planted_other_covariances_are_seen(book, factor):
    """Independent noise; a first column that is a little another; a wrong standard deviation."""
    column, other = (*COLUMN[:2], COLUMN[2] - 0.05), np.eye(STEPS)
    inverse = np.linalg.inv(matrix(column, STEPS))
    for planted in (other, factor**2 * covariance([STEPS]), inverse @ inverse.T):
        assert power(planted, [STEPS], SIZE) > 1 - 1e-6
    assert not is_banded(released(gate_of(book, column), book), [STEPS])
    independent = Gate(book, IndependentNoise(SecretRandomness()))
    assert not is_banded(released(independent, book), [STEPS])
    assert not is_banded(factor * released(gate_of(book), book), [STEPS])


def test_columns_above_norm_one_are_refused_and_what_is_kept_is_not_copied():
    for column in ([1.0, 1e-3], [0.9, 0.5], [0.0, 1.0], [-0.5, 0.5]):
        with pytest.raises(ConfigError, match="norm of at most 1"):
            BandedNoise(SecretRandomness(), column)
    for width in range(2, 200):
        kept = BandedNoise(SecretRandomness(), square_root_column(width))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor saved"):
            copied(kept)


def test_the_noised_loss_and_other_releases_have_independent_noise(book):
    """Neither takes part in a row, nor ends a block. What is told of a row's noise is its own."""
    made, losses, sums, others = gate_of(book), [], [], []
    other = PlannedRelease(PoissonSampledGaussian(2.0, 0.1, 1), "selection", {"sum": 3.0})
    for row in np.linalg.norm(np.linalg.inv(matrix(COLUMN, STEPS)), axis=1):
        with made.release(PLAN.step_release(), book.steps_made) as release:
            assert release.noise_std("sum") == pytest.approx(STD * row)
            loss = release.beside("loss", torch.zeros(SIZE, dtype=torch.float64))
            losses.append(loss / release.noise_std("loss"))
            sums.append(release.sum({"w": torch.zeros(SIZE)})["w"].double() / STD)
        with made.release(other) as release:
            others.append(release.sum({"w": torch.zeros(SIZE)})["w"].double() / 6.0)
    assert is_banded(torch.stack(sums).numpy(), [STEPS])
    for independent in map(torch.stack, (losses, others)):
        found = independent.numpy()
        assert np.abs(found @ found.T / SIZE - np.eye(STEPS)).max() < LIMIT * math.sqrt(2 / SIZE)


# -- in units of the mechanism --


def of_falling_norms(made: Gate, book: RunLedger) -> np.ndarray:
    """Noise divided by its step's standard deviation, where the clipping norm falls."""
    found = []
    for number in range(STEPS):
        planned = PLAN.step_release()
        norms = {**planned.sensitivities, "sum": planned.sensitivities["sum"] * 0.8**number}
        falling = PlannedRelease(planned.event, planned.purpose, norms)
        found.append(step(made, book, falling) / falling.noise_std("sum"))
    return np.stack(found)


def test_a_norm_that_changes_leaves_the_covariance_in_its_units(book, monkeypatch):
    assert is_banded(of_falling_norms(gate_of(book), book), [STEPS])

    def raw(self, values, part, std):  # planted: z times C_t before C^-1
        noise = IndependentNoise.like(self, values, part, std)
        for weight, row in zip(COLUMN[1:], self.before, strict=False):
            noise.add_(row.drawn[len(self.drawn)], alpha=-weight)
        self.drawn.append(noise.div_(COLUMN[0]))
        return self.drawn[-1]

    monkeypatch.setattr(_Row, "like", raw)
    assert not is_banded(of_falling_norms(gate_of(book), book), [STEPS])


# -- blocks --


def unused(made: Gate, book: RunLedger, within=lambda release: None) -> None:
    with made.release(PLAN.step_release(), book.steps_made) as release:
        within(release)


def raised(made: Gate, book: RunLedger) -> None:
    """A step that fails after its line is in the ledger."""
    with pytest.raises(ZeroDivisionError):
        unused(made, book, lambda release: 1 / 0)


def raised_after(made: Gate, book: RunLedger) -> None:
    """The same, after its sum is out."""
    with pytest.raises(ZeroDivisionError):
        unused(made, book, lambda release: (release.sum(zeros()), 1 / 0))


def recorded_elsewhere(made: Gate, book: RunLedger) -> None:
    book.append(PLAN.event(1), "training")


def forgotten(made: Gate, book: RunLedger) -> None:
    """The ledger's line fails: nobody knows whether it is on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book, "append", lambda event, purpose: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            unused(made, book)


def around(book: RunLedger, breaks) -> np.ndarray:
    """The noise of four steps before it and three after it, (7, SIZE)."""
    made = gate_of(book)
    first = released(made, book, 4)
    breaks(made, book)
    return np.concatenate([first, released(made, book, 3)])


@pytest.mark.parametrize("breaks", [unused, raised, raised_after, recorded_elsewhere, forgotten])
def test_a_block_ends_where_a_recorded_step_was_not_its_next_row(book, breaks):
    noise = around(book, breaks)
    assert is_banded(noise, (4, 3)) and not is_banded(noise, (7,))


@pytest.mark.parametrize("breaks", [unused, recorded_elsewhere])
def test_planted_blocks_that_go_on_are_seen(book, monkeypatch, breaks):
    def end(self):
        self.block.rows = [self, *self.block.rows][: BANDS - 1] if self.drawn else self.block.rows

    monkeypatch.setattr(BandedNoise, "of", lambda self, planned, n: _Row(self, n, self.rows))
    monkeypatch.setattr(_Row, "end", end)
    assert not is_banded(around(book, breaks), (4, 3))


def test_other_shapes_than_before_end_the_block_and_the_step(book):
    made = gate_of(book)
    step(made, book)
    for sums in ({"w": torch.zeros(3)}, {"w": torch.zeros(SIZE)[:, None], "v": torch.zeros(5)}):
        with pytest.raises(LedgerError, match="what trains has changed"):
            with made.release(PLAN.step_release(), book.steps_made) as release:
                release.sum(sums)
        step(made, book)


# -- draws --


@pytest.mark.parametrize("drawn_for", [None, 0, 2, 1 + BANDS])
def test_what_was_drawn_for_another_step_is_not_released_nor_recorded(book, drawn_for):
    made = gate_of(book)
    step(made, book)
    with pytest.raises(LedgerError, match="drawn for step 1, the next in the ledger"):
        with made.release(PLAN.step_release(), drawn_for):
            pytest.fail("a release of another class")
    assert book.steps_made == 1
    foreign = PlannedRelease(BandedGaussian(1.0, 0.1, 1, 2), "training", {"sum": 1.0})
    with pytest.raises(ConfigError, match="event of 3 bands"), made.release(foreign, 1):
        pytest.fail("an event of other bands")


GIVEN = {"num_examples": 1000, "expected_batch_size": 100, "clipping_norm": 0.5, "max_steps": 20}
OTHER = PoissonSampledGaussian(50.0, 0.01, 1), "other"


# With the noise that 20 steps need, rounded up.
@pytest.mark.parametrize(
    ("sigma", "own"),
    [(0.891, {}), (0.917, {"max_batch_size": 130}), (0.805, {"sampling": "random_allocation"})],
)
def test_the_budget_of_steps_that_add_up_does_not_depend_on_releases_between_them(sigma, own):
    plan, allowed = PrivacyPlan.create(**GIVEN, noise_multiplier=sigma, **own), []
    plan = dataclasses.replace(plan, target_epsilon=3.0)
    steps = [(plan.event(10), "training"), (plan.event(20), "training")]
    for entries in ([steps[0], OTHER, steps[1], OTHER], [OTHER, OTHER, *steps]):
        ledger = Ledger()
        list(itertools.starmap(ledger.append, entries))
        allowed.append(Budget(plan, ledger).allowed_steps(20))
    assert allowed[0] == allowed[1] >= 20


def test_releases_between_steps_leave_the_target_whole(tmp_path):
    """Each begins a new entry of the ledger, and so a new turn of the classes: with one between any
    two steps, a step costs what two would."""
    plan = PrivacyPlan.create(**GIVEN, target_epsilon=3.0, accountant="rdp", bands=2)
    book = RunLedger(tmp_path / "run", plan)
    book.start(20)
    with pytest.raises(BudgetExceededError):
        list(itertools.starmap(book.append, [(plan.event(1), "training"), OTHER] * 20))
    book.stop()
    assert 2.5 < book.ledger.epsilon(plan.delta, "rdp").value <= 3
    assert 8 <= book.ledger.steps("training") <= 10


# -- several processes --


def noised(count: int, sharded: bool) -> np.ndarray:
    """The noise of STEPS steps on every process's sums, which are zero; whole, (T, n)."""
    here, found = Processes.here(), []
    kept = BandedNoise(SecretRandomness(), COLUMN)
    planned = PlannedRelease(BandedGaussian(1.0, 0.1, 1, BANDS), "training", {"sum": 1.0})
    for number in range(STEPS):
        sums = [torch.zeros(101, 97), torch.zeros(30_203)]
        if sharded:  # over two processes, and copies of it on two others
            mesh = init_device_mesh("cpu", (2, count // 2))
            sums = [DTensor.from_local(torch.zeros(20_000), mesh, [Replicate(), Shard(0)])]
        row = kept.of(planned, number)
        add_up_with_noise(sums, lambda total, row=row: row.like(total, "sum", 1.0), here)
        row.end()
        whole = [each.full_tensor() if sharded else each.flatten() for each in sums]
        found.append(torch.cat(whole).double().numpy())
    return np.stack(found)


@pytest.mark.parametrize(("count", "sharded"), [(3, False), (4, True)])
def test_several_processes_add_one_noise_of_this_covariance(count, sharded):
    each = on_processes(count, noised, count, sharded)
    assert all((other == each[0]).all() for other in each) and is_banded(each[0], [STEPS])
