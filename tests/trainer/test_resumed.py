"""A resumed run trains what its checkpoint trained, or nothing."""

import functools
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dp import DPTrainer
from hf_dp.cards.verify import verify
from hf_dp.errors import ConfigError
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import read
from hf_dp.tuners.public_choice import BitFitConfig, RandomConfig, TopBlocksConfig

pytestmark = pytest.mark.usefixtures("unchecked")


def trainer(folder: Path, config=None, model=None, **options):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, **options}
    if model is None:
        model = tiny.model(num_hidden_layers=2)
    given = {"peft_config": config, "model": model}
    return tiny.trainer(folder, given=given, **options)


def resume(folder: Path, config=None, model=None, **options):
    """Go on to step 2; a refusal comes before it, and before anything is spent."""
    return tiny.resumed(trainer(folder, config, model, max_steps=2, **options), 1)


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": ["query"], **options})


STARTED = {
    "random": lambda: RandomConfig(unfreeze_ratio=0.4),
    "blocks": lambda: TopBlocksConfig(blocks=1),
    "lora": lora,
    "whole": lambda: None,
}


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """Return the folder of a run of this kind after one step, started with seed 3."""

    @functools.cache
    def once(kind: str, mode: str = "dp_sgd") -> Path:
        folder = tmp_path_factory.mktemp(kind)
        trainer(folder, STARTED[kind](), seed=3, privacy_mode=mode).train()
        return folder

    return once


OTHER = "Cannot resume: .*peft_config.*new run in a new output_"
CHANGES = {
    "another seed": ("random", RandomConfig(unfreeze_ratio=0.4), OTHER, 4),
    "a seed of its own": ("random", RandomConfig(unfreeze_ratio=0.4, selection_seed=5), OTHER, 3),
    "another ratio": ("random", RandomConfig(unfreeze_ratio=0.5), OTHER, 3),
    "other blocks": ("blocks", TopBlocksConfig(blocks=2), OTHER, 3),
    "another rank": ("lora", lora(r=4), OTHER, 3),
    "layers of the same shape": ("lora", lora(target_modules=["value"]), OTHER, 3),
    "more layers": ("lora", lora(target_modules=["query", "value"]), OTHER, 3),
    "another module in full": ("lora", lora(modules_to_save=["pooler"]), OTHER, 3),
    "an adapter": ("whole", lora(), "is trained, of shape .* it is not there", 3),
    "no adapter": ("lora", None, "in 'checkpoint-1' it is not there", 3),
}
ALSO_WITHOUT_PRIVACY = ("another seed", "another rank", "an adapter", "no adapter")


@pytest.mark.parametrize(
    ("change", "mode"),
    [(change, "dp_sgd") for change in CHANGES]
    + [(change, "non_private") for change in ALSO_WITHOUT_PRIVACY],
)
def test_a_resume_that_trains_other_parameters_is_refused(began, change, mode):
    """The first of these crashed inside the optimizer, or went on with the moments of others."""
    kind, now, message, seed = CHANGES[change]
    folder = began(kind, mode)
    before = mode == "dp_sgd" and read_run(folder).ledger.to_list()
    with pytest.raises(ConfigError, match=message):
        resume(folder, now, seed=seed, privacy_mode=mode)
    assert before == (mode == "dp_sgd" and read_run(folder).ledger.to_list())


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
@pytest.mark.parametrize("kind", ["random", "lora"])
def test_a_resume_that_trains_the_same_goes_on(began, tmp_path, kind, mode):
    """With the steps that it has now: its evidence and its card say how many."""
    folder = Path(shutil.copytree(began(kind, mode), tmp_path / "run"))
    made = resume(folder, STARTED[kind](), seed=3, privacy_mode=mode)
    assert made.state.global_step == 2
    if mode == "dp_sgd":
        made.save_model()
        assert read(folder).plan.steps == 2 and verify(folder).outcome == "ok"


def test_a_private_checkpoint_that_does_not_say_what_it_trains_is_refused(began, tmp_path):
    folder = Path(shutil.copytree(began("lora"), tmp_path / "run"))
    (folder / "checkpoint-1" / "_parameters.json").unlink()
    with pytest.raises(ConfigError, match=r"'checkpoint-1' has no _parameters.json, .* whole"):
        resume(folder, lora(), seed=3)


def test_adapters_beside_the_first_are_compared(tmp_path):
    def two(rank):
        model = get_peft_model(tiny.model(), lora(task_type="SEQ_CLS"))
        model.add_adapter("other", lora(r=rank, task_type="SEQ_CLS"))
        return model

    trainer(tmp_path, model=two(3)).train()
    with pytest.raises(ConfigError, match="the parameter '.*other.*' is frozen, of shape"):
        resume(tmp_path, model=two(4))
    assert resume(tmp_path, model=two(3)).state.global_step == 2


def test_what_was_chosen_by_another_seed_is_named_with_the_way_back(began, tmp_path):
    folder = Path(shutil.copytree(began("random"), tmp_path / "run"))
    message = "`selection_seed` of peft_config is 4, but the run was started with 3"
    with pytest.raises(ConfigError, match=message):
        resume(folder, STARTED["random"](), seed=4)
    again = resume(folder, RandomConfig(unfreeze_ratio=0.4, selection_seed=3), seed=4)
    assert again.state.global_step == 2


def test_another_seed_that_chooses_the_same_goes_on_and_another_model_is_told(tmp_path):
    trainer(tmp_path, BitFitConfig(), seed=3).train()
    assert resume(tmp_path, BitFitConfig(), seed=4).state.global_step == 2
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
    assert resume(tmp_path, model=frozen_but(first), optim=optim).state.global_step == 2


def test_an_optimizer_of_ones_own_must_have_its_parameters_in_the_same_order(tmp_path):
    """Also those of one shape, whose moments would move each other."""

    def with_own(order, **options):
        model = tiny.model()
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([named[f"bert.pooler.dense.{each}"] for each in order])
        given = {"model": model, "optimizers": (optimizer, None)}
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        return tiny.trainer(tmp_path, given=given, **{**saving, **options})

    with_own(["weight", "bias"]).train()
    ledger = read_run(tmp_path).ledger.to_list()
    for other in (["bias", "weight"], ["weight"]):
        with pytest.raises(ConfigError, match="Cannot resume: the optimizer.s parameters differ"):
            tiny.resumed(with_own(other, max_steps=2), 1)
    assert read_run(tmp_path).ledger.to_list() == ledger
    tiny.resumed(with_own(["weight", "bias"], max_steps=2), 1)


def test_planted_parameters_that_are_not_compared_leave_it_to_the_optimizers(began, monkeypatch):
    """The second look is independent of the first one."""
    monkeypatch.setattr(DPTrainer, "_refuse_other_parameters", lambda *given: None)
    folder = began("random")
    ledger = read_run(folder).ledger.to_list()
    with pytest.raises((ConfigError, ValueError)):
        resume(folder, RandomConfig(unfreeze_ratio=0.4, selection_seed=0), seed=3)
    assert read_run(folder).ledger.to_list() == ledger
