"""One gate: what leaves is noised with the planned standard deviation, after its event is durable,
and once for each event. Each property has the bug it guards against planted."""

import ast
import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scipy import stats

from hf_dp.accounting import (
    Gaussian,
    PoissonSampledGaussian,
    RecordRelease,
    SumAndRows,
    event_from_dict,
)
from hf_dp.errors import BudgetExceededError, ConfigError, InvalidArgumentError, LedgerError
from hf_dp.noise import SecretRandomness
from hf_dp.plans import DpSgdPlan, PlannedRelease, PrivacyPlan
from hf_dp.plans.selection import SelectionPlan
from hf_dp.run.gate import Gate, IndependentNoise, NothingReleased, Release
from hf_dp.run.ledger import RunLedger
from hf_dp.run.witnesses import read_run

PACKAGE = Path(__file__).parents[2] / "hf_dp"
PLAN = PrivacyPlan(1000, 100.0, 10, 1e-4, DpSgdPlan(0.5, 2.0))
REJECT = 1e-7


def gate_of(book: RunLedger, kind: type[Gate] = Gate) -> Gate:
    return kind(book, IndependentNoise(SecretRandomness()))


# -- the noise is that of the event --


def has_the_planned_noise(gate: Gate, planned: PlannedRelease, part: str = "sum") -> bool:
    """KS test of what the gate adds, against the event's noise multiplier x the sensitivity."""
    with gate.release(planned) as release:
        if part == "sum":
            noise = release.sum({"w": torch.zeros(20_000)})["w"]
        elif part == "loss":
            noise = release.beside("loss", torch.zeros(20_000, dtype=torch.float64))
        else:
            noise = release.vectors(torch.zeros(200, 100)).flatten()
    multiplier = planned.event.noise_multipliers[part]
    scaled = noise.double() / (multiplier * planned.sensitivities[part])
    return stats.kstest(scaled.numpy(), "norm").pvalue > REJECT


ROWS = PlannedRelease(SumAndRows(2.0, 5.0, 0.1, 1), "training", {"sum": 0.5, "vectors": 3.0})
WITH_A_LOSS = PlannedRelease(
    PoissonSampledGaussian(2.0, 0.1, 1, beside={"loss": 9.0}), "training", {"sum": 0.5, "loss": 3.0}
)
PLANNED = [
    (PLAN.step_release(), "sum"),
    (SelectionPlan("mgna", 0.1, 3, 0.1, 1, 3.0, 0.2).release(0.02), "sum"),
    (PlannedRelease(RecordRelease(0.7, 1), "release", {"vectors": 1.5}), "vectors"),
    *[(ROWS, part) for part in ("sum", "vectors")],
    *[(WITH_A_LOSS, part) for part in ("sum", "loss")],
]


@pytest.mark.parametrize(("planned", "part"), PLANNED)
def test_the_noise_is_the_events_multiplier_times_the_sensitivity(book, planned, part):
    assert has_the_planned_noise(gate_of(book), planned, part)


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_planted_wrong_standard_deviation_is_seen(book, monkeypatch, factor):
    original = PlannedRelease.noise_std
    monkeypatch.setattr(
        PlannedRelease, "noise_std", lambda self, part: factor * original(self, part)
    )
    assert not has_the_planned_noise(gate_of(book), PLAN.step_release())


def test_the_parts_are_those_of_the_event():
    with pytest.raises(ConfigError, match="sensitivities of ..sum.."):
        PlannedRelease(PoissonSampledGaussian(1.0, 0.1, 1), "training", {"vectors": 1.0})
    planned = PlannedRelease(RecordRelease(1.0, 1), "release", {"vectors": 1.0})
    with pytest.raises(ConfigError, match="part that RecordRelease releases"):
        planned.noise_std("sum")


# -- the ledger is durable before the value is there --


def is_durable_before_anything_is_out(gate: Gate, book: RunLedger) -> bool:
    """Whether the file on disk knows each release before its value can be asked for."""
    known = []
    for _ in range(3):
        with gate.release(PLAN.step_release()) as release:
            written = (book.folder / "ledger.jsonl").exists()
            before = read_run(book.folder).ledger.steps() if written else 0
            release.sum({"w": torch.zeros(3)})
            known.append(before)
    return known == [1, 2, 3]


class AppendsAfterwards(Gate):
    @contextmanager
    def release(self, planned):
        release = Release(planned, self._noise, self._ledger)
        yield release
        self._ledger.append(planned.event, planned.purpose)


class ForgetsTheSecond(Gate):
    count = 0

    @contextmanager
    def release(self, planned):
        self.count += 1
        if self.count != 2:
            self._ledger.append(planned.event, planned.purpose)
        yield Release(planned, self._noise, self._ledger)


def test_the_ledger_is_durable_before_the_value(book):
    assert is_durable_before_anything_is_out(gate_of(book), book)


@pytest.mark.parametrize("planted", [AppendsAfterwards, ForgetsTheSecond])
def test_planted_gates_that_record_late_or_not_at_all_are_seen(book, planted):
    assert not is_durable_before_anything_is_out(gate_of(book, planted), book)


def limited(steps: int) -> PrivacyPlan:
    given = {"num_examples": 1000, "expected_batch_size": 100, "clipping_norm": 1.0}
    return PrivacyPlan.create(**given, target_epsilon=1.0, accountant="rdp", max_steps=steps)


def test_nothing_is_recorded_and_nothing_leaves_beyond_the_target(tmp_path):
    plan = limited(2)
    book = RunLedger(tmp_path, plan)
    book.start(2)
    gate = gate_of(book)
    for _ in range(2):
        with gate.release(plan.step_release()) as release:
            release.sum({"w": torch.zeros(3)})
    with pytest.raises(BudgetExceededError), gate.release(plan.step_release()):
        pytest.fail("a release beyond the target")
    assert read_run(tmp_path).ledger.steps() == 2
    book.stop()


# -- one event, one sum --


LEAVE = {
    "sum": lambda release: release.sum({"w": torch.zeros(3)}),
    "loss": lambda release: release.beside("loss", torch.zeros(())),
    "vectors": lambda release: release.vectors(torch.zeros(2, 3)),
}


def test_what_the_event_does_not_release_cannot_leave(book):
    with gate_of(book).release(PLAN.step_release()) as release:
        for part in ("vectors", "loss"):
            with pytest.raises(ConfigError, match=f"got '{part}'"):
                LEAVE[part](release)


@pytest.mark.parametrize("planned", [planned for planned, _ in PLANNED])
def test_each_part_leaves_once_and_never_after_its_release(book, planned):
    gate, parts = gate_of(book), planned.sensitivities
    with gate.release(planned) as release:
        for part in parts:
            LEAVE[part](release)
        for part in parts:
            with pytest.raises(LedgerError, match="Record another release"):
                LEAVE[part](release)
    with gate.release(planned) as closed:
        pass
    for part in parts:
        for release in (closed, NothingReleased()):
            with pytest.raises(LedgerError, match="closed"):
                LEAVE[part](release)


@pytest.mark.parametrize("sensitivity", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sensitivity_that_hides_nothing_is_refused(sensitivity):
    with pytest.raises(InvalidArgumentError, match="sum"):
        PlannedRelease(PoissonSampledGaussian(1.0, 0.1, 1), "training", {"sum": sensitivity})


def test_what_is_planned_cannot_be_changed_after_it_was_recorded():
    given = {"sum": 1.0}
    planned = PlannedRelease(PoissonSampledGaussian(1.0, 0.1, 1), "training", given)
    given["sum"] = 1e-9
    assert planned.noise_std("sum") == 1.0
    with pytest.raises(TypeError):
        planned.sensitivities["sum"] = 1e-9  # type: ignore[index]


def test_a_purpose_that_is_not_the_runs_own_is_refused():
    with pytest.raises(InvalidArgumentError, match="purpose"):
        PlannedRelease(PoissonSampledGaussian(1.0, 0.1, 1), "earlier run", {"sum": 1.0})


def test_nothing_is_recorded_before_the_folder_is_taken(tmp_path):
    closed = RunLedger(tmp_path, PLAN)
    with pytest.raises(LedgerError, match="not been opened"):
        closed.append(PLAN.event(1), "training")
    closed.open()
    with pytest.raises(LedgerError, match="No step was planned"):
        closed.append(PLAN.event(1), "training")
    closed.stop()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_secret_randomness_cannot_be_copied():
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(SecretRandomness())


def test_releases_that_the_plan_does_not_make_count_against_the_target(tmp_path):
    """Whatever their purpose: the plan was calibrated without them."""
    plan = limited(8)
    for purpose in ("release", "training"):
        book = RunLedger(tmp_path / purpose, plan)
        book.start(8)
        other = PlannedRelease(Gaussian(20.0, 1), purpose, {"sum": 1.0})
        gate, taken = gate_of(book), []

        def steps(gate=gate, taken=taken):
            for _ in range(8):
                with gate.release(plan.step_release()):
                    taken.append(1)

        with gate.release(other):
            pass
        book.start(8)
        with pytest.raises(BudgetExceededError):
            steps()
        assert 0 < len(taken) < 8
        assert book.ledger.epsilon(plan.delta, plan.accountant).value <= 1.0
        with (
            pytest.raises(BudgetExceededError),
            gate.release(PlannedRelease(Gaussian(0.3, 1), purpose, {"sum": 1.0})),
        ):
            pytest.fail("a release beyond the target")
        book.stop()


# -- nothing else noises or records --

NOISE = {"gaussian_like", "standard_normal", "normal_", "randn_like", "laplace"}
MAY_NOISE = {
    "noise.py",  # the source itself
    "run/gate.py",
    "benchmarks/modes.py",  # times noise on synthetic rows
}
MAY_RECORD = {
    "accounting/ledger.py",  # the pure list of events
    "run/ledger.py",
    "run/gate.py",
    "run/ledger_file.py",  # what its lines say
}


def callers(package: Path) -> set[tuple[str, str]]:
    """(file, what) of each call that draws Gaussian noise, or appends (event, purpose)."""
    found = set()
    for path in package.rglob("*.py"):
        file = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in NOISE:  # called here or passed on
                found.add((file, "noise"))
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "Release":
                found.add((file, "release"))
            if not isinstance(node.func, ast.Attribute):
                continue
            # A list's append takes one argument.
            if node.func.attr == "append" and len(node.args) + len(node.keywords) == 2:
                found.add((file, "record"))
    return found


def test_only_the_gate_noises_and_records():
    found = callers(PACKAGE)
    assert {file for file, what in found if what == "noise"} == MAY_NOISE
    assert {file for file, what in found if what == "record"} == MAY_RECORD
    assert {file for file, what in found if what == "release"} == {"run/gate.py"}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(run, total):\n    total += run.randomness.gaussian_like(total, 1.0)", "noise"),
        ("def f(run):\n    return run.randomness.gaussian_like", "noise"),
        ("def f(run, event):\n    run.book.append(event, 'training')", "record"),
        ("def f(run, event):\n    run.book.append(event, purpose='training')", "record"),
        ("from hf_dp.run.gate import Release\nx = Release(None, None)", "release"),
    ],
)
def test_planted_other_callers_are_seen(tmp_path, source, what):
    (tmp_path / "elsewhere.py").write_text(source)
    assert callers(tmp_path) == {("elsewhere.py", what)}


def test_events_read_back_have_the_same_parts():
    for planned, _ in PLANNED:
        again = event_from_dict(planned.event.to_dict())
        assert again.noise_multipliers == planned.event.noise_multipliers
