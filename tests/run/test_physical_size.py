"""The largest physical batch that fits: the search, what it measures, and what it must not see."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal

import datasets
import numpy as np
import pytest
import tiny
import torch
from processes import outcomes
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from hf_dp import DpSgdPlan, FrostConfig, PrivacyRequest, PrivateRun, RgpConfig, mechanism_for
from hf_dp.batches.options import BatchOptions
from hf_dp.errors import DataError, DoesNotFitError, HfDpError, InvalidArgumentError
from hf_dp.noise import untouched_generators
from hf_dp.run import memory, physical_size
from hf_dp.run.memory import Tried, left_by_others, try_on
from hf_dp.run.options import RunOptions
from hf_dp.run.physical_size import largest_physical_batch, largest_that_fits, longest_thought_of

CPU = torch.device("cpu")
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
    plan = PrivacyRequest(
        num_examples=COUNT,
        expected_batch_size=expected,
        mechanism=DpSgdPlan(clipping_norm=0.1, noise_multiplier=1.0),
        max_steps=2,
    ).plan()
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
def artificial(monkeypatch):
    """Return ``find(mechanism, cost, budget, **given)``: the search where a step on n examples of
    T tokens takes ``cost(n, T)`` bytes, and ``budget`` are left."""

    def find(mechanism, cost, budget, **given):
        seen = []

        def try_on(device, step, most):
            step()
            took = cost(*seen[-1])
            return Tried(took) if took <= most else Tried(ended="it took too much")

        monkeypatch.setattr(physical_size, "try_on", try_on)
        monkeypatch.setattr(physical_size, "left_by_others", lambda *_: budget / 0.9 + 1)
        monkeypatch.setattr(physical_size, "_held", lambda *_: 0)
        monkeypatch.setattr(physical_size, "LIBRARIES", 0)
        rehearse = lambda batches, _: seen.append(tuple(batches[-1]["input_ids"].shape))  # noqa: E731
        return largest_physical_batch(mechanism.run, rehearse, adam(mechanism), **given)

    return find


# -- the search --


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 31, 32, 33, 157, 1000])
def test_the_search_comes_close_from_below(largest):
    tried = []
    found = largest_that_fits(lambda n: tried.append(n) or n <= largest, tolerance=0.05)
    assert 0.95 * largest - 1 < found <= largest
    assert len(tried) <= largest.bit_length() + 7


@pytest.mark.parametrize(("known", "limit"), [(3, 100), (40, 100), (100, 100), (7, 8)])
def test_the_search_goes_on_from_a_known_size(known, limit):
    tried = []
    found = largest_that_fits(lambda n: tried.append(n) or n <= 60, limit, known=known)
    assert found == max(known, min(60, limit))
    assert all(known < n <= limit for n in tried)


@pytest.mark.parametrize("budget", [1_000, 5_300, 12_000])
def test_the_largest_that_fits_is_found(tmp_path, artificial, budget):
    """Linear in tokens: all divisions of a number of tokens take the same."""
    found = artificial(mechanism_of(tmp_path), lambda n, t: 100 + 3 * n * t, budget, length=16)
    tokens = (budget - 100) // 3
    assert found.length == 16 and found.tokens % 16 == 0
    assert 0.94 * tokens - 16 <= found.tokens <= tokens
    assert found.examples == pytest.approx(min(300, found.tokens), rel=0.06)
    assert any(tried.bytes is None for *_, tried in found.tried)


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


def test_what_does_not_fit_names_length_and_limit(tmp_path, artificial):
    with pytest.raises(DoesNotFitError, match=r"(?s)1 example of 16 tokens.*take 2 MiB.*gradient_"):
        artificial(mechanism_of(tmp_path), lambda n, t: 9 * MIB, 2 * MIB, length=16)


# -- lengths --


def test_the_length_is_that_of_the_tokenizer_and_the_model(tmp_path):
    run = mechanism_of(tmp_path).run
    assert longest_thought_of(run, 7) == 7
    assert longest_thought_of(run, None) == 24  # the model's positions
    run.processing_class = tiny.tokenizer()
    run.processing_class.model_max_length = 12
    assert longest_thought_of(run, None) == 12


def test_roberta_has_fewer_positions_than_its_table_has_rows(tmp_path):
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


def test_a_length_that_the_model_does_not_take_is_named(tmp_path):
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


def test_what_this_process_holds_is_not_in_the_limit(monkeypatch):
    class Free:
        available = 10_000 * MIB

    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: Free)
    monkeypatch.setattr(memory, "_left_in_groups", lambda: 2**63)
    monkeypatch.setattr(memory, "taken", lambda: 500 * MIB)
    before = left_by_others(CPU)
    Free.available -= 3_000 * MIB  # rows of 3,000 MiB
    monkeypatch.setattr(memory, "taken", lambda: 3_500 * MIB)
    assert left_by_others(CPU) == before == 10_500 * MIB


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


def test_nothing_is_changed_by_a_search(tmp_path):
    mechanism = mechanism_of(tmp_path, tiny.model(dropout=0.1))
    optimizer = adam(mechanism)
    mechanism.run.training_data()
    mechanism.run.model.eval()
    before = states(mechanism, optimizer)
    found = mechanism.find_physical_batch(optimizer, most_examples=2)
    assert found.tried and states(mechanism, optimizer) == before
    assert mechanism.run.options.batches.physical_batch_size == 2
    assert mechanism.run.options.batches.max_tokens == 48


def test_nothing_is_changed_by_a_step_in_this_process(tmp_path):
    """As on a GPU."""
    mechanism = mechanism_of(tmp_path, tiny.model(dropout=0.1))
    optimizer = adam(mechanism)
    before = states(mechanism, optimizer)
    mechanism.run.model.train()
    batch = next(iter(mechanism.run.synthetic_batches()))
    train_mode = states(mechanism, optimizer)
    mechanism.run.model.eval()
    with untouched_generators(), physical_size._unchanged(mechanism.run.model, optimizer):
        mechanism.run.model.train()
        mechanism.rehearse([batch], optimizer)
        assert optimizer.state and states(mechanism, optimizer) not in (before, train_mode)
    mechanism.run.model.train()
    assert states(mechanism, optimizer) == train_mode


# -- memory --


def holding(mebibytes: int):
    def step() -> None:
        torch.ones(mebibytes, MIB // 4).add_(1)

    return step


def test_what_a_step_takes_is_measured():
    tried = try_on(CPU, holding(200), 2**40)
    assert tried.bytes == pytest.approx(200 * MIB, rel=0.1)


def test_a_step_that_takes_too_much_is_killed_and_this_process_goes_on():
    def endless() -> None:
        held = []
        while True:
            held.append(torch.ones(MIB))

    assert try_on(CPU, endless, 100 * MIB) == Tried(ended="it took too much and was killed")
    assert try_on(CPU, lambda: None, 100 * MIB).bytes is not None


def test_other_ends_of_a_step():
    def fail(error):
        raise error

    assert try_on(CPU, lambda: fail(MemoryError("no more")), MIB).ended == "MemoryError: no more"
    refused = try_on(CPU, lambda: torch.empty(2**60), MIB)
    assert refused.bytes is None and "can't allocate memory" in refused.ended
    assert try_on(CPU, lambda: fail(KeyError("oh")), MIB).error == "KeyError: 'oh'"
    killed = try_on(CPU, lambda: os.kill(os.getpid(), signal.SIGKILL), MIB)
    assert killed.ended.startswith("signal 9")


def test_a_gpu_that_runs_out_of_memory_is_caught(monkeypatch):
    """With a stand-in for the allocator: 300 bytes reserved before, 900 at the peak."""
    calls = []
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_reserved": 300,
        "max_memory_reserved": 900,
        "mem_get_info": (5_000, 8_000),
    }.items():
        monkeypatch.setattr(
            torch.cuda, name, lambda *_, name=name, value=value: calls.append(name) or value
        )
    cuda = torch.device("cuda", 0)
    assert left_by_others(cuda) == 5_300
    assert try_on(cuda, lambda: None, 0) == Tried(600)

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    assert try_on(cuda, fail, 0) == Tried(ended="CUDA out of memory")
    assert calls[-1] == "empty_cache" and "reset_peak_memory_stats" in calls
    assert try_on(cuda, lambda: {}["a"], 0) == Tried(error="KeyError: 'a'")


def test_control_groups_limit_what_is_left(tmp_path):
    for name, text in {
        "memory.max": "1000",
        "memory.current": "700",
        "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
    }.items():
        (tmp_path / name).write_text(text)
    names = ("memory.max", "memory.current", "")
    assert memory._left_in(tmp_path, *names) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_in(tmp_path, *names) > 2**60


def test_a_real_search_finds_the_limit_and_trains_on(tmp_path, monkeypatch):
    """Steps of the larger sizes take too much and are killed."""
    mechanism = mechanism_of(tmp_path, wide_model())
    optimizer = adam(mechanism)
    mechanism.run.training_data()
    monkeypatch.setattr(physical_size, "LIBRARIES", 0)
    monkeypatch.setattr(physical_size, "left_by_others", lambda *_: 150 * MIB)
    found = mechanism.find_physical_batch(optimizer, length=512)
    failed = [(number, tried) for number, _, tried in found.tried if tried.bytes is None]
    assert any("killed" in tried.ended for _, tried in failed)
    assert 512 <= found.tokens < 512 * COUNT
    assert all(number * length > 0 for number, length, _ in found.tried)
    for batches in itertools.islice(mechanism.logical_batches(), 1):
        assert max(len(batch["labels"]) for batch in batches) <= found.examples


@pytest.mark.parametrize("state", [True, False])
def test_the_state_of_the_optimizer_counts(tmp_path, monkeypatch, state):
    """AdamW holds twice the weights, which do not exist before its first step."""
    model = tiny.model()
    model.bert.embeddings.word_embeddings = torch.nn.Embedding(800_000, 16, padding_idx=0)
    model.bert.embeddings.word_embeddings.requires_grad_(state)
    mechanism = mechanism_of(tmp_path, model)
    found = mechanism.find_physical_batch(adam(mechanism), most_examples=1)
    table = 4 * 16 * 800_000
    assert (found.tried[0][2].bytes > 3 * table) == state  # two moments and a gradient


# -- several processes --


def size_of_this_process(folder):
    def run():
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        mechanism = mechanism_of(folder / str(rank), wide_model())
        physical_size.LIBRARIES = 0
        physical_size.left_by_others = lambda *_: (100 if rank else 200) * MIB
        found = mechanism.find_physical_batch(adam(mechanism), length=512)
        return found.examples, found.tokens, len(found.tried)

    return run


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_use_one_number(tmp_path, machines):
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if machines == 2 else {}
    ended = outcomes(2, size_of_this_process(tmp_path), lambda rank: local)
    assert not any(each.exit for each in ended), [each.trace for each in ended]
    (one, tokens, tries), (other, other_tokens, other_tries) = (each.result for each in ended)
    assert (one, tokens) == (other, other_tokens)
    assert tries and bool(other_tries) == (machines == 2)


def test_a_search_that_fails_in_one_process_stops_both(tmp_path, monkeypatch):
    def run():
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        mechanism = mechanism_of(tmp_path / str(rank), wide_model())
        physical_size.left_by_others = lambda *_: 2**40 if rank else 0
        mechanism.find_physical_batch(adam(mechanism), length=512, most_examples=1)

    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ended = outcomes(2, run, lambda rank: local)
    assert [each.error for each in ended] == ["DoesNotFitError", "DistributedError"]


# -- a Trainer --


@pytest.fixture
def no_statement(monkeypatch):
    """Statements take seconds and are not what is tested."""
    monkeypatch.setattr(tiny.DPTrainer, "_write_privacy_files", lambda *_, **__: None)


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
def test_on_a_gpu_the_largest_batch_runs_and_nothing_is_changed(tmp_path, monkeypatch):
    """Within the limit, a step takes what was measured; beyond it, or out of memory, it does not
    fit."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    mechanism = mechanism_of(tmp_path, wide_model().cuda())
    optimizer = adam(mechanism)
    mechanism.run.training_data()
    mechanism.run.model.train()
    before, device_state = states(mechanism, optimizer), torch.cuda.get_rng_state()
    monkeypatch.setattr(physical_size, "left_by_others", lambda *_: 400 * MIB)
    found = mechanism.find_physical_batch(optimizer, length=512)
    assert states(mechanism, optimizer) == before
    assert torch.equal(torch.cuda.get_rng_state(), device_state)
    assert 512 <= found.tokens < 512 * COUNT
    for batches in itertools.islice(mechanism.logical_batches(), 2):
        torch.cuda.reset_peak_memory_stats()
        mechanism.clip(batches)
        assert torch.cuda.max_memory_reserved() <= 400 * MIB
    total = torch.cuda.mem_get_info()[1]
    tried = try_on(cuda, lambda: torch.empty(2 * total, device=cuda), 0)
    assert tried.bytes is None and "out of memory" in tried.ended
    assert try_on(cuda, lambda: torch.empty(64 * MIB, device=cuda).add_(1), 0).bytes is not None
