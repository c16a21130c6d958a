"""What chooses what trains, and DP-FP, in several processes: as in one, or refused by name."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import generating
import preferences
import pytest
import tiny
import torch
import users
from processes import on_processes, outcomes, results, where_accelerate_shards
from silence import (
    PLAIN_STEPS,
    distance,
    plant_a_unit_that_all_processes_draw,
    silenced,
    weights,
    whole,
)
from transformers import set_seed

from hf_dp.errors import InvalidArgumentError
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import ParamConfig, PvalConfig

pytestmark = pytest.mark.usefixtures("unchecked")

FROST = {"unfreeze_ratio": 0.5, "selection_iterations": 1, "selection_sample_rate": 1.0}
DP_FP = {"privacy_mode": "dp_fp", "dp_fp_variant": "published"}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "frost": (lambda: FrostConfig(**FROST, task_type="SEQ_CLS"), {}),
    "frost by 2-norms": (lambda: FrostConfig(**FROST, magnitude="mg", norm_order=2, task_type="SEQ_CLS"), {}),
    "frost twice": (lambda: FrostConfig(**FROST, num_selections=2, task_type="SEQ_CLS"), {}),
    "param": (lambda: ParamConfig(unfreeze_ratio=0.3, selection_sample_rate=1.0, task_type="SEQ_CLS"), {}),
    "pval": (lambda: PvalConfig(unfreeze_ratio=0.3, task_type="SEQ_CLS"), {}),
    "dp_fp as published": (None, {**DP_FP, "noise_multiplier": 1.0, "target_epsilon": None, "num_micro_batches": 1}),
    "private encoder": (None, {**DP_FP, "dp_fp_variant": "private_encoder"}),
}  # fmt: skip
QUICK = ("frost by 2-norms", "private encoder")


def trained(folder: Path, peft: Any, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The weights after a run that draws every example and has no noise."""
    set_seed(0)
    values = {
        "expected_batch_size": 40, "per_device_train_batch_size": 8, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_steps": 2, "target_epsilon": 8.0,
    }  # fmt: skip
    given = {
        "model": tiny.model().double(),
        "peft_config": peft() if peft else None,
        "train_dataset": tiny.dataset().map(lambda row: {"label": 1}),
    }
    made = tiny.trainer(folder, given=given, **{**values, **options, **more})
    silenced(made).train()
    return weights(made)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in METHODS]
)
def test_two_processes_do_what_one_does(method, tmp_path):
    peft, options = METHODS[method]
    alone = trained(tmp_path / "one", peft, options)
    first, second = results(2, lambda: trained(tmp_path / "two", peft, options))
    assert first.keys() == alone.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one.ledger.to_list() == two.ledger.to_list()
    assert disagreements(two) == []


def test_processes_of_rgp_share_their_carriers(tmp_path):
    def train():
        config = RgpConfig(rank=2, task_type="SEQ_CLS")
        made = tiny.trainer(tmp_path, given={"peft_config": config}, accountant="rdp", max_steps=2)
        torch.manual_seed(made.run.processes.rank)  # carriers start at random
        made.train()
        return weights(made)

    first, second = results(2, train)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_dp_fp_is_refused_by_name(tmp_path):
    def train():
        options = {**DP_FP, "dp_fp_variant": "frozen", "target_epsilon": 8.0}
        tiny.trainer(tmp_path, **options).train()

    for each in outcomes(2, train):
        assert "Expected one process with dp_fp_variant='frozen', got 2" in each.message
    assert not (tmp_path / "ledger.jsonl").exists() or not read_run(tmp_path).ledger.steps()


# -- users: each that is drawn is one process's, clipped once --

COUNT = len(set(users.owners()))


def trained_by_users(folder, **options):
    """The weights after steps that draw every user, without noise, in float64."""
    labeled = users.by_user().map(lambda row: {"label": 1})  # so that gradients do not cancel
    given = {"model": tiny.model().double(), "train_dataset": labeled}
    options |= {"expected_batch_size": COUNT, "max_steps": 2, **PLAIN_STEPS}
    made = users.trainer(folder, given=given, **options)
    silenced(made).train()
    return weights(made)


@functools.cache
def alone_by_users():
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_users(folder, per_device_train_batch_size=40)


def test_the_update_of_users_does_not_depend_on_the_processes(tmp_path):
    """Three processes take physical batches of 2 rows, so users of up to 7 rows come in parts."""
    found = results(3, lambda: trained_by_users(tmp_path / "t", per_device_train_batch_size=2))
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in found[0])
    assert distance(found[0], alone_by_users(), "bert") < 1e-9
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
    expected = alone_by_users()
    plant_a_unit_that_all_processes_draw(monkeypatch)
    found = results(2, lambda: trained_by_users(tmp_path / "two"))
    assert distance(found[0], expected, "bert") > 1e-3


# -- generation and preferences, also where FSDP2 shards the model --

ROWS = 6
SHARDED = pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])


def on_two(sharded: bool, layer: str, function):
    return where_accelerate_shards(2, layer, function) if sharded else on_processes(2, function)


def ending_early():
    """A model that ends the answer to one of two rows early, which two processes answer at once."""
    model = generating.causal()
    found = [generating.alone(model, row) for row in generating.texts(ROWS, 1)]
    twos = zip(found[::2], found[1::2], strict=True)
    ends = (token for one, other in twos for token in one[:-1] if token not in other)
    model.generation_config.eos_token_id = next(ends)
    return model


def answered(folder):
    # At this rate the answers stay those of the model before.
    options = {"learning_rate": 1e-9, "per_device_eval_batch_size": 1, "accountant": "rdp"}
    tested = generating.trainer(folder, ending_early(), max_steps=1, **options)
    tested.train()
    types = {type(each.data).__name__ for each in tested.model.parameters()}
    found = tested.predict(generating.texts(ROWS, 1))
    return found.predictions.tolist(), found.label_ids.tolist(), types


@SHARDED
def test_two_processes_answer_as_one(sharded, tmp_path):
    found = on_two(sharded, "GPT2Block", lambda: answered(tmp_path))
    model = ending_early()
    rows = generating.texts(ROWS, 1)
    for predictions, labels, types in found:
        assert types == {"DTensor" if sharded else "Tensor"}
        assert predictions == [generating.alone(model, row) for row in rows]
        assert [labeled(row) for row in labels] == [labeled(row["labels"]) for row in rows]


def labeled(row: list[int]) -> list[int]:
    return [label for label in row if label != -100]


def trained_on_pairs(folder):
    """The weights after a step with every pair and without noise; whole."""
    options = {"expected_batch_size": preferences.ROWS, "max_steps": 1, **PLAIN_STEPS}
    made = silenced(preferences.trainer(folder, **options))
    made.train()
    found = weights(made)
    return {n: whole(w) for n, w in found.items()}, {type(w).__name__ for w in found.values()}


@SHARDED
def test_two_processes_make_the_update_of_one(sharded, tmp_path):
    expected, _ = trained_on_pairs(tmp_path / "one")
    start = dict(preferences.moved().named_parameters())
    update = max(float((expected[n] - start[n].detach()).abs().max()) for n in start)
    assert update > 1e-3
    found = on_two(sharded, "Qwen2DecoderLayer", lambda: trained_on_pairs(tmp_path / "two"))
    for each, types in found:
        assert types == {"DTensor" if sharded else "Tensor"}
        assert max(float((each[n] - expected[n]).abs().max()) for n in start) < 1e-4 * update
