"""The largest physical batch that fits: the search, and what it must not see.

There is no GPU: a stand-in runs out of memory where a step on n examples of T tokens costs too much.
"""

import itertools
import os
import pickle
import random
from contextlib import nullcontext

import datasets
import numpy as np
import pytest
import tiny
import torch
from loops import plan, run
from processes import on_processes
from watch import watch

from hf_dp import FrostConfig, RgpConfig, mechanism_for
from hf_dp.errors import (
    DataError,
    DistributedError,
    DoesNotFitError,
    HfDpError,
    InvalidArgumentError,
    UnsupportedArgumentError,
)
from hf_dp.mechanisms import base as mechanisms_base
from hf_dp.run import physical_size
from hf_dp.run.physical_size import largest_physical_batch
from hf_dp.trainer.private import PrivateTraining

pytestmark = pytest.mark.usefixtures("unchecked")

MIB = 2**20
COUNT = 300  # rows


def rows(longest: int = 8, seed: int = 0) -> datasets.Dataset:
    source = random.Random(seed)
    lengths = [source.randint(1, longest - 2) for _ in range(COUNT)]
    ids = [[2, *(source.randrange(4, 19) for _ in range(length)), 3] for length in lengths]
    masks = [[1] * len(each) for each in ids]
    columns = {"input_ids": ids, "attention_mask": masks, "labels": [0, 1] * (COUNT // 2)}
    return datasets.Dataset.from_dict(columns)


def mechanism_of(folder, model=None, train_dataset=None, expected: int = 250):
    planned = plan(COUNT, expected_batch_size=expected, max_steps=2)
    data = train_dataset or rows()
    return mechanism_for(run(folder, planned, model=model, train_dataset=data, size=8))


def adam(mechanism):
    return torch.optim.AdamW(mechanism.run.model.parameters(), lr=0.1)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(physical_size, "_kept_free", lambda device: None)


@pytest.fixture
def artificial(on_a_gpu):
    """Return ``find(mechanism, budget, **given)``: the search where a step on n examples of T
    tokens takes 100 + 3 n T bytes, and there are ``budget``."""

    def find(mechanism, budget, **given):
        def rehearse(batches, optimizer):
            if 100 + 3 * batches[-1]["input_ids"].numel() > budget:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        return largest_physical_batch(mechanism.run, rehearse, adam(mechanism), **given)

    return find


@pytest.mark.parametrize("budget", [1_000, 5_300])
def test_the_largest_that_fits_is_found(tmp_path, artificial, budget):
    found = artificial(mechanism_of(tmp_path), budget, length=16)
    most = (budget - 100) // (3 * 16)
    assert 0.88 * most - 1 <= found <= most


def test_nothing_is_searched_beyond_a_draw_or_a_size_that_is_given(tmp_path, artificial):
    mechanism = mechanism_of(tmp_path, expected=20)
    assert artificial(mechanism, 10**6, length=16) == 20 + 27
    assert artificial(mechanism, 10**6, length=16, most_examples=5) == 5


REFUSED = {
    "too little memory": (16, 1, DoesNotFitError, r"1 example of 16 token.*gradient_checkpointing"),
    "no length": (None, 10**6, InvalidArgumentError, "`auto_physical_batch_length` to be the num"),
    "a longer row": (5, 10**6, DataError, r"`input_ids` of a row has 8 .*at 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_found_names_what_to_do(tmp_path, artificial, case):
    length, budget, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        artificial(mechanism_of(tmp_path), budget, length=length)


def test_a_cpu_is_refused_by_name(tmp_path):
    """What is left of its memory depends on the rows that lie there."""
    mechanism = mechanism_of(tmp_path)
    with pytest.raises(UnsupportedArgumentError, match="`auto_physical_batch_size`.*'cpu'.*Set "):
        mechanism.find_physical_batch(adam(mechanism))


def test_a_length_that_the_model_does_not_take_is_named(tmp_path, on_a_gpu):
    mechanism = mechanism_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"`auto_physical_batch_length`.*got 99"):
        mechanism.find_physical_batch(adam(mechanism), length=99)


@pytest.mark.parametrize(("is_short", "length"), [(False, 18), (True, 24)])
def test_the_step_is_as_long_as_rows_are_padded(tmp_path, on_a_gpu, is_short, length):
    model, found = tiny.model(), set()
    if is_short:
        model.bert.embeddings.word_embeddings.requires_grad_(False).bfloat16()
    mechanism = mechanism_of(tmp_path, model)
    mechanism.rehearse = lambda batches, _: found.update(b["input_ids"].shape for b in batches)
    mechanism.find_physical_batch(adam(mechanism), length=18, most_examples=2)
    assert found == {(1, length), (2, length)}


# -- what it must not see --


def found_on(folder, artificial, longest: int) -> int:
    given = mechanism_of(folder / str(longest), train_dataset=rows(longest, seed=longest))
    return artificial(given, 5_000, length=24)


def test_the_rows_do_not_matter(tmp_path, artificial):
    assert found_on(tmp_path, artificial, 4) == found_on(tmp_path, artificial, 20)


def test_planted_length_of_the_rows_is_seen(tmp_path, artificial, monkeypatch):
    batch = physical_size._batch
    found = []
    for longest in (4, 20):
        as_the_rows = lambda example, times, _, longest=longest: batch(example, times, longest)  # noqa: E731
        monkeypatch.setattr(physical_size, "_batch", as_the_rows)
        found.append(found_on(tmp_path, artificial, longest))
    assert found[0] != found[1]


def states(mechanism, optimizer):
    model = mechanism.run.model
    return pickle.dumps(
        (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state().tolist(),
            mechanism.run.randomness._numpy.bit_generator.state,
            mechanism.run.randomness._streams,
            {name: value.tolist() for name, value in model.state_dict().items()},
            [module.training for module in model.modules()],
            [p.grad for p in model.parameters()],
            {k: str(v) for k, v in optimizer.state_dict().items()},
        )
    )


def test_nothing_is_changed_by_a_search(tmp_path, on_a_gpu):
    """Not by steps that fit, nor by one that fails after the optimizer's."""
    mechanism = mechanism_of(tmp_path, tiny.model(dropout=0.1))
    optimizer, rehearse, steps = adam(mechanism), mechanism.rehearse, []

    def short(batches, optimizer):
        rehearse(batches, optimizer)
        steps.append(tuple(batches[-1]["input_ids"].shape))
        if len(batches[-1]["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    mechanism.rehearse = short
    mechanism.run.training_data()
    mechanism.run.model.eval()
    before = states(mechanism, optimizer)
    mechanism.find_physical_batch(optimizer, length=24, most_examples=4)
    assert steps[:3] == [(4, 24), (3, 24), (2, 24)] and states(mechanism, optimizer) == before
    assert mechanism.run.options.batches.physical_batch_size == 2


def test_planted_step_that_is_not_undone_is_seen(tmp_path, on_a_gpu, monkeypatch):
    monkeypatch.setattr(physical_size, "_unchanged", lambda model, optimizer: nullcontext())
    mechanism = mechanism_of(tmp_path, tiny.model())
    optimizer = adam(mechanism)
    before = states(mechanism, optimizer)
    mechanism.find_physical_batch(optimizer, length=24, most_examples=1)
    assert states(mechanism, optimizer) != before


# -- several processes --


def test_two_processes_use_the_smaller_number_and_stop_together(tmp_path, on_a_gpu):
    def search(name: str, budgets: tuple[int, int]) -> int:
        rank = int(os.environ["RANK"])
        mechanism = mechanism_of(tmp_path / name / str(rank))

        def rehearse(batches, optimizer):
            if batches[-1]["input_ids"].numel() > budgets[rank]:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        mechanism.rehearse = rehearse
        return mechanism.find_physical_batch(adam(mechanism), length=16)

    def ask():
        found = search("fits", (480, 160))
        with pytest.raises(HfDpError) as error:
            search("fails in one", (0, 160))
        return found, type(error.value)

    (one, first), (other, second) = on_processes(2, ask)
    assert one == other and one in (9, 10)
    assert (first, second) == (DoesNotFitError, DistributedError)


# -- a Trainer --


@pytest.fixture
def no_statement(monkeypatch, on_a_gpu):
    """Statements take seconds and are not what is tested."""
    monkeypatch.setattr(PrivateTraining, "write_files", lambda *_, **__: None)


AUTO = {"auto_physical_batch_size": True, "auto_physical_batch_length": 24}
WAYS = {
    "dp_sgd": {},
    "rgp": {"given": {"peft_config": RgpConfig()}},
    "frost": {"given": {"peft_config": FrostConfig(selection_noise_multiplier=1.0)}},
    "private_encoder": {
        "privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder", "representation_noise_multiplier": 1.0,
    },
    "checkpointing": {"gradient_checkpointing": True},
}  # fmt: skip
SLOW = ("frost", "private_encoder")  # their accounting takes seconds


@pytest.mark.parametrize(
    "changes",
    [pytest.param(WAYS[way], id=way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS],
)
def test_a_trainer_uses_what_it_finds(tmp_path, no_statement, changes, monkeypatch):
    # All rows in each draw; the default of 8 is no limit.
    sizes = {"expected_batch_size": 40, "per_device_train_batch_size": 8, "max_steps": 1}
    auto = {"auto_physical_batch_size": True, "auto_physical_batch_length": 10}
    trainer = tiny.trainer(tmp_path, **auto, **sizes, **changes)
    clipped = watch(monkeypatch, trainer.mechanism, "clip", before=list)
    trainer.train()
    assert trainer.args.per_device_train_batch_size == trainer.state.train_batch_size == 40
    assert max(len(batch["input_ids"]) for batches in clipped for batch in batches) > 8


def test_a_size_that_is_given_is_the_most_and_it_is_found_once(tmp_path, no_statement, monkeypatch):
    """The number that was found is no upper limit for a second train()."""
    calls = watch(monkeypatch, mechanisms_base, "largest_physical_batch")
    trainer = tiny.trainer(tmp_path, **AUTO, per_device_train_batch_size=3, max_steps=1)
    trainer.train()
    trainer.train()
    assert trainer.args.per_device_train_batch_size == 3 and len(calls) == 1


def test_the_update_does_not_depend_on_it(tmp_path, no_statement):
    """The search draws nothing: with a seed, the same rows and the same noise follow."""

    def weights(**options):
        folder = tmp_path / str(len(options))
        trainer = tiny.trained(tiny.trainer(folder, insecure_seed=1, max_steps=2, **options))
        return trainer.model.state_dict()

    plain, found = weights(), weights(**AUTO)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


class Own(tiny.DPTrainer):
    """A loss that reads a column of its own, and synthetic examples with it."""

    def compute_per_example_loss(self, model, inputs):
        weights = inputs.pop("weights")
        return super().compute_per_example_loss(model, inputs) * weights

    def synthetic_batches(self):
        made = super().synthetic_batches()
        return [{**each, "weights": torch.ones(1)} for each in made]


def test_made_up_examples_of_ones_own_are_stretched(tmp_path, no_statement, monkeypatch):
    given = {"train_dataset": tiny.dataset().map(lambda row: {"weights": 1.0})}
    options = {**AUTO, "remove_unused_columns": False, "max_steps": 1}
    trainer = tiny.trainer(tmp_path, cls=Own, given=given, **options)
    made = watch(monkeypatch, physical_size, "_batch")
    trainer.train()
    found = trainer.args.per_device_train_batch_size
    assert {each["input_ids"].shape for each in made} == {(1, 24), (found, 24)}
    without = type("Without", (Own,), {"synthetic_batches": tiny.DPTrainer.synthetic_batches})
    trainer = tiny.trainer(tmp_path / "without", cls=without, given=given, **options)
    with pytest.raises(HfDpError, match="synthetic_batches"):
        trainer.train()


@pytest.mark.gpu
def test_on_a_gpu_the_largest_batch_runs_and_nothing_is_changed(tmp_path):
    """A share of the memory is all there is; what was found fits into it, and a tenth is free.
    Attention over 512 tokens takes some MiB an example."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    wide = tiny.model(**sizes, attn_implementation="eager")
    mechanism = mechanism_of(tmp_path, wide.cuda())
    optimizer = adam(mechanism)
    mechanism.run.training_data()
    mechanism.run.model.train()
    before, device_state = states(mechanism, optimizer), torch.cuda.get_rng_state()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1500 * MIB / total)
    try:
        found = mechanism.find_physical_batch(optimizer, length=512)
        assert states(mechanism, optimizer) == before
        assert torch.equal(torch.cuda.get_rng_state(), device_state)
        assert 1 <= found < COUNT
        for batches in itertools.islice(mechanism.logical_batches(), 2):
            mechanism.clip(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
