"""The largest physical batch that fits: the search, and what it must not see.

There is no GPU: a stand-in runs out of memory where a step on n examples of T tokens costs too much.
"""

from __future__ import annotations

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
from processes import outcomes
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from hf_dp import DpSgdPlan, FrostConfig, PrivacyPlan, PrivateRun, RgpConfig, mechanism_for
from hf_dp.batches.loader import BatchOptions
from hf_dp.errors import (
    DataError,
    DoesNotFitError,
    HfDpError,
    InvalidArgumentError,
    UnsupportedArgumentError,
)
from hf_dp.run import physical_size
from hf_dp.run.options import RunOptions
from hf_dp.run.physical_size import largest_physical_batch, longest_thought_of
from hf_dp.trainer.private import PrivateTraining

MIB = 2**20
COUNT = 300  # rows


def rows(longest: int = 8, seed: int = 0) -> datasets.Dataset:
    source = random.Random(seed)
    ids = [
        [2, *(source.randrange(4, 19) for _ in range(source.randint(1, longest - 2))), 3]
        for _ in range(COUNT)
    ]
    return datasets.Dataset.from_dict(
        {
            "input_ids": ids,
            "attention_mask": [[1] * len(each) for each in ids],
            "labels": [i % 2 for i in range(COUNT)],
        }
    )


def mechanism_of(folder, model=None, train_dataset=None, expected: int = 250):
    plan = PrivacyPlan.solve(
        num_examples=COUNT,
        expected_batch_size=expected,
        mechanism=DpSgdPlan(clipping_norm=0.1, noise_multiplier=1.0),
        max_steps=2,
    )
    run = PrivateRun(
        model or tiny.model(),
        plan,
        folder,
        train_dataset=train_dataset or rows(),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        options=RunOptions(batches=BatchOptions(quiet=True)),
    )
    return mechanism_for(run)


def wide_model() -> BertForSequenceClassification:
    """Attention over 512 tokens takes some MiB an example."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=19,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=512,
            attn_implementation="eager",
        )
    )


def adam(mechanism):
    return torch.optim.AdamW(mechanism.run.model.parameters(), lr=0.1)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(physical_size, "_on_gpu", lambda run: True)
    monkeypatch.setattr(physical_size, "_kept_free", lambda device: None)


@pytest.fixture
def artificial(on_a_gpu):
    """Return ``find(mechanism, cost, budget, **given)``: the search where a step on n examples of
    T tokens takes ``cost(n, T)`` bytes, and there are ``budget``."""

    def find(mechanism, cost, budget, **given):
        def rehearse(batches, optimizer):
            if cost(*batches[-1]["input_ids"].shape) > budget:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        return largest_physical_batch(mechanism.run, rehearse, adam(mechanism), **given)

    return find


# -- the search --


@pytest.mark.parametrize("budget", [1_000, 5_300, 12_000])
def test_the_largest_that_fits_is_found(tmp_path, artificial, budget):
    """Linear in tokens: all divisions of a number of tokens take the same."""
    found = artificial(mechanism_of(tmp_path), lambda n, t: 100 + 3 * n * t, budget, length=16)
    tokens = (budget - 100) // 3
    assert found.tokens % 16 == 0 and 0.88 * tokens - 16 <= found.tokens <= tokens
    assert found.examples == min(300, found.tokens)


def test_short_examples_that_cost_more_than_their_tokens_limit_the_examples(tmp_path, artificial):
    """As explicit gradients of one example each do."""
    cost = lambda n, t: n * t + 40 * n  # noqa: E731
    found = artificial(mechanism_of(tmp_path), cost, 5_000, length=16)
    assert 80 <= found.examples <= 108
    for number, length in itertools.product(range(1, 301), range(1, 17)):
        if number <= found.examples and (number == 1 or number * length <= found.tokens):
            assert cost(number, length) <= 5_000


def test_nothing_is_searched_beyond_a_draw(tmp_path, artificial):
    found = artificial(mechanism_of(tmp_path, expected=20), lambda n, t: 0, 1, length=16)
    assert found.examples == 20 + 27 and found.tokens == 16 * 47


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"most_examples": 5}, (5, 80)),
        ({"most_tokens": 64}, (64, 64)),
        ({"most_tokens": 9}, (9, 9)),
        ({"most_tokens": 64, "most_examples": 6}, (6, 64)),
    ],
)
def test_sizes_that_are_given_are_upper_limits(tmp_path, artificial, limits, expected):
    found = artificial(mechanism_of(tmp_path), lambda n, t: n * t, 10**6, length=16, **limits)
    assert (found.examples, found.tokens) == expected


def test_what_does_not_fit_names_the_length_and_what_to_do(tmp_path, artificial):
    with pytest.raises(DoesNotFitError, match=r"1 example of 16 token.*gradient_checkpointing"):
        artificial(mechanism_of(tmp_path), lambda n, t: 2, 1, length=16)


def test_a_cpu_is_refused_by_name(tmp_path):
    """What is left of its memory depends on the rows that lie there."""
    mechanism = mechanism_of(tmp_path)
    with pytest.raises(UnsupportedArgumentError, match="`auto_physical_batch_size`.*'cpu'.*Set "):
        mechanism.find_physical_batch(adam(mechanism))


# -- lengths --


def test_the_length_is_that_of_the_tokenizer_and_the_model(tmp_path):
    run = mechanism_of(tmp_path).run
    assert longest_thought_of(run, 7) == 7
    assert longest_thought_of(run, None) == 24  # the model's positions
    run.processing_class = tiny.tokenizer()
    run.processing_class.model_max_length = 12
    assert longest_thought_of(run, None) == 12


def test_roberta_has_fewer_positions_than_its_table_has_rows(tmp_path, on_a_gpu):
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=19,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=26,
        pad_token_id=1,
    )
    mechanism = mechanism_of(tmp_path, RobertaForSequenceClassification(config))
    assert longest_thought_of(mechanism.run, None) == 24
    assert mechanism.find_physical_batch(adam(mechanism), most_examples=2).tokens == 48


def test_an_unknown_length_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    run = mechanism_of(tmp_path).run
    run.model = T5ForConditionalGeneration(
        T5Config(vocab_size=19, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(InvalidArgumentError, match="`auto_physical_batch_length` to be given"):
        longest_thought_of(run, None)


def test_a_length_of_what_has_no_tokens_is_refused(tmp_path):
    run = mechanism_of(tmp_path).run
    run.model = torch.nn.Linear(2, 2)
    assert longest_thought_of(run, None) is None
    with pytest.raises(InvalidArgumentError, match="`auto_physical_batch_length` to be None"):
        longest_thought_of(run, 64)


def test_a_longer_row_is_refused(tmp_path, artificial):
    with pytest.raises(DataError, match=r"`input_ids` of a row has 8 .*at most 5"):
        artificial(mechanism_of(tmp_path), lambda n, t: 0, 1, length=5)


def test_a_length_that_the_model_does_not_take_is_named(tmp_path, on_a_gpu):
    mechanism = mechanism_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"`auto_physical_batch_length`.*got 99"):
        mechanism.find_physical_batch(adam(mechanism), length=99)


# -- what it must not see --


def found_on(folder, artificial, train_dataset):
    given = mechanism_of(folder, train_dataset=train_dataset)
    found = artificial(given, lambda n, t: 3 * n * t + n, 5_000)
    return found.examples, found.tokens


def test_the_rows_do_not_matter(tmp_path, artificial):
    short, long = rows(4, seed=1), rows(20, seed=2)
    one, other = (found_on(tmp_path / str(len(d[0])), artificial, d) for d in (short, long))
    assert one == other


def test_planted_length_of_the_rows_is_seen(tmp_path, artificial, monkeypatch):
    monkeypatch.setattr(
        physical_size,
        "longest_thought_of",
        lambda run, _: run.training_data().looked_over.layout.leaves["input_ids"].most[-1],
    )
    short, long = rows(4, seed=1), rows(20, seed=2)
    one, other = (found_on(tmp_path / str(i), artificial, d) for i, d in enumerate((short, long)))
    assert one != other


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
        steps.append(len(batches[-1]["labels"]))
        if steps[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    mechanism.rehearse = short
    mechanism.run.training_data()
    mechanism.run.model.eval()
    before = states(mechanism, optimizer)
    mechanism.find_physical_batch(optimizer, most_examples=4)
    assert steps[:3] == [4, 3, 2] and states(mechanism, optimizer) == before
    assert mechanism.run.options.batches.physical_batch_size == 2
    assert mechanism.run.options.batches.max_tokens == 48


def test_planted_step_that_is_not_undone_is_seen(tmp_path, on_a_gpu, monkeypatch):
    monkeypatch.setattr(physical_size, "_unchanged", lambda model, optimizer: nullcontext())
    mechanism = mechanism_of(tmp_path, tiny.model())
    optimizer = adam(mechanism)
    before = states(mechanism, optimizer)
    mechanism.find_physical_batch(optimizer, most_examples=1)
    assert states(mechanism, optimizer) != before


# -- several processes --


def search_of_this_process(folder, budgets):
    def run():
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        mechanism = mechanism_of(folder / str(rank))

        def rehearse(batches, optimizer):
            if batches[-1]["input_ids"].numel() > budgets[rank]:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        mechanism.rehearse = rehearse
        found = mechanism.find_physical_batch(adam(mechanism), length=16)
        return found.examples, found.tokens

    return run


def test_two_processes_use_the_smaller_number(tmp_path, on_a_gpu):
    ended = outcomes(2, search_of_this_process(tmp_path, (480, 160)))
    assert not any(each.exit for each in ended), [each.trace for each in ended]
    one, other = (each.result for each in ended)
    assert one == other and 144 <= one[1] <= 160


def test_a_search_that_fails_in_one_process_stops_both(tmp_path, on_a_gpu):
    ended = outcomes(2, search_of_this_process(tmp_path, (0, 160)))
    assert [each.error for each in ended] == ["DoesNotFitError", "DistributedError"]


# -- a Trainer --


@pytest.fixture
def no_statement(monkeypatch, on_a_gpu):
    """Statements take seconds and are not what is tested."""
    monkeypatch.setattr(PrivateTraining, "write_files", lambda *_, **__: None)


class Recorded:
    """The sizes of the physical batches that steps were given."""

    def __init__(self, trainer):
        self.sizes: list[tuple[int, int]] = []
        clip = trainer.mechanism.clip

        def recording(batches):
            self.sizes += [tuple(batch["input_ids"].shape) for batch in batches]
            return clip(batches)

        trainer.mechanism.clip = recording


WAYS = {
    "dp_sgd": {},
    "rgp": {"given": {"peft_config": RgpConfig()}},
    "frost": {"given": {"peft_config": FrostConfig(selection_noise_multiplier=1.0)}},
    "private_encoder": {
        "privacy_mode": "dp_fp",
        "dp_fp_variant": "private_encoder",
        "representation_noise_multiplier": 1.0,
    },
    "checkpointing": {"gradient_checkpointing": True},
}
SLOW = ("frost", "private_encoder")  # their accounting takes seconds


@pytest.mark.parametrize(
    "changes",
    [pytest.param(WAYS[way], id=way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS],
)
def test_a_trainer_uses_what_it_finds(tmp_path, no_statement, changes):
    trainer = tiny.trainer(
        tmp_path,
        auto_physical_batch_size=True,
        auto_physical_batch_length=10,
        per_device_train_batch_size=8,
        max_tokens_per_physical_batch=200,
        expected_batch_size=40,  # all rows in each draw
        max_steps=2,
        **changes,
    )
    recorded = Recorded(trainer)
    trainer.train()
    args = trainer.args
    assert (args.per_device_train_batch_size, args.max_tokens_per_physical_batch) == (40, 200)
    assert trainer.state.train_batch_size == 40
    assert max(examples for examples, _ in recorded.sizes) > 8  # the default, which was not used
    assert all(examples * tokens <= 200 for examples, tokens in recorded.sizes)


def test_a_size_that_is_given_to_a_trainer_is_the_most(tmp_path, no_statement):
    trainer = tiny.trainer(
        tmp_path, auto_physical_batch_size=True, per_device_train_batch_size=3, max_steps=1
    )
    trainer.train()
    assert trainer.args.per_device_train_batch_size == 3
    assert trainer.args.max_tokens_per_physical_batch == 72  # 24 positions


def test_it_is_found_once(tmp_path, no_statement, monkeypatch):
    """The number that was found is no upper limit for a second train()."""
    calls = []
    find = physical_size.largest_physical_batch
    monkeypatch.setattr(
        "hf_dp.mechanisms.base.largest_physical_batch",
        lambda *args, **given: calls.append(given) or find(*args, **given),
    )
    trainer = tiny.trainer(
        tmp_path, auto_physical_batch_size=True, per_device_train_batch_size=3, max_steps=1
    )
    trainer.train()
    trainer.train()
    assert len(calls) == 1


def test_the_update_does_not_depend_on_it(tmp_path, no_statement):
    """The search draws nothing: with a seed, the same rows and the same noise follow."""

    def weights(**options):
        trainer = tiny.trainer(
            tmp_path / str(len(options)), insecure_seed=1, max_steps=2, **options
        )
        trainer.train()
        return trainer.model.state_dict()

    plain, found = weights(), weights(auto_physical_batch_size=True)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


class Own(tiny.DPTrainer):
    """A loss that reads a column of its own, and made-up examples with it."""

    def compute_per_example_loss(self, model, inputs):
        weights = inputs.pop("weights")
        return super().compute_per_example_loss(model, inputs) * weights

    def synthetic_batches(self):
        made = self.run.synthetic_batches()
        return [{**each, "weights": torch.ones(1)} for each in made]


def test_made_up_examples_of_ones_own_are_stretched(tmp_path, no_statement):
    given = {"train_dataset": tiny.dataset().map(lambda row: {"weights": 1.0})}
    options = {"auto_physical_batch_size": True, "remove_unused_columns": False, "max_steps": 1}
    trainer = tiny.trainer(tmp_path, cls=Own, given=given, **options)
    trainer.train()
    assert trainer.args.max_tokens_per_physical_batch == 4 * 24
    without = type("Without", (Own,), {"synthetic_batches": tiny.DPTrainer.synthetic_batches})
    trainer = tiny.trainer(tmp_path / "without", cls=without, given=given, **options)
    with pytest.raises(HfDpError, match="synthetic_batches"):
        trainer.train()


@pytest.mark.gpu
def test_on_a_gpu_the_largest_batch_runs_and_nothing_is_changed(tmp_path):
    """A share of the memory is all there is; what was found fits into it, and a tenth is free."""
    mechanism = mechanism_of(tmp_path, wide_model().cuda())
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
        assert 512 <= found.tokens < 512 * COUNT
        for batches in itertools.islice(mechanism.logical_batches(), 2):
            mechanism.clip(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
