"""A resumed run trains what its checkpoint trained, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dp import DPTrainer
from hf_dp.errors import ConfigError
from hf_dp.run.witnesses import read_run
from hf_dp.tuners.public_choice import BitFitConfig, RandomConfig, TopBlocksConfig

pytestmark = pytest.mark.usefixtures("unchecked")

MODES = ("dp_sgd", "non_private")


def trainer(folder: Path, config=None, model=None, **options):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, **options}
    if options.get("privacy_mode") != "non_private":
        options["accountant"] = "rdp"
    if model is None:
        model = tiny.model(num_hidden_layers=2)
    given = {"peft_config": config, "model": model}
    return tiny.trainer(folder, given=given, **options)


def resume(folder: Path, config=None, model=None, **options):
    """Go on to step 3; a refusal comes before it, and before anything is spent."""
    made = trainer(folder, config, model, max_steps=3, **options)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return made


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": ["query"], **options})


CHANGES = {
    "another seed": (RandomConfig(unfreeze_ratio=0.4), RandomConfig(unfreeze_ratio=0.4), 4),
    "a seed of its own": (RandomConfig(), RandomConfig(selection_seed=5), 3),
    "another ratio": (RandomConfig(), RandomConfig(unfreeze_ratio=0.5), 3),
    "other blocks": (TopBlocksConfig(blocks=1), TopBlocksConfig(blocks=2), 3),
    "another rank": (lora(), lora(r=4), 3),
    "layers of the same shape": (lora(), lora(target_modules=["value"]), 3),
    "more layers": (lora(), lora(target_modules=["query", "value"]), 3),
    "another module in full": (lora(), lora(modules_to_save=["pooler"]), 3),
}


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        *((change, "dp_sgd") for change in CHANGES),
        ("another seed", "non_private"),
        ("another rank", "non_private"),
    ],
)
def test_a_resume_that_trains_other_parameters_is_refused(tmp_path, change, mode):
    """The first of these crashed inside the optimizer, or went on with the moments of others."""
    then, now, seed = CHANGES[change]
    trainer(tmp_path, then, seed=3, privacy_mode=mode).train()
    before = mode == "dp_sgd" and read_run(tmp_path).ledger.to_list()
    with pytest.raises(ConfigError, match="Cannot resume: .*peft_config.*new run in a new output_"):
        resume(tmp_path, now, seed=seed, privacy_mode=mode)
    assert before == (mode == "dp_sgd" and read_run(tmp_path).ledger.to_list())
    assert resume(tmp_path, then, seed=3, privacy_mode=mode).state.global_step == 3


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_and_a_whole_model_do_not_continue_each_other(tmp_path, mode):
    options = {"privacy_mode": mode}
    trainer(tmp_path / "whole", **options).train()
    with pytest.raises(ConfigError, match="is trained, of shape .* it is not there"):
        resume(tmp_path / "whole", lora(), **options)
    trainer(tmp_path / "adapter", lora(), **options).train()
    with pytest.raises(ConfigError, match="in 'checkpoint-2' it is not there"):
        resume(tmp_path / "adapter", **options)


def test_adapters_beside_the_first_are_compared(tmp_path):
    def two(rank):
        model = get_peft_model(tiny.model(), lora(task_type="SEQ_CLS"))
        model.add_adapter("other", lora(r=rank, task_type="SEQ_CLS"))
        return model

    trainer(tmp_path, model=two(3)).train()
    with pytest.raises(ConfigError, match="the parameter '.*other.*' is frozen, of shape"):
        resume(tmp_path, model=two(4))
    assert resume(tmp_path, model=two(3)).state.global_step == 3


def test_what_was_chosen_by_another_seed_is_named_with_the_way_back(tmp_path):
    trainer(tmp_path, RandomConfig(unfreeze_ratio=0.4), seed=3).train()
    with pytest.raises(
        ConfigError, match="`selection_seed` of peft_config is 4, but the run was started with 3"
    ):
        resume(tmp_path, RandomConfig(unfreeze_ratio=0.4), seed=4)
    again = resume(tmp_path, RandomConfig(unfreeze_ratio=0.4, selection_seed=3), seed=4)
    assert again.state.global_step == 3


def test_another_seed_that_chooses_the_same_goes_on_and_another_model_is_told(tmp_path):
    trainer(tmp_path, BitFitConfig(), seed=3).train()
    assert resume(tmp_path, BitFitConfig(), seed=4).state.global_step == 3
    with pytest.raises(ConfigError, match="the parameter '.*layer.2.*' is .*it is not there"):
        resume(tmp_path, BitFitConfig(), model=tiny.model(num_hidden_layers=3))


def frozen_but(end: str) -> nn.Module:
    """The tiny model, of which one weight and the head train."""
    model = tiny.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(end) or name.startswith("classifier"))
    return model


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_without_an_adapter_what_trains_must_be_the_same(tmp_path, optim):
    first, other = "layer.0.output.dense.weight", "layer.0.intermediate.dense.weight"
    trainer(tmp_path, model=frozen_but(first), optim=optim).train()
    ledger = read_run(tmp_path).ledger.to_list()
    with pytest.raises(ConfigError, match="is trained, of shape .* it is frozen, of"):
        resume(tmp_path, model=frozen_but(other), optim=optim)
    assert read_run(tmp_path).ledger.to_list() == ledger
    assert resume(tmp_path, model=frozen_but(first), optim=optim).state.global_step == 3


def test_an_optimizer_of_ones_own_must_have_its_parameters_in_the_same_order(tmp_path):
    """Also those of one shape, whose moments would move each other."""

    def with_own(order, **options):
        model = tiny.model()
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([named[f"bert.pooler.dense.{each}"] for each in order])
        given = {"model": model, "optimizers": (optimizer, None)}
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "accountant": "rdp"}
        return tiny.trainer(tmp_path, given=given, **{**saving, **options})

    with_own(["weight", "bias"]).train()
    ledger = read_run(tmp_path).ledger.to_list()
    checkpoint = str(tmp_path / "checkpoint-2")
    for other in (["bias", "weight"], ["weight"]):
        with pytest.raises(ConfigError, match="Cannot resume: the optimizer has other parameters"):
            with_own(other, max_steps=3).train(resume_from_checkpoint=checkpoint)
    assert read_run(tmp_path).ledger.to_list() == ledger
    with_own(["weight", "bias"], max_steps=3).train(resume_from_checkpoint=checkpoint)


def test_planted_parameters_that_are_not_compared_leave_it_to_the_optimizers(tmp_path, monkeypatch):
    """The second look is independent of the first one."""
    monkeypatch.setattr(DPTrainer, "_refuse_other_parameters", lambda *given: None)
    trainer(tmp_path, model=None, config=RandomConfig(selection_seed=0, unfreeze_ratio=0.3)).train()
    ledger = read_run(tmp_path).ledger.to_list()
    with pytest.raises((ConfigError, ValueError)):
        resume(tmp_path, RandomConfig(selection_seed=3, unfreeze_ratio=0.3))
    assert read_run(tmp_path).ledger.to_list() == ledger
