"""Generation and preferences in several processes, also where FSDP2 shards the model: processes then
wait for each other at each token, or run the model twice before each backward."""

from __future__ import annotations

import generating
import preferences
import pytest
from processes import on_processes, where_accelerate_shards
from silence import PLAIN_STEPS, silenced, weights, whole

ROWS = 6
SHARDED = pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])


def on_two(sharded: bool, layer: str, function):
    return where_accelerate_shards(2, layer, function) if sharded else on_processes(2, function)


def ending_early():
    """A model that ends the answer to one of two rows early, which two processes answer at once."""
    model = generating.causal()
    found = [generating.alone(model, row) for row in generating.texts(ROWS, 1)]
    ends = next(
        token
        for one, other in zip(found[::2], found[1::2], strict=True)
        for token in one[:-1]
        if token not in other
    )
    model.generation_config.eos_token_id = ends
    return model


def answered(folder):
    tested = generating.trainer(
        folder,
        ending_early(),
        learning_rate=1e-9,  # the answers stay those of the model before
        per_device_eval_batch_size=1,
        max_steps=1,
        accountant="rdp",
    )
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


def trained(folder):
    """The weights after a step with every pair and without noise; whole."""
    options = {"expected_batch_size": preferences.ROWS, "max_steps": 1, **PLAIN_STEPS}
    made = silenced(preferences.trainer(folder, **options))
    made.train()
    found = weights(made)
    return {n: whole(w) for n, w in found.items()}, {type(w).__name__ for w in found.values()}


@SHARDED
def test_two_processes_make_the_update_of_one(sharded, tmp_path):
    expected, _ = trained(tmp_path / "one")
    start = dict(preferences.moved().named_parameters())
    update = max(float((expected[n] - start[n].detach()).abs().max()) for n in start)
    assert update > 1e-3
    for each, types in on_two(sharded, "Qwen2DecoderLayer", lambda: trained(tmp_path / "two")):
        assert types == {"DTensor" if sharded else "Tensor"}
        assert max(float((each[n] - expected[n]).abs().max()) for n in start) < 1e-4 * update
