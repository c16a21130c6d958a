"""Generation in several processes: each answers for its share of the rows, also where FSDP2 shards
the model, whose processes then wait for each other at each token."""

from __future__ import annotations

import pytest
from generating import alone, causal, texts, trainer
from processes import on_processes, where_accelerate_shards

ROWS = 6


def ending_early():
    """A model that ends the answer to one of two rows early, which two processes answer at once."""
    model = causal()
    found = [alone(model, row) for row in texts(ROWS, 1)]
    ends = next(
        token
        for one, other in zip(found[::2], found[1::2], strict=True)
        for token in one[:-1]
        if token not in other
    )
    model.generation_config.eos_token_id = ends
    return model


def answered(folder):
    tested = trainer(
        folder,
        ending_early(),
        learning_rate=1e-9,  # the answers stay those of the model before
        per_device_eval_batch_size=1,
        max_steps=1,
    )
    tested.train()
    types = {type(each.data).__name__ for each in tested.model.parameters()}
    found = tested.predict(texts(ROWS, 1))
    return found.predictions.tolist(), found.label_ids.tolist(), types


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_answer_as_one(sharded, tmp_path):
    found = (
        where_accelerate_shards(2, "GPT2Block", lambda: answered(tmp_path))
        if sharded
        else on_processes(2, answered, tmp_path)
    )
    model = ending_early()
    expected = [alone(model, row) for row in texts(ROWS, 1)]
    for predictions, labels, types in found:
        assert types == {"DTensor" if sharded else "Tensor"}
        assert predictions == expected
        assert [[label for label in row if label != -100] for row in labels] == [
            [label for label in row["labels"] if label != -100] for row in texts(ROWS, 1)
        ]
