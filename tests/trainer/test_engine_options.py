"""The engine's options through the trainer: they change memory and time, and nothing else."""

import functools

import pytest
import tiny
import torch
from data_paths import PATHS, trainer_of
from torch import Tensor
from watch import watch

from hf_dp.clipping import engine as engine_module
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import UnaccountedGradientError, UnsupportedLossError
from hf_dp.run.private_run import PrivateRun
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import ParamConfig, PvalConfig


def trained(folder, **options) -> dict[str, Tensor]:
    trainer = tiny.trained(tiny.trainer(folder, insecure_seed=3, **options))
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_all_ways_give_the_same_weights(tmp_path, without_noise, unchecked):
    ways = {
        "reference": {},
        "physical 1": {"per_device_train_batch_size": 1},
        "physical 3": {"per_device_train_batch_size": 3},
        "by tokens": {"per_device_train_batch_size": 64, "max_tokens_per_physical_batch": 9},
        "checkpointing": {"gradient_checkpointing": True},
        "records held": {"gradient_checkpointing": True, "clipping_strategy": "book_keeping"},
    } | {strategy: {"clipping_strategy": strategy} for strategy in STRATEGIES}
    step = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 2}
    results = {name: trained(tmp_path / name, **step, **options) for name, options in ways.items()}
    for name, weights in results.items():
        for parameter, value in weights.items():
            error = (value - results["reference"][parameter]).abs().max()
            assert error <= 1e-6, (name, parameter)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "book_keeping"),
        ({"gradient_checkpointing": True}, "two_pass"),
        ({"gradient_checkpointing": True, "clipping_strategy": "book_keeping"}, "book_keeping"),
        ({"clipping_strategy": "two_pass"}, "two_pass"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_checkpointing_means_two_passes_unless_said_otherwise(
    tmp_path, monkeypatch, options, expected
):
    ways = {name: watch(monkeypatch, engine_module, name) for name in ("book_keeping", "two_pass")}
    # (All rows are drawn: where none is, nothing is clipped.)
    tiny.trainer(tmp_path, max_steps=1, expected_batch_size=40, **options).train()
    assert [name for name, calls in ways.items() if calls] == [expected]


def test_tokens_that_only_the_collator_makes_are_counted(tmp_path):
    path = PATHS["texts that the collator tokenizes"]
    trainer = trainer_of(tmp_path, path, max_tokens_per_physical_batch=9)
    plan, sizes = trainer.privacy_plan, []
    for _ in range(20):  # a few draws may have no two short rows
        for draw in trainer.run.draws(plan.sampler()):
            sizes += [batch["input_ids"].shape for batch in draw]
    assert all(rows == 1 or rows * width <= 9 for rows, width in sizes)
    assert any(rows > 1 for rows, _ in sizes)


class Deaf(torch.optim.SGD):
    """An optimizer whose tensors are not the model's, as when the model moved after it was made."""

    def step(self, closure=None):
        return None


def test_weights_that_never_change_are_an_error(tmp_path):
    model = tiny.model()
    optimizer = Deaf(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = tiny.trainer(tmp_path, given={"model": model, "optimizers": (optimizer, schedule)})
    with pytest.raises(
        UnaccountedGradientError, match="changed none of the model's trainable weights"
    ):
        trainer.train()
    assert trainer.ledger.steps() == 1  # what was spent is recorded


def test_a_warmup_that_starts_at_zero_is_no_such_error(tmp_path):
    trainer = tiny.trainer(tmp_path, warmup_steps=2, lr_scheduler_type="linear", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_forward_without_logits_is_refused(tmp_path, monkeypatch):
    trainer = tiny.trainer(tmp_path)
    forward = type(trainer.model).forward

    @functools.wraps(forward)
    def without_logits(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = None
        return output

    monkeypatch.setattr(type(trainer.model), "forward", without_logits)
    with pytest.raises(UnsupportedLossError, match="returned no logits"):
        trainer.train()


@pytest.mark.parametrize(
    "peft_config",
    [
        None,
        RgpConfig(rank=2),
        PvalConfig(unfreeze_ratio=0.1),
        ParamConfig(unfreeze_ratio=0.1, selection_sample_rate=0.5, selection_noise_multiplier=1.0),
    ],
    ids=["all", "rgp", "pval", "param"],
)
@pytest.mark.usefixtures("unchecked")
def test_every_engine_leaves_room_for_the_rounding_of_its_sums(tmp_path, monkeypatch, peft_config):
    """What a sum is clipped to comes from the plan, and not from clipping_norm."""
    for place in ("hf_dp.plans.dp_sgd", "hf_dp.tuners.base"):
        monkeypatch.setattr(f"{place}.clipping_share", lambda *draw: 0.5)
    clipped_to = watch(
        monkeypatch, PrivateRun, "feed", before=lambda run, engine, *_, **__: engine.clipping_norm
    )
    options = {"accountant": "rdp", "per_example_max_grad_norm": 0.3, "max_steps": 1}
    tiny.trainer(tmp_path, given={"peft_config": peft_config}, **options).train()
    looks = isinstance(peft_config, ParamConfig)  # one draw to choose by
    assert clipped_to == [0.15] * (1 + looks)
