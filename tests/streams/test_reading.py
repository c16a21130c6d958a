"""A run that reads shards states the epsilon of a run in memory, and reads each step once."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import silence
import tiny
from processes import results
from watch import watch

from hf_dp import PrivacyPlan, PrivateRun, mechanism_for
from hf_dp.accounting import (
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.batches.loader import PhysicalBatches
from hf_dp.errors import DataError, HfDpError, LedgerError, UnsupportedArgumentError
from hf_dp.plans import DpSgdPlan, RandomAllocation
from hf_dp.plans.samplers import AllocationSampler, PoissonSampler
from hf_dp.run.options import RunOptions
from hf_dp.streams import reading
from hf_dp.streams.reading import Reading, StreamSampler, load, sampler_of
from hf_dp.streams.shards import shard
from hf_dp.tuners.methods import FrostConfig, ParamConfig

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS, STEPS, EPOCHS = 40, 4, 2
OPTIONS = {
    "sampling": "random_allocation", "expected_batch_size": ROWS / STEPS, "max_steps": STEPS * EPOCHS,
    "look_over": "when_drawn", "longest_row": 9, "save_strategy": "steps", "save_steps": 3,
    "report_to": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "shards"
    return shard(
        tiny.dataset(ROWS), folder, expected_batch_size=ROWS / STEPS, num_train_epochs=EPOCHS
    )


@pytest.fixture
def folder(shards, tmp_path):
    """A folder of shards that no run has read."""
    return Path(shutil.copytree(shards, tmp_path / "shards"))


def book(folder, run_id="one", steps=STEPS):
    """The ledger of a run that holds so many steps."""
    ledger = SimpleNamespace(steps=lambda purpose: steps)
    return SimpleNamespace(folder=folder, run_id=run_id, ledger=ledger)


def trainer(out, folder, callbacks=(), **options):
    given = {"train_dataset": load(folder), "callbacks": [*callbacks]}
    return tiny.trainer(out, given=given, **{**OPTIONS, **options})


def noted(patch) -> list[tuple[int, int]]:
    """The steps that are recorded, and, of each that is read, that it was recorded before."""
    steps: list[tuple[int, int]] = []
    watch(patch, Reading, "record", lambda _, self, epoch, step: (epoch, step), notes=steps)
    return steps


EVERY = [(epoch, step) for epoch in range(EPOCHS) for step in range(STEPS)]


def test_it_states_what_a_run_in_memory_states_and_reads_each_row_once_an_epoch(
    folder, tmp_path, monkeypatch
):
    steps, seen = noted(monkeypatch), []
    watch(
        monkeypatch, PhysicalBatches, "__call__", notes=seen,
        before=lambda _, drawn: [(tuple(d.unit["input_ids"][0].tolist()), bool(d.missing)) for d in drawn],
    )  # fmt: skip
    made = tiny.trained(trainer(tmp_path / "run", folder))
    memory = {**OPTIONS, "look_over": "all", "longest_row": None}
    beside = tiny.trained(tiny.trainer(tmp_path / "memory", **memory))
    assert made.ledger.events == beside.ledger.events == (
        RandomAllocationGaussian(1.0, STEPS, STEPS * EPOCHS),
    )  # fmt: skip
    assert made.epsilon() == beside.epsilon()
    assert made.privacy_plan == beside.privacy_plan
    assert steps == EVERY and made.state.global_step == len(EVERY)
    rows = sorted(tuple(each) for each in tiny.dataset(ROWS)["input_ids"])
    for epoch in range(EPOCHS):
        drawn = [row for step in seen[epoch * STEPS :][:STEPS] for row in step]
        assert sorted(ids for ids, _ in drawn) == rows and not any(bad for _, bad in drawn)
    made.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "BLAKE2b, keyed with 256 bits" in (tmp_path / "run" / "privacy.json").read_text()
    assert "not compared" in card or "could not be compared" in card
    assert load(folder).plan.id not in card


class Dies(tiny.TrainerCallback):
    """Ends the process after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def died_and_resumed(out, folder, patch, at=5, checkpoint=3, **options):
    """A run that dies after a step and goes on from an older checkpoint; which steps it read."""
    steps = noted(patch)
    with pytest.raises(KeyboardInterrupt):
        trainer(out, folder, [Dies(at)], **options).train()
    assert len(steps) == at
    again = tiny.resumed(trainer(out, folder, **options), checkpoint)
    return again, steps


@pytest.mark.parametrize(
    ("at", "target"),
    [(5, None), (4, None), pytest.param(5, 8.0, marks=pytest.mark.slow)],  # calibrates for seconds
)
def test_a_resume_goes_on_after_the_last_recorded_step(at, target, folder, tmp_path, monkeypatch):
    """From checkpoint 3: what was recorded since is lost, and is neither read nor paid again.
    (test_audit.py plants a step that is read again.)"""
    options = {} if target is None else {"target_epsilon": target, "noise_multiplier": None}
    made, steps = died_and_resumed(tmp_path / "run", folder, monkeypatch, at, **options)
    assert steps == EVERY and made.state.global_step == 3 + len(EVERY) - at
    sigma = made.privacy_plan.noise_multiplier
    assert made.ledger.events == (RandomAllocationGaussian(sigma, STEPS, STEPS * EPOCHS),)
    assert made.ledger.steps() == len(EVERY)


@pytest.mark.parametrize("cap", [None, 11])
def test_poisson_draws_are_read_once_each_and_paid_for_one_by_one(cap, tmp_path, monkeypatch):
    """Killed after 5 steps, resumed from checkpoint 3: the steps that are left are 3 of 8."""
    options = {"sampling": "poisson", "max_logical_batch_size": cap}
    given = {"expected_batch_size": ROWS / STEPS, "num_train_epochs": EPOCHS, "sampling": "poisson"}
    folder = shard(tiny.dataset(ROWS), tmp_path / "shards", **given)
    sizes = watch(monkeypatch, PoissonSampler, "cut", lambda drawn, *_: len(drawn))
    made, steps = died_and_resumed(tmp_path / "run", folder, monkeypatch, **options)
    event, said = PoissonSampledGaussian(1.0, 1 / STEPS, 8), "with Poisson sampling"
    if cap is not None:
        event = TruncatedPoissonSampledGaussian(1.0, 1 / STEPS, 8, ROWS, cap)
        said = "with truncated Poisson sampling"
    statement = made.privacy_statement()
    assert said in statement.sentence()
    assert statement.epsilon == epsilon(event, 1 / 80).rounded_up(3)
    assert steps == [(0, step) for step in range(8)] and made.state.global_step == 6
    assert made.ledger.events == (event,) and len(sizes) == 8 and max(sizes) <= (cap or ROWS)
    for other, said in {
        "random_allocation": "'poisson' for a stream",
        "poisson": "to be 10 for",
    }.items():
        with pytest.raises(HfDpError, match=said):
            trainer(tmp_path / "other", folder, sampling=other, expected_batch_size=8).train()


def test_workers_that_fetch_ahead_lose_no_poisson_draw(tmp_path):
    given = {"expected_batch_size": ROWS / STEPS, "num_train_epochs": EPOCHS, "sampling": "poisson"}
    folder = shard(tiny.dataset(ROWS), tmp_path / "shards", **given)
    made = tiny.trained(
        trainer(tmp_path / "run", folder, sampling="poisson", dataloader_num_workers=1)
    )
    assert made.state.global_step == made.ledger.steps() == STEPS * EPOCHS


def test_a_folder_that_went_back_is_not_read_again(folder, tmp_path, monkeypatch):
    """The run knows what it read, too, and its ledger what was paid."""
    steps = noted(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", folder, [Dies(5)]).train()
    os.truncate(folder / "epoch-1" / reading.READ, 0)
    tiny.resumed(trainer(tmp_path / "run", folder), 3)
    assert steps == EVERY
    stream = load(folder)
    known = Reading(stream, book(tmp_path / "run", stream.reader))
    with pytest.raises(LedgerError, match="has begun 2 epochs .*, 8 steps, but its ledger holds 4"):
        _ = known.paid


def test_an_epoch_that_a_kill_left_paid_and_unread_is_paid_again(folder, tmp_path, monkeypatch):
    honest, died = Reading.record, []

    def dies(self, epoch, step):
        if epoch == 1 and not died:
            died.append(step)
            raise KeyboardInterrupt
        honest(self, epoch, step)

    monkeypatch.setattr(Reading, "record", dies)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", folder).train()
    again = tiny.resumed(trainer(tmp_path / "run", folder), 3)
    assert again.ledger.steps() == len(EVERY) + STEPS and again.state.global_step == 3 + STEPS


def in_memory_and_then_as_a_stream(out, folder):
    """Five steps are left for a run that dies after its first epoch; of two, the stream's."""
    memory = {**OPTIONS, "look_over": "all", "longest_row": None}
    with pytest.raises(KeyboardInterrupt):
        tiny.trainer(out, given={"callbacks": [Dies(STEPS)]}, **memory).train()
    return tiny.resumed(trainer(out, folder), 3).ledger.steps()


def test_what_the_ledger_holds_of_other_draws_pays_for_no_epoch(folder, tmp_path):
    assert in_memory_and_then_as_a_stream(tmp_path / "run", folder) == 3 * STEPS


def test_planted_payment_of_other_draws_is_seen(folder, tmp_path, monkeypatch):
    """Planted: what is in the ledger and was not read counts as paid."""
    read = lambda self: sum(map(self.made, range(EPOCHS)))  # noqa: E731
    monkeypatch.setattr(Reading, "paid", property(lambda self: self._in_ledger - read(self)))
    assert in_memory_and_then_as_a_stream(tmp_path / "run", folder) < 3 * STEPS


def test_shards_that_a_run_has_begun_are_refused_by_another(folder, tmp_path):
    tiny.trained(trainer(tmp_path / "one", folder, max_steps=STEPS))
    run_id = load(folder).reader
    other = trainer(tmp_path / "two", folder)
    with pytest.raises(LedgerError, match=f"were begun by the run {run_id[:8]}, but this is the"):
        other.train()
    assert other.ledger.steps() == 0


def test_planted_second_run_on_the_same_shards_is_seen(folder, tmp_path, monkeypatch):
    tiny.trained(trainer(tmp_path / "one", folder, max_steps=STEPS))
    monkeypatch.setattr(Reading, "check", lambda self: None)
    with pytest.raises(LedgerError, match="has begun 1 epochs .*, 4 steps, but its ledger holds 0"):
        trainer(tmp_path / "two", folder).train()  # which the test above does not take for it


def test_of_two_runs_that_begin_at_once_one_is_refused(folder, tmp_path, monkeypatch):
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append(Reading(load(folder), book(tmp_path / name, name)))
    runs[0].check()
    runs[1].record(0, 0)  # between the other's look and its claim
    with pytest.raises(LedgerError, match="were begun by the run two, but this is the run one"):
        runs[0]._claim()
    with pytest.raises(LedgerError, match="Expected step 1 of epoch 0, got 3"):
        runs[1].record(0, 3)


def test_a_poisson_draw_that_was_recorded_and_not_released_is_not_paid_for(tmp_path):
    """Of 8 steps 3 were recorded, and 2 of these released."""
    given = {"expected_batch_size": ROWS / STEPS, "num_train_epochs": EPOCHS, "sampling": "poisson"}
    stream = load(shard(tiny.dataset(ROWS), tmp_path / "shards", **given))
    known = Reading(stream, book(tmp_path, steps=2))
    drawn = iter(StreamSampler(ROWS, PoissonSampler(ROWS, 1 / STEPS, 8), reading=known))
    assert [next(drawn) for _ in range(3)] and (known.paid, known.to_pay(8)) == (0, 5)


def test_no_row_is_read_before_its_step_is_recorded(folder, tmp_path):
    stream = load(folder)
    sampler = StreamSampler(
        ROWS, AllocationSampler(ROWS, STEPS), reading=Reading(stream, book(tmp_path))
    )
    drawn = iter(sampler)
    first, later = next(drawn), stream.rows_of(0, 2)
    assert first == stream.rows_of(0, 0) and [stream[row] for row in first]
    with pytest.raises(LedgerError, match="to be recorded before it is read"):
        _ = stream[later[0]]
    with pytest.raises(DataError, match="read step by step, by a private run"):
        iter(stream)
    with pytest.raises(DataError, match="Row 400 is not among the first 40"):
        _ = stream[ROWS * 10]


def test_in_a_loop_of_ones_own_each_step_is_read_once(folder, tmp_path):
    plan = PrivacyPlan(
        ROWS, ROWS / STEPS, len(EVERY), 1e-3, DpSgdPlan(0.1, 1.0, draw=RandomAllocation())
    )  # fmt: skip
    options = RunOptions(look_over="when_drawn", longest_row=9)
    given = {"data_collator": tiny.DataCollatorWithPadding(tiny.tokenizer()), "options": options}
    run = PrivateRun(tiny.model(), plan, tmp_path / "run", train_dataset=load(folder), **given)
    mechanism, steps = mechanism_for(run), 0
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        with run.release_step() as release:
            mechanism.set_gradients(clipped, release)
        run.model.zero_grad()
        steps += 1
    assert steps == run.ledger.steps() == len(EVERY)
    assert next(mechanism.logical_batches(), None) is None  # and no further one


REFUSED = {
    "sampling": ({"sampling": "poisson"}, "`sampling` to be 'random_allocation' for a stream"),
    "batch": ({"expected_batch_size": 8}, "`expected_batch_size` to be 10 for these shards, of 4"),
    "steps": ({"max_steps": 9}, "`max_steps` to be at most 8, the steps of 2 sharded epochs"),
    "look": ({"look_over": "all", "longest_row": None}, "`look_over` to be 'when_drawn'"),
    "views": ({"views_per_example": 2}, "`views_per_example` to be 1 for a stream of shards"),
    "audit": ({"audit_canaries": 5}, "`audit_canaries` to be None for a stream of shards"),
    "users": (
        {"privacy_unit": "user", "privacy_unit_column": "who"},
        "`privacy_unit` to be 'example' for a stream of shards",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folder, tmp_path):
    options, said = REFUSED[case]
    with pytest.raises(HfDpError, match=said):
        trainer(tmp_path / "run", folder, **options).train()
    assert load(folder).reader is None


@pytest.mark.parametrize("config", [FrostConfig, ParamConfig])
def test_a_selection_by_rows_is_refused_before_anything_is_written(config, tmp_path):
    given = {"expected_batch_size": ROWS / STEPS, "num_train_epochs": EPOCHS, "sampling": "poisson"}
    stream = load(shard(tiny.dataset(ROWS), tmp_path / "shards", **given))
    selects = config(
        unfreeze_ratio=0.5, selection_noise_multiplier=1.0, selection_sample_rate=1 / STEPS
    )
    given, options = {"train_dataset": stream, "peft_config": selects}, {"sampling": "poisson"}
    with pytest.raises(UnsupportedArgumentError, match="`peft_config` to draw no rows of a stream"):
        tiny.trainer(tmp_path / "run", given=given, **{**OPTIONS, **options})
    assert stream.reader is None and not [*tmp_path.glob("run/*")]


def test_other_rows_are_refused_once_a_run_reads_a_stream(folder, tmp_path):
    made = trainer(tmp_path / "run", folder)
    for other in (tiny.dataset(ROWS), load(folder)):
        made.train_dataset = other
        with pytest.raises(DataError, match="was replaced after it was used"):
            made.get_train_dataloader()


def without_noise(out, folder, **options):
    """The weights of a run in float64 without noise, and its events."""
    given = {"train_dataset": load(folder), "model": tiny.model().double()}
    plain = {**OPTIONS, **silence.PLAIN_STEPS, "accountant": "pld"}
    made = silence.silenced(tiny.trainer(out, given=given, **{**plain, **options}))
    made.train()
    return silence.weights(made), made.ledger.events


@pytest.mark.parametrize("sampling", [None, pytest.param("poisson", marks=pytest.mark.slow)])
def test_two_processes_read_one_stream(sampling, folder, tmp_path):
    """They make the updates of one process, and read each step once."""
    options = {}
    if sampling is not None:
        options = {"sampling": sampling}
        shutil.rmtree(folder)
        shard(
            tiny.dataset(ROWS), folder, expected_batch_size=10, num_train_epochs=EPOCHS, **options
        )
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    expected, events = without_noise(tmp_path / "one", folder, **options)
    found = results(2, lambda: without_noise(tmp_path / "two", again, **options))
    for weights, own in found:
        assert own == events
        assert silence.distance(weights, expected, "bert") < 1e-6
    assert load(again).recorded(1 if sampling is None else 0) == (
        STEPS if sampling is None else STEPS * EPOCHS
    )


@pytest.mark.slow
def test_two_processes_go_on_with_the_stream_of_one(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, folder, [Dies(5)]).train()
    resumed = lambda: tiny.resumed(trainer(tmp_path, folder), 3).ledger.events  # noqa: E731
    for events in results(2, resumed):
        assert events == (RandomAllocationGaussian(1.0, STEPS, STEPS * EPOCHS),)
    assert load(folder).recorded(1) == STEPS


def test_other_draws_are_refused(folder, tmp_path):
    known = Reading(load(folder), book(tmp_path))
    with pytest.raises(UnsupportedArgumentError, match="got 'PoissonSampler'"):
        sampler_of(PoissonSampler(ROWS, 0.1, STEPS), known)
