"""Random numbers that the examples of a batch share are found, whatever draws them."""

import random

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from models import ARCHITECTURES, collate, deberta_v2, together
from torch import nn

from hf_dp.clipping import self_check
from hf_dp.clipping.draws import refuse_shared_draws
from hf_dp.errors import SelfCheckError, UnsupportedArgumentError
from hf_dp.losses import per_example_loss
from hf_dp.tasks.models import turn_off_dropout


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dropout_of_ones_own_is_allowed(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build(dropout=0.3).train()
    batch = collate(model, architecture.examples(model, (5, 1, 3)))
    with architecture.precision():
        refuse_shared_draws(model, together, batch, 3)


def texts() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 32, (3, 6))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def deberta():
    """With the dropout of the table of relative positions, one mask for the batch."""
    return deberta_v2(0.1, torch.float32, relative_attention=True, position_buckets=8)


def opt():
    return ARCHITECTURES["opt"].build(0.1, torch.float32, layerdrop=0.1)


def funnel():
    shape = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]}
    config = hf.FunnelConfig(vocab_size=32, pad_token_id=0, **shape)
    return hf.FunnelForSequenceClassification(config)


@pytest.mark.parametrize(
    ("build", "said", "names"),
    [
        (
            deberta,
            r"layer.0.attention.self.pos_dropout` draws .*`without_dropout: \[pos_dropout\]`",
            ["pos_dropout"],
        ),
        (
            opt,
            r"`model.decoder` draws .*rand: 1 numbers for 3 examples, 1 for 6.*\[layerdrop\]`",
            ["layerdrop"],
        ),
        (funnel, "sin_dropout` draws", ["sin_dropout", "cos_dropout"]),
    ],
)
def test_what_stock_models_share_is_refused_by_name_until_it_is_off(build, said, names):
    model, batch = build().train(), texts()
    language = isinstance(model, hf.OPTForCausalLM)
    batch["labels"] = batch["input_ids"] if language else torch.zeros(3, dtype=torch.long)
    with pytest.raises(SelfCheckError, match=said):
        refuse_shared_draws(model, per_example_loss, batch, 3)
    turn_off_dropout(model, names)
    refuse_shared_draws(model, per_example_loss, batch, 3)
    others = [module.p for module in model.modules() if hasattr(module, "p") and module.p > 0]
    assert others or language  # and nothing else is off


@pytest.mark.parametrize("seed", range(3))
def test_experts_that_take_other_tokens_each_time_are_no_reason(seed):
    """Dropout inside an expert is as large as its tokens, and jitter moves them."""
    torch.manual_seed(seed)
    config = hf.SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2,
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, router_jitter_noise=0.5,
    )  # fmt: skip
    model = hf.SwitchTransformersForConditionalGeneration(config).train()
    batch = texts()
    refuse_shared_draws(model, per_example_loss, {**batch, "labels": batch["input_ids"]}, 3)


class Draws(nn.Module):
    """One that calls ``draw`` with its input (b, 4)."""

    def __init__(self, draw):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x):
        return self.inner(x) * self.draw(x)


SHARED = {
    "one mask": (lambda x: nn.functional.dropout(torch.ones(4), 0.5), "dropout: 4 numbers"),
    "one mask, from a tensor's method": (lambda x: torch.empty(4).bernoulli_(0.5), "bernoulli: 4"),
    "its own generator": (lambda x: torch.rand(1, generator=torch.Generator()), "rand: 1 numbers"),
    "one mask for a channel, whose places are the examples": (
        lambda x: nn.functional.dropout2d(x.T[None, :, None], 0.5)[0, :, 0].T,
        "dropout2d: 4 numbers",
    ),
    "a permutation": (lambda x: x[torch.randperm(len(x))].detach() * 0 + 1, "randperm: 3"),
    "attention": (
        lambda x: nn.functional.scaled_dot_product_attention(
            torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4), dropout_p=0.5
        ).mean(),
        "attention: 8 numbers",
    ),
    "Python's": (lambda x: float(random.random() < 0.5), "Python's `random` or by NumPy"),
    "NumPy's": (lambda x: float(np.random.rand() < 0.5), "Python's `random` or by NumPy"),
    "not always": (
        lambda x: torch.rand(len(x), 1) if len(x) < 4 else 1.0,
        "1 times for 3 examples, and 0 times for 6",
    ),
}
OWN = {
    "a mask each": lambda x: nn.functional.dropout(x, 0.5),
    "stochastic depth": lambda x: (0.8 + torch.rand(len(x), 1)).floor() / 0.8,
    "features": lambda x: nn.functional.dropout1d(x[None], 0.5)[0],
    "noise": lambda x: x + torch.randn_like(x),
    "none": lambda x: nn.functional.dropout(torch.ones(4), 0.5, training=False),
}


def loss(model, batch):
    return model(batch["x"]).square().sum(1)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_is_refused(name):
    draw, said = SHARED[name]
    with pytest.raises(SelfCheckError, match=said):
        refuse_shared_draws(Draws(draw).train(), loss, {"x": torch.randn(3, 4)}, 3)


@pytest.mark.parametrize("name", OWN)
def test_what_is_ones_own_is_allowed(name):
    refuse_shared_draws(Draws(OWN[name]).train(), loss, {"x": torch.randn(3, 4)}, 3)


def test_the_batch_must_have_the_examples_first():
    with pytest.raises(SelfCheckError, match=r"shape \(6,\), got \(3,\)"):
        refuse_shared_draws(
            Draws(lambda x: 1.0), lambda model, batch: loss(model, batch)[:3],
            {"x": torch.randn(3, 4)}, 3,
        )  # fmt: skip


def test_nothing_of_the_check_is_left_behind():
    before = torch.nn.modules.module._global_forward_pre_hooks.copy()
    originals = [nn.functional.dropout, nn.functional.scaled_dot_product_attention]
    with pytest.raises(SelfCheckError):
        refuse_shared_draws(Draws(SHARED["one mask"][0]), loss, {"x": torch.randn(3, 4)}, 3)
    assert torch.nn.modules.module._global_forward_pre_hooks == before
    assert [nn.functional.dropout, nn.functional.scaled_dot_product_attention] == originals


class SharedTable(tiny.BertForSequenceClassification):
    """A table of positions with one dropout mask for the whole batch."""

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.ones(config.hidden_size))
        self.table_dropout = nn.Dropout(0.1)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        table = self.table_dropout(self.table)
        hidden = self.bert(input_ids, attention_mask).last_hidden_state[:, 0] * table
        return hf.modeling_outputs.SequenceClassifierOutput(logits=self.classifier(hidden))


def trainer_of(folder, size):
    """A trainer of a model with a shared table, and the size of its physical batches."""
    given = {"model": SharedTable(tiny.model().config)}
    return tiny.trainer(folder, given=given, per_device_train_batch_size=size, max_steps=1)


def test_without_neighbors_nothing_is_shared(tmp_path):
    trainer_of(tmp_path, 1).train()


def test_a_size_that_grew_after_the_check_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, 1)
    trainer.run.check_engine()
    trainer.args.per_device_train_batch_size = 4
    run = trainer.training.sync()  # as each step does
    with (
        run.engine() as engine,
        pytest.raises(UnsupportedArgumentError, match="got 4: the self-check never"),
    ):
        run.feed(engine, [])
    with pytest.raises(SelfCheckError, match="`table_dropout` draws"):
        trainer.run.check_engine()


def test_a_size_that_is_found_is_checked(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, 1)
    trainer.run.check_engine()
    found = 4

    def find(*args, **options):
        trainer.args.per_device_train_batch_size = found  # which the run's options follow
        return found

    monkeypatch.setattr("hf_dp.mechanisms.base.largest_physical_batch", find)
    with pytest.raises(SelfCheckError, match="`table_dropout` draws"):
        trainer.mechanism.find_physical_batch(None)


@pytest.mark.parametrize("seed", range(2))
def test_stochastic_depth_is_no_matter_of_chance(seed):
    """Each example skips layers for itself, which must not make its loss differ in the check."""
    model = ARCHITECTURES["dinov2"].build(dtype=torch.float32, drop_path_rate=0.5)
    torch.manual_seed(seed)
    images = {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 1])}
    alone = [{name: value[i : i + 1] for name, value in images.items()} for i in range(3)]
    self_check(model, per_example_loss, images, alone)


def test_no_run_begins_with_a_shared_mask(tmp_path):
    trainer = trainer_of(tmp_path, 16)
    with pytest.raises(SelfCheckError, match="`table_dropout` draws random numbers that the"):
        trainer.train()
    assert len(trainer.ledger) == 0
