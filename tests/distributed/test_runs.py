"""Whole runs of several processes: the same update, one ledger, one card.

The processes are forked from this one and meet over gloo, as torchrun would start them.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import silence
import tiny
import torch
from processes import Outcome, outcomes, results
from silence import MODELS, assert_standard_normal, distance, moved_by_noise, trained, weights
from transformers import Trainer, TrainerCallback

from hf_dp.accounting import PoissonSampledGaussian
from hf_dp.distributed.processes import Processes
from hf_dp.noise import SecretRandomness
from hf_dp.run import other_training
from hf_dp.run.ledger import RunLedger
from hf_dp.run.witnesses import read_run
from hf_dp.statement.record import disagreements, read


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


@pytest.mark.parametrize(("kind", "dtype", "way"), cases())
def test_the_update_does_not_depend_on_the_processes(kind, dtype, way, tmp_path):
    count, size, options = WAYS[way]
    alone = trained(tmp_path / "alone", kind, dtype, per_device_train_batch_size=40)
    found = results(
        count,
        lambda: trained(tmp_path / "t", kind, dtype, per_device_train_batch_size=size, **options),
    )
    assert_all_equal(found)
    assert distance(found[0], alone, kind) < (1e-9 if dtype == torch.float64 else 1e-4)


def test_planted_example_that_two_processes_draw_is_seen(tmp_path, monkeypatch):
    alone = trained(tmp_path / "alone", "bert", torch.float64)
    silence.plant_a_unit_that_all_processes_draw(monkeypatch)
    found = results(2, lambda: trained(tmp_path / "two", "bert", torch.float64))
    assert distance(found[0], alone, "bert") > 1e-3


# -- the draws --


def drawn(rate: float, steps: int, shift: float = 0.0) -> list[list[int]]:
    """This process's draws, as a run makes them. Args: shift: of rank 1's rate, planted."""
    import dataclasses

    from hf_dp.plans.samplers import PoissonSampler, Share

    rank = int(os.environ["RANK"])
    sampler = PoissonSampler(40, rate + shift * rank, steps)
    mine = dataclasses.replace(sampler, share=Share(rank, int(os.environ["WORLD_SIZE"])))
    return list(mine)


def assert_is_a_poisson_draw(by_rank: list[list[list[int]]], rate: float) -> None:
    """Every example is in each draw independently with the same probability."""
    import numpy as np
    from scipy import stats

    steps = len(by_rank[0])
    joined = np.zeros((steps, 40))
    for draws in by_rank:
        for step, draw in enumerate(draws):
            assert not joined[step, draw].any()  # nobody is drawn by two
            joined[step, draw] = 1
    for count in joined.sum(0):
        assert stats.binomtest(int(count), steps, rate).pvalue > 1e-7
    sizes = joined.sum(1)
    counts = np.bincount(sizes.astype(int), minlength=41)
    expected = stats.binom.pmf(np.arange(41), 40, rate) * steps
    usable = expected > 5
    tested = [*counts[usable], counts[~usable].sum()], [*expected[usable], expected[~usable].sum()]
    assert stats.chisquare(*tested).pvalue > 1e-6


def test_the_draws_of_all_processes_are_one_poisson_draw():
    assert_is_a_poisson_draw(results(3, lambda: drawn(0.2, 4000)), 0.2)


def test_planted_other_rate_of_one_process_is_seen():
    with pytest.raises(AssertionError):
        assert_is_a_poisson_draw(results(2, lambda: drawn(0.2, 4000, shift=0.03)), 0.2)


def test_a_process_without_examples_of_its_own_takes_part(tmp_path):
    # three processes, and so few examples in a draw that most are empty
    def train():
        made = tiny.trainer(tmp_path, expected_batch_size=1, max_steps=3, accountant="rdp")
        made.train()
        return weights(made)

    assert_all_equal(results(3, train))
    assert read_run(tmp_path).ledger.steps() == 3


def test_an_allocation_is_recorded_once_by_all_processes(tmp_path, monkeypatch):
    from hf_dp.plans.samplers import AllocationSampler

    drawn, honest = [], AllocationSampler.__iter__

    def watched(self):
        for batch in honest(self):
            drawn.append(batch)
            yield batch

    monkeypatch.setattr(AllocationSampler, "__iter__", watched)

    def train():
        made = tiny.trainer(tmp_path, sampling="random_allocation", max_steps=6)
        made.train()
        return weights(made), drawn[:5]

    found = results(2, train)
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


# -- the noised loss: the sum of all losses, with one noise, the same for all --

LOSS = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2}


def losses_of(made) -> list[float]:
    made.train()
    return [row["noised_loss"] for row in made.state.log_history if "noised_loss" in row]


def test_a_run_of_two_processes_logs_what_one_logs(tmp_path):
    def losses(name: str, **options):
        return losses_of(
            silence.trainer(tmp_path / name, "bert", torch.float64, max_steps=2, **LOSS, **options)
        )  # every row in each step, no noise

    alone = losses("one", per_device_train_batch_size=40)
    assert len(alone) == 2 and alone[0] > 0
    for found in results(2, lambda: losses("two")):
        assert found == pytest.approx(alone, rel=1e-9)


def test_two_processes_log_the_same_noised_numbers(tmp_path):
    def train():
        return losses_of(tiny.trainer(tmp_path, accountant="rdp", max_steps=2, **LOSS))

    first, second = results(2, train)
    assert first == second and len(set(first)) == 2
    record = read(tmp_path)
    assert record.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 2, beside={"loss": 2.0}),)
    assert disagreements(record) == []


# -- one ledger, one card --


def test_statement_and_folder_are_those_of_one_process(tmp_path):
    def train(folder: Path):
        made = tiny.trainer(folder, save_strategy="steps", save_steps=2, accountant="rdp")
        made.train()
        made.save_model()

    train(tmp_path / "one")
    results(2, lambda: train(tmp_path / "two"))
    one, two = tmp_path / "one", tmp_path / "two"
    assert names(two) == names(one)
    first, second = read(one), read(two)
    assert first.ledger.to_list() == second.ledger.to_list()
    assert first.plan == second.plan
    assert first.statement == second.statement
    assert disagreements(second) == []
    assert (one / "README.md").read_text() == (two / "README.md").read_text().replace("two", "one")


def names(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if "rng_state" not in name}  # one for each process


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        (2, 3),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(before, after, tmp_path):
    whole = trained(tmp_path / "whole", "bert", torch.float64, max_steps=2)

    def train(resume: bool):
        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        made = silence.trainer(tmp_path / "run", "bert", torch.float64, **options)
        if not resume:
            made.add_callback(StopAfterOne())
        made.train(resume_from_checkpoint=resume or None)
        return weights(made)

    results(before, lambda: train(False))
    found = results(after, lambda: train(True))
    assert_all_equal(found)
    assert distance(found[0], whole, "bert") < 1e-9
    assert read_run(tmp_path / "run").ledger.steps() == 2


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def recorded_when_gradients_are_set(folder: Path) -> list[tuple[int, int]]:
    """(steps on disk, steps whose gradient is being set), in each step of this process."""
    made = tiny.trainer(folder, max_steps=3, accountant="rdp")
    found, honest = [], made.mechanism.set_gradients

    def watched(clipped, release):
        on_disk = read_run(folder).ledger.steps() if (folder / "ledger.jsonl").exists() else 0
        found.append((on_disk, len(found) + 1))
        honest(clipped, release)

    made.mechanism.set_gradients = watched
    made.train()
    return found


def test_the_ledger_is_durable_before_any_process_sets_a_gradient(tmp_path):
    for found in results(2, lambda: recorded_when_gradients_are_set(tmp_path)):
        assert len(found) == 3 and all(on_disk >= step for on_disk, step in found)


def test_planted_process_that_does_not_wait_for_the_ledger_is_seen(tmp_path, monkeypatch):
    import time

    def hurried(self, act):
        if self.is_main:
            time.sleep(0.2)
        return act()

    append = RunLedger.append

    def without_waiting(self, event, purpose):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Processes, "together", hurried)
            append(self, event, purpose)

    monkeypatch.setattr(RunLedger, "append", without_waiting)
    _, other = results(2, lambda: recorded_when_gradients_are_set(tmp_path))
    assert any(on_disk < step for on_disk, step in other)


def test_processes_whose_ledgers_differ_stop(tmp_path):
    def train():
        made = tiny.trainer(tmp_path, max_steps=4, accountant="rdp")
        honest = made.mechanism.set_gradients

        def meddle(clipped, release):
            honest(clipped, release)
            if made.run.processes.rank == 1:
                made.run.book.head = replace(made.run.book.head, run_id="another run")
                for module in made.model.modules():  # which remembers the run
                    vars(module).pop(other_training._NOTE, None)

        made.mechanism.set_gradients = meddle
        made.train()

    for each in outcomes(2, train):
        assert each.error == "DistributedError", each.trace
        assert "Ranks [1] of 2 disagree with rank 0" in each.message
    assert read_run(tmp_path).ledger.steps() == 1


# -- what is refused at the start --

DIFFERENCES = {
    "arguments": (lambda rank: {"learning_rate": 1e-2 * (rank + 1)}, "the argument `learning_rate`"),
    "plan": (lambda rank: {"noise_multiplier": 1.0 + rank}, "the privacy plan's `mechanism`|the privacy plan's `noise_multiplier`"),
    "data": (lambda rank: {"given": {"train_dataset": _rows(rank)}}, "the rows of train_dataset"),
    "size": (lambda rank: {"given": {"train_dataset": tiny.dataset(40 + rank)}}, "num_examples"),
    "model": (lambda rank: {"given": {"model": tiny.model(num_labels=2 + rank)}}, "the parameters of the model"),
}  # fmt: skip


def _rows(rank: int):
    rows = tiny.dataset()
    return rows if rank == 0 else rows.select([1, 0, *range(2, 40)])


@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_that_differ_are_refused(what, tmp_path):
    options, named = DIFFERENCES[what]

    def train():
        made = tiny.trainer(tmp_path, accountant="rdp", **options(int(os.environ["RANK"])))
        made.train()

    ended = outcomes(2, train)
    import re

    for each in ended:
        assert each.error == "DistributedError", each.trace
        assert re.search(f"differ in .*({named})", each.message), each.message
    assert not (tmp_path / "ledger.jsonl").exists()


def test_other_code_is_refused(tmp_path, monkeypatch):
    from hf_dp.run import meeting

    def train():
        monkeypatch.setattr(meeting, "_digest_of_code", lambda: os.environ["RANK"])
        tiny.trainer(tmp_path, accountant="rdp").train()

    for each in outcomes(2, train):
        assert "differ in the code of hf_dp" in each.message


@pytest.mark.parametrize("source", [SecretRandomness(5), SecretRandomness()], ids=["seed", "copy"])
def test_one_random_source_in_two_processes_is_refused(source, tmp_path):
    def train():
        made = tiny.trainer(tmp_path, accountant="rdp")
        made.run.randomness = source
        made.train()

    for each in outcomes(2, train):
        assert "Ranks 0 and 1 have the same source of random numbers" in each.message
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_fork_cannot_draw_the_same_noise():
    source = SecretRandomness()
    (found,) = outcomes(1, lambda: source.gaussian_like(torch.zeros(3), 1.0))
    assert found.error == "LedgerError" and "was forked" in found.message


class Shuffled(torch.utils.data.Dataset):
    """Rows in an order of their own, which differ on each reading."""

    def __init__(self):
        self.order = torch.randperm(40, generator=torch.Generator().manual_seed(os.getpid()))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = [2, *torch.randint(4, 19, (3,)).tolist(), 3]
        return {"input_ids": ids, "attention_mask": [1] * 5, "label": int(self.order[index]) % 2}


def test_rows_that_cannot_be_compared_are_refused(tmp_path):
    def train():
        tiny.trainer(tmp_path, given={"train_dataset": Shuffled()}, accountant="rdp").train()

    for each in outcomes(2, train):
        assert each.error == "DataError" and "differ each time they are read" in each.message


def test_the_order_inside_joined_parts_is_compared():
    from torch.utils.data import ConcatDataset, Subset

    from hf_dp.run.meeting import digest_of_rows

    rows = [{"text": str(number)} for number in range(40)]
    halves = ConcatDataset([rows[:20], rows[20:]])
    orders = [list(range(40)), list(range(39, -1, -1))]
    mixed = [ConcatDataset([Subset(halves, order)]) for order in orders]
    assert digest_of_rows(mixed[0]) != digest_of_rows(mixed[1])


def test_resume_in_one_process_alone_is_refused(tmp_path):
    results(
        2,
        lambda: tiny.trainer(
            tmp_path, save_strategy="steps", save_steps=2, accountant="rdp"
        ).train(),
    )

    def go_on():
        made = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2, accountant="rdp")
        made.train(resume_from_checkpoint=True if os.environ["RANK"] == "0" else None)

    for each in outcomes(2, go_on):
        assert "Ranks [1] of 2 disagree with rank 0" in each.message


def test_every_process_trains_the_same_weights_from_the_start(tmp_path):
    def train():
        model = tiny.model(seed=int(os.environ["RANK"]))
        made = tiny.trainer(tmp_path, given={"model": model}, accountant="rdp")
        made.train()
        return weights(made)

    assert_all_equal(results(2, train))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_logical_batch_size": 12}, "`max_logical_batch_size` to be None with 2 processes"),
        ({"release": ["clipped_gradient_norm"]}, "without 'clipped_gradient_norm' with 2 proc"),
    ],
    ids=["a limit of the whole draw", "the norm of the whole sum"],
)
def test_what_only_one_process_knows_is_refused(tmp_path, option, said):
    def train():
        tiny.trainer(tmp_path, **option)

    ended = outcomes(2, train)  # the first to refuse may end before the other has met it
    assert all(each.exit for each in ended)
    assert any(said in each.message for each in ended)


# -- what goes wrong later --


def failing_in_step(folder: Path, step: int, fail, resume: bool = False, **options) -> None:
    """Train; ``fail()`` is called in rank 1's loss of this step."""

    class Failing(tiny.DPTrainer):
        def compute_per_example_loss(self, model, inputs):
            if self.state.global_step == step and self.is_in_train and self.args.process_index == 1:
                fail()
            return super().compute_per_example_loss(model, inputs)

    made = tiny.trainer(
        folder,
        cls=Failing,
        expected_batch_size=20,
        max_steps=2,
        **{"save_strategy": "steps", "save_steps": 1, "accountant": "rdp", **options},
    )
    made.train(resume_from_checkpoint=resume or None)


@pytest.mark.parametrize("where", ["in its loss", "when it fetches rows"])
def test_what_ran_is_saved_by_all_if_one_fails(where, tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("odd row")

    def run():
        with pytest.MonkeyPatch.context() as patch:
            if where == "when it fetches rows":
                patch.setattr(
                    Trainer,
                    "get_batch_samples",
                    lambda made, *args: (
                        fail()
                        if made.state.global_step == 1 and made.args.process_index == 1
                        else stock(made, *args)
                    ),
                )
            failing_in_step(tmp_path, 1 if where == "in its loss" else 9, fail, save_strategy="no")

    stock = Trainer.get_batch_samples
    main, other = outcomes(2, run)
    assert (main.error, other.error) == ("DistributedError", "StepError")
    for message in (main.message, other.message):
        assert "odd row" in message and "1 steps ran before it" in message
        assert f"Their weights are in {tmp_path / 'checkpoint-1'}" in message
    assert read_run(tmp_path).ledger.steps() == 1


def test_a_process_out_of_memory_stops_all_before_the_step_is_released(tmp_path):
    def fail():
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    main, other = outcomes(2, lambda: failing_in_step(tmp_path, 1, fail))
    assert other.error == "MemoryShortError"
    assert main.error == "DistributedError"
    assert "Rank 1 of 2 failed" in main.message and "tried to allocate 3 GiB" in main.message
    assert read_run(tmp_path).ledger.steps() == 1


def test_a_killed_process_stops_all_before_the_step_is_released(tmp_path):
    main, other = outcomes(
        2, lambda: failing_in_step(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    )
    assert other == Outcome(error="Killed", trace="the process was killed", exit=9)
    assert main.error == "DistributedError" and "Another process" in main.message
    assert read_run(tmp_path).ledger.steps() == 1
    results(2, lambda: failing_in_step(tmp_path, 9, None, resume=True))
    assert read_run(tmp_path).ledger.steps() == 2
