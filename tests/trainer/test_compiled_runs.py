"""Runs with torch_compile=True: the same weights, compiled before the first draw and never after."""

import pytest
import silence
import tiny
import torch
import users
from peft import LoraConfig
from processes import results
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2ForSequenceClassification, TrainerCallback

from hf_dp.batches.loader import BatchOptions
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from hf_dp.run.options import RunOptions
from hf_dp.tuners.rgp import RgpConfig

ONE = {"shapes": "one", "longest_row": 9, "insecure_seed": 1, "per_device_train_batch_size": 4}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


class Graphs(TrainerCallback):
    """Notes how many graphs were compiled so far, and what the losses are."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, *args, **kwargs):
        self.seen.append(counters["stats"]["unique_graphs"])


def trainer(folder, model=None, cls=tiny.DPTrainer, peft_config=None, **options):
    given = {"model": model or tiny.model(), "callbacks": [Graphs()], "peft_config": peft_config}
    return tiny.trainer(folder, cls=cls, given=given, **{**ONE, **options})


def test_a_compiled_run_ends_with_the_weights_of_another(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", lora_dropout=0.0)
    runs = (("full", None, "one", 1), ("lora", adapter, "few", 4))
    for name, config, shapes, count in runs:
        ordinary, compiled = (
            tiny.trained(
                trainer(
                    tmp_path / f"{name}{len(options)}", peft_config=config, shapes=shapes, **options
                )
            )
            for options in ({}, COMPILED)
        )
        assert len(compiled.run.engine_check.compiled) == count
        assert ordinary.run.engine_check.compiled is None
        assert ordinary.ledger.events == compiled.ledger.events
        expected, found = tiny.weights(ordinary.model), tiny.weights(compiled.model)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # of a rate of 1e-2
        (graphs,) = (c for c in compiled.callback_handler.callbacks if isinstance(c, Graphs))
        assert len(graphs.seen) == 4 and len({*graphs.seen}) == 1  # none after the first draw


@pytest.mark.slow
def test_two_compiled_processes_make_the_update_of_one(tmp_path):
    options = {"shapes": "one", "longest_row": 9, "per_device_train_batch_size": 4} | COMPILED
    given = ("bert", torch.float64)
    found = results(2, lambda: silence.trained(tmp_path / "two", *given, **options))
    expected = silence.trained(tmp_path / "one", *given, per_device_train_batch_size=40)
    for weights in found:
        assert silence.distance(weights, expected, "bert") < 1e-9


@pytest.mark.slow
def test_dropout_differs_between_steps(tmp_path):
    """Two steps of the same batch, at the same weights."""
    made = trainer(tmp_path, tiny.model(0.5), **COMPILED)
    made.run.check_engine()
    reads = made.get_train_dataloader()
    batches = reads.collate_fn(reads.dataset.__getitems__(range(5)))
    made.model.train()
    one, other = (users.flat(made.mechanism.clip(batches).values) for _ in range(2))
    assert float((one - other).norm()) > 0.01 * float(one.norm()) > 0


def test_another_shape_after_the_check_is_an_error_by_name(tmp_path):
    made = trainer(tmp_path, **COMPILED)
    made.run.check_engine()
    made.args.per_device_train_batch_size = 5
    reads = made.get_train_dataloader()
    batches = reads.collate_fn(reads.dataset.__getitems__(range(5)))
    with pytest.raises(UnsupportedModelError, match=r"shapes \[\(5, 9\).*change nothing after"):
        made.mechanism.clip(batches)


@pytest.mark.parametrize(("options", "says"), [
    ({"shapes": "any", "longest_row": None}, r"`torch_compile` to be False with shapes='any'.*longest_row"),
    ({"auto_physical_batch_size": True}, "`auto_physical_batch_size` to be left at False"),
    ({"privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder", "noise_multiplier": None, "target_epsilon": 3.0}, "`shapes` to be 'any' with"),
    ({"max_tokens_per_physical_batch": 64}, "shapes"),
])  # fmt: skip
def test_what_cannot_run_compiled_is_refused_by_name(options, says, tmp_path):
    with pytest.raises(InvalidArgumentError, match=says):
        trainer(tmp_path, **{**COMPILED, **options}).get_train_dataloader()


def test_a_tuner_with_an_engine_of_its_own_is_refused(tmp_path):
    made = trainer(tmp_path, peft_config=RgpConfig(rank=2), **COMPILED)
    with pytest.raises(UnsupportedArgumentError, match="`torch_compile` to be False with"):
        made.train()
    with pytest.raises(UnsupportedArgumentError, match="shapes='any'"):
        RunOptions(BatchOptions(4), torch_compile=True)


def test_a_classifier_that_reads_by_tokens_is_refused_before_the_first_draw(tmp_path):
    config = GPT2Config(
        vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16, pad_token_id=0
    )
    made = trainer(tmp_path, GPT2ForSequenceClassification(config), **COMPILED)
    with pytest.raises(UnsupportedModelError, match="cannot compile GPT2ForSeq.*reads by tokens"):
        made.train()
    assert made.ledger.steps() == 0


def test_gradient_checkpointing_is_refused_before_the_first_draw(tmp_path):
    made = trainer(tmp_path, gradient_checkpointing=True, **COMPILED)
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing"):
        made.train()
    assert made.ledger.steps() == 0
