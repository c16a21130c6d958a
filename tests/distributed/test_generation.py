"""Generation in several processes: each answers for its share of the rows, also where FSDP2 shards
the model, whose processes then wait for each other at each token."""

from __future__ import annotations

import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from generating import alone, causal, texts, trainer
from processes import outcomes

ROWS = 10
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


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


def answered(folder, sharded: bool):
    if sharded:  # accelerate shards on accelerators only: tell it that there are some
        init = PartialState.__init__

        def with_accelerators(self, *args, **kwargs):
            init(self, *args, **kwargs)
            if self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = DistributedType.MULTI_GPU

        PartialState.__init__ = with_accelerators
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


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_answer_as_one(sharded, tmp_path):
    ended = outcomes(2, lambda: answered(tmp_path, sharded), lambda rank: FSDP2 if sharded else {})
    assert not any(each.exit for each in ended), [each.trace for each in ended]
    model = ending_early()
    expected = [alone(model, row) for row in texts(ROWS, 1)]
    for predictions, labels, types in (each.result for each in ended):
        assert types == {"DTensor" if sharded else "Tensor"}
        assert predictions == expected
        assert [[label for label in row if label != -100] for row in labels] == [
            [label for label in row["labels"] if label != -100] for row in texts(ROWS, 1)
        ]
