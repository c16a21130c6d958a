"""Whole runs of several processes: the same update, one ledger, one card.

The processes are forked from this one and meet over gloo, as torchrun would start them.
"""

import functools
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import silence
import tiny
import torch
from processes import Outcome, outcomes, results
from silence import MODELS, assert_standard_normal, distance, moved_by_noise, trained, weights
from torch.utils.data import ConcatDataset, Subset
from transformers import Trainer, TrainerCallback

from hf_dp.accounting import PoissonSampledGaussian
from hf_dp.distributed.processes import Processes
from hf_dp.errors import HfDpError
from hf_dp.noise import SecretRandomness
from hf_dp.plans.samplers import AllocationSampler
from hf_dp.run import checks, other_training
from hf_dp.run.ledger import RunLedger
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read

# What a fixture of the module trains is checked, so that processes check themselves in some runs.
pytestmark = pytest.mark.usefixtures("unchecked")

LOSS = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}


def assert_all_equal(found: list[dict[str, torch.Tensor]]) -> None:
    assert all(torch.equal(each[n], found[0][n]) for each in found for n in found[0])


# -- the update --

WAYS = {  # (processes, physical batch, other arguments)
    "two": (2, 8, {}),
    "three uneven": (3, 4, {}),
    "alone, one by one": (1, 1, {}),
    "by tokens": (2, 8, {"max_tokens_per_physical_batch": 20}),
    "checkpointing": (2, 8, {"gradient_checkpointing": True}),
}
QUICK = [
    ("bert", torch.float32, "three uneven"),
    ("gpt2", torch.float64, "two"),
    ("llama_lora", torch.float64, "two"),
]


def cases():
    for kind in MODELS:
        for dtype in (torch.float64, torch.float32):
            for way in WAYS:
                case = (kind, dtype, way)
                yield pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])


@functools.cache
def alone(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights that one process makes, of one physical batch a step."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), kind, dtype, per_device_train_batch_size=40)


@pytest.mark.parametrize(("kind", "dtype", "way"), cases())
def test_the_update_does_not_depend_on_the_processes(kind, dtype, way, tmp_path):
    count, size, options = WAYS[way]
    found = results(
        count, lambda: trained(tmp_path, kind, dtype, per_device_train_batch_size=size, **options)
    )
    assert_all_equal(found)
    near = 1e-9 if dtype == torch.float64 else 1e-4
    assert distance(found[0], alone(kind, dtype), kind) < near


def test_planted_example_that_two_processes_draw_is_seen(tmp_path, monkeypatch):
    expected = alone("bert", torch.float64)
    silence.plant_a_unit_that_all_processes_draw(monkeypatch)
    found = results(2, lambda: trained(tmp_path, "bert", torch.float64))
    assert distance(found[0], expected, "bert") > 1e-3


# -- the draws: test_shared_draws.py --


def test_a_process_without_examples_of_its_own_takes_part(tmp_path):
    # so few examples in a draw that most of a process's are empty
    def train():
        made = tiny.trainer(tmp_path, expected_batch_size=1, max_steps=3, accountant="rdp")
        made.train()
        return weights(made)

    assert_all_equal(results(2, train))
    assert read_run(tmp_path).ledger.steps() == 3


def test_an_allocation_is_recorded_once_by_all_processes(tmp_path, monkeypatch):
    drawn, honest = [], AllocationSampler.__iter__

    def watched(self):
        for batch in honest(self):
            drawn.append(batch)
            yield batch

    def train(folder: Path):
        made = tiny.trainer(folder, sampling="random_allocation", max_steps=6)
        made.train()
        return weights(made), drawn[:5]

    monkeypatch.setattr(AllocationSampler, "__iter__", watched)
    tiny.trainer(tmp_path / "plan", sampling="random_allocation", max_steps=6)  # known to all
    found = results(2, lambda: train(tmp_path))
    assert_all_equal([each for each, _ in found])
    together = [index for _, batches in found for batch in batches for index in batch]
    assert sorted(together) == list(range(40))
    record = read(tmp_path)
    assert record.ledger.steps() == 10
    assert not disagreements(record)


# -- what is released --


def test_the_noise_of_a_run_of_two_processes_is_that_of_one(tmp_path):
    first, second = results(2, lambda: moved_by_noise(tmp_path, steps=2))
    assert torch.equal(first, second)
    assert_standard_normal(first)


# -- one ledger, one card --


def checkpointing(folder: Path, **given: Any) -> Any:
    """A trainer that also noises the loss, and saves a checkpoint after two of its three steps."""
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "accountant": "rdp"}
    return tiny.trainer(folder, given=given, **options, **LOSS)


def watch_the_disk(made: Any) -> list[tuple[int, int]]:
    """Return a list that gets (steps on disk, steps whose gradient is being set) in each step."""
    found, honest, folder = [], made.mechanism.set_gradients, made.run.folder

    def watched(clipped, release):
        on_disk = read_run(folder).ledger.steps() if (folder / "ledger.jsonl").exists() else 0
        found.append((on_disk, len(found) + 1))
        honest(clipped, release)

    made.mechanism.set_gradients = watched
    return found


def losses_of(made: Any) -> list[float]:
    return [row["noised_loss"] for row in made.state.log_history if "noised_loss" in row]


def whole_run(folder: Path) -> tuple[Any, list[float], list[tuple[int, int]]]:
    """Train from weights of this process's own: the weights, the noised losses, and the disk."""
    made = checkpointing(folder, model=tiny.model(seed=int(os.environ.get("RANK", "0"))))
    on_disk = watch_the_disk(made)
    made.train()
    made.save_model()
    return weights(made), losses_of(made), on_disk


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The folder of a whole run of two processes, and what each of them saw."""
    folder = tmp_path_factory.mktemp("runs") / "pair"
    return folder, results(2, lambda: whole_run(folder))


def test_statement_and_folder_are_those_of_one_process(of_two, tmp_path):
    (two, _), one = of_two, tmp_path / "one"
    whole_run(one)
    assert names(two) == names(one)
    first, second = read(one), read(two)
    assert first.ledger.to_list() == second.ledger.to_list()
    assert first.plan == second.plan
    assert first.statement == second.statement
    assert disagreements(second) == []
    assert (one / "README.md").read_text() == (two / "README.md").read_text().replace("pair", "one")


def test_every_process_trains_the_same_weights_from_the_start(of_two):
    assert_all_equal([each for each, _, _ in of_two[1]])


def test_two_processes_log_the_same_noised_numbers(of_two):
    (_, first, _), (_, second, _) = of_two[1]
    assert first == second and len(set(first)) == 3
    record = read(of_two[0])
    assert record.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 3, beside={"loss": 2.0}),)


def test_the_ledger_is_durable_before_any_process_sets_a_gradient(of_two):
    for _, _, found in of_two[1]:
        assert len(found) == 3 and all(on_disk >= step for on_disk, step in found)


def test_planted_process_that_does_not_wait_for_the_ledger_is_seen(tmp_path, monkeypatch):
    looked = tmp_path / "looked"

    def hurried(self, act):
        while self.is_main and not looked.exists():
            time.sleep(0.01)
        return act()

    append = RunLedger.append

    def without_waiting(self, event, purpose):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Processes, "together", hurried)
            append(self, event, purpose)

    def train():
        made = tiny.trainer(tmp_path / "run", max_steps=2, accountant="rdp")
        honest = made.mechanism.set_gradients

        def having_looked(clipped, release):
            looked.touch()
            honest(clipped, release)

        made.mechanism.set_gradients = having_looked
        found = watch_the_disk(made)
        made.train()
        return found

    monkeypatch.setattr(RunLedger, "append", without_waiting)
    _, other = results(2, train)
    assert any(on_disk < step for on_disk, step in other)


def test_resume_in_one_process_alone_is_refused(of_two, tmp_path):
    shutil.copytree(of_two[0], tmp_path / "two")

    def go_on():
        resume = True if os.environ["RANK"] == "0" else None
        checkpointing(tmp_path / "two").train(resume_from_checkpoint=resume)

    for each in outcomes(2, go_on):
        assert "Ranks [1] of 2 disagree with rank 0" in each.message


def names(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if "rng_state" not in name}  # one for each process


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(before, after, tmp_path):
    """It makes the same weights, by the same clipping norms and scales, and logs the same sums of
    losses: there is no noise."""

    def train(name: str, resume: bool = False, stops: bool = False):
        options = {"save_strategy": "steps", "save_steps": 1, **LOSS}
        options |= {"clipping_quantile": 0.5, "gradient_scaling_beta": 0.7}
        made = silence.trainer(tmp_path / name, "bert", torch.float64, **options)
        if stops:
            made.add_callback(StopAfterOne())
        made.train(resume_from_checkpoint=resume or None)
        return weights(made), losses_of(made)

    whole, expected = train("whole")
    results(before, lambda: train("run", stops=True))
    found = results(after, lambda: train("run", resume=True))
    assert_all_equal([each for each, _ in found])
    assert distance(found[0][0], whole, "bert") < 1e-9
    assert len(expected) == 2 and expected[0] > 0
    for _, losses in found:
        assert losses == pytest.approx(expected, rel=1e-9)
    assert read_run(tmp_path / "run").ledger.steps() == 2


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_processes_whose_ledgers_differ_stop(tmp_path):
    def train():
        made = tiny.trainer(tmp_path, max_steps=4, accountant="rdp")
        honest = made.mechanism.set_gradients

        def meddle(clipped, release):
            honest(clipped, release)
            if made.run.processes.rank == 1:
                made.run.book.lines.run_id = "another run"
                for module in made.model.modules():  # which remembers the run
                    vars(module).pop(other_training._NOTE, None)

        made.mechanism.set_gradients = meddle
        made.train()

    for each in outcomes(2, train):
        assert each.error == "DistributedError", each.trace
        assert "Ranks [1] of 2 disagree with rank 0" in each.message
    assert read_run(tmp_path).ledger.steps() == 1


# -- what is refused at the start --


class Shuffled(torch.utils.data.Dataset):
    """Rows in an order of their own, which differ on each reading."""

    def __init__(self):
        self.order = torch.randperm(40, generator=torch.Generator().manual_seed(os.getpid()))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = [2, *torch.randint(4, 19, (3,)).tolist(), 3]
        return {"input_ids": ids, "attention_mask": [1] * 5, "label": int(self.order[index]) % 2}


def start(folder: Path, source: Any = None, code: str = "", **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if code:
            patch.setattr(checks, "_digest_of_code", lambda: code)
        made = tiny.trainer(folder, accountant="rdp", **options)
        made.run.randomness = source or made.run.randomness
        made.train()


ROWS = {0: tiny.dataset(), 1: tiny.dataset().select([1, 0, *range(2, 40)])}
SOURCES = {"seed": SecretRandomness(5), "copy": SecretRandomness()}
SAME = "Ranks 0 and 1 have the same source of random numbers"
STARTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "arguments": (lambda rank: {"learning_rate": 1e-2 * (rank + 1)}, "^Distri.* differ in the argument `learning_rate`"),
    "plan": (lambda rank: {"noise_multiplier": 1.0 + rank}, "^Distri.* differ in the privacy plan's `(mechanism|noise_m)"),
    "data": (lambda rank: {"given": {"train_dataset": ROWS[rank]}}, "^Distri.* differ in the rows of train_dataset"),
    "size": (lambda rank: {"given": {"train_dataset": tiny.dataset(40 + rank)}}, "^Distri.* differ in .*num_examples"),
    "model": (lambda rank: {"given": {"model": tiny.model(num_labels=2 + rank)}}, "^Distri.* differ in the parameters of the m"),
    "code": (lambda rank: {"code": f"of rank {rank}"}, "differ in the code of hf_dp"),
    "one seed": (lambda _: {"source": SOURCES["seed"]}, SAME),
    "one source": (lambda _: {"source": SOURCES["copy"]}, SAME),
    "a norm of the whole sum": (lambda _: {"release": ["clipped_gradient_norm"]}, "without 'clipped_gradient_norm' with 2 proc"),
    "other rows each time": (lambda _: {"given": {"train_dataset": Shuffled()}}, "^DataError.* differ each time they are read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """The folder of starts that two processes make one after the other, and the errors, by rank."""
    folder = tmp_path_factory.mktemp("starts")

    def error_of(name: str) -> str:
        with pytest.raises(HfDpError) as error:
            start(folder / name, **STARTS[name][0](int(os.environ["RANK"])))
        return f"{type(error.value).__name__}: {error.value}"

    return folder, results(2, lambda: {name: error_of(name) for name in STARTS})


@pytest.mark.parametrize("name", STARTS)
def test_processes_that_may_not_start_together_are_refused(name, refused):
    folder, found = refused
    for each in found:
        assert re.search(STARTS[name][1], each[name]), each[name]
    assert not (folder / name / "ledger.jsonl").exists()


def test_a_fork_cannot_draw_the_same_noise():
    source = SecretRandomness()
    (found,) = outcomes(1, lambda: source.gaussian_like(torch.zeros(3), 1.0))
    assert found.error == "LedgerError" and "was forked" in found.message


def test_the_order_inside_joined_parts_is_compared():
    rows = [{"text": str(number)} for number in range(40)]
    halves = ConcatDataset([rows[:20], rows[20:]])
    orders = [list(range(40)), list(range(39, -1, -1))]
    mixed = [ConcatDataset([Subset(halves, order)]) for order in orders]
    assert checks.digest_of_rows(mixed[0]) != checks.digest_of_rows(mixed[1])


# -- what goes wrong later --


def failing_in_step(folder: Path, step: int, fail, resume: bool = False, **options) -> None:
    """Train; ``fail()`` is called in rank 1's loss of this step."""

    class Failing(tiny.DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            if self.state.global_step == step and self.is_in_train and self.args.process_index == 1:
                fail()
            return super().compute_per_example_loss(model, inputs)

    options = {"save_strategy": "steps", "save_steps": 1, "accountant": "rdp", **options}
    made = tiny.trainer(folder, cls=Failing, expected_batch_size=20, max_steps=2, **options)
    made.train(resume_from_checkpoint=resume or None)


def odd_row(*_: object) -> None:
    raise ValueError("odd row")


def too_large(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def failing_when_it_fetches(folder: Path) -> None:
    stock = Trainer.get_batch_samples

    def fetch(made, *args):
        fails = made.state.global_step == 1 and made.args.process_index == 1
        return (odd_row if fails else stock)(made, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "get_batch_samples", fetch)
        failing_in_step(folder, 9, odd_row, save_strategy="no")


FAILURES: dict[str, Callable[[Path], None]] = {
    "in its loss": lambda folder: failing_in_step(folder, 1, odd_row, save_strategy="no"),
    "when it fetches rows": failing_when_it_fetches,
    "out of memory": lambda folder: failing_in_step(folder, 1, too_large),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The folder of runs that fail in rank 1, one after the other, and the errors, by rank."""
    folder = tmp_path_factory.mktemp("failed")

    def error_of(name: str) -> tuple[str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrivateRun, "check_engine", lambda self: None)
            with pytest.raises(HfDpError) as error:
                FAILURES[name](folder / name)
        return type(error.value).__name__, str(error.value)

    return folder, results(2, lambda: {name: error_of(name) for name in FAILURES})


@pytest.mark.parametrize("where", ["in its loss", "when it fetches rows"])
def test_what_ran_is_saved_by_all_if_one_fails(where, failed):
    folder, (main, other) = failed
    assert (main[where][0], other[where][0]) == ("DistributedError", "StepError")
    for _, message in (main[where], other[where]):
        assert "odd row" in message and "1 steps ran before it" in message
        assert f"Their weights are in {folder / where / 'checkpoint-1'}" in message
    assert read_run(folder / where).ledger.steps() == 1


def test_a_process_out_of_memory_stops_all_before_the_step_is_released(failed):
    folder, (main, other) = failed
    assert other["out of memory"][0] == "MemoryShortError"
    error, message = main["out of memory"]
    assert error == "DistributedError"
    assert "Rank 1 of 2 failed" in message and "tried to allocate 3 GiB" in message
    assert read_run(folder / "out of memory").ledger.steps() == 1


def test_a_killed_process_stops_all_before_the_step_is_released(tmp_path):
    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    main, other = outcomes(2, lambda: failing_in_step(tmp_path, 1, killed))
    assert other == Outcome(error="Killed", trace="the process was killed", exit=9)
    assert main.error == "DistributedError" and "Another process" in main.message
    assert read_run(tmp_path).ledger.steps() == 1
    results(2, lambda: failing_in_step(tmp_path, 9, None, resume=True))
    assert read_run(tmp_path).ledger.steps() == 2
