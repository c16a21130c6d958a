"""What went wrong, or could have, in runs that choose what trains: each as it was found."""

import copy
import functools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from data_paths import vit
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import BertForMaskedLM, BertForTokenClassification

from hf_dp.errors import (
    ConfigError,
    InvalidArgumentError,
    LedgerError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.statement.evidence import read
from hf_dp.tuners.base import ConfiguredTuner
from hf_dp.tuners.frost.magnitude import MagnitudeEngine, representable, sensitivity
from hf_dp.tuners.frost.select import partitions
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.public_choice import RandomConfig
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import PvalConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

FROST = {"unfreeze_ratio": 0.3, "selection_iterations": 3, "selection_noise_multiplier": 2.0}


def run(folder, config, given=None, **options):
    if options.get("privacy_mode") != "non_private":
        options.setdefault("accountant", "rdp")
    return tiny.trainer(folder, given={"peft_config": config, **(given or {})}, **options)


def test_the_type_of_a_noisy_magnitude_does_not_tell_whether_a_row_was_drawn(tmp_path):
    trainer = run(tmp_path, FrostConfig(**FROST, selection_sample_rate=1e-4), max_steps=1)
    trainer.train()
    values = [v for row in trainer.tuner.config.made[0]["noisy_magnitudes"] for v in row.values()]
    assert not all(float(np.float32(value)) == value for value in values)


@pytest.mark.parametrize("magnitude", ["mg", "mgn", "mgna"])
def test_gradients_beyond_float32s_weights_are_left_out(magnitude):
    """A weight below the normal float32 numbers would be rounded, up to almost double."""
    torch.manual_seed(0)
    model = nn.Linear(400, 400, bias=False)
    x = torch.full((1, 400), 3e18)
    with MagnitudeEngine(model, partitions(model), 0.1, magnitude, 1) as engine:
        engine.backward((model(x) * 3e18).sum(1))
        moved = float(engine.magnitudes().norm())
    assert moved <= sensitivity(partitions(model), magnitude, 1, 0.1)
    weights = torch.tensor([0.0, 1e-40, 1e-30, 1.0], dtype=torch.float64)
    assert representable(weights).tolist() == [0.0, 0.0, 1e-30, 1.0]


def test_nothing_is_paid_for_what_cannot_be_applied(tmp_path, monkeypatch):
    """The head is looked at before the first draw; a selection counts once it was applied."""
    model = tiny.model()
    model.scorer, model.forward_head = nn.Linear(16, 2), None  # a head that PEFT does not know
    with pytest.raises(UnsupportedModelError, match="modules_to_save=\\['scorer'\\]"):
        run(tmp_path / "a", FrostConfig(**FROST), {"model": model})
    trainer = run(tmp_path / "b", FrostConfig(**FROST), max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr("hf_dp.tuners.frost.tuner.apply_peft", mock.Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            trainer.train()
    trainer.train()
    assert trainer.ledger.steps("selection") == 3 and hasattr(trainer.model, "peft_config")


def test_heads_of_other_tasks_are_not_chosen_from_and_tasks_may_be_unknown_to_peft(tmp_path):
    model = BertForTokenClassification(tiny.model().config)
    wrapped = get_peft_model(model, RandomConfig(unfreeze_ratio=1.0, task_type="TOKEN_CLS"))
    chosen = wrapped.peft_config["default"].parameters
    assert not any(name.startswith("classifier") for name in chosen)
    assert any("modules_to_save" in n for n, p in wrapped.named_parameters() if p.requires_grad)
    trainer = run(tmp_path, PvalConfig(), {"model": BertForMaskedLM(tiny.model().config)})
    assert trainer.tuner.config.task_type is None


def test_a_selection_of_another_run_and_more_than_steps_are_refused(tmp_path):
    made = FrostConfig(**FROST, num_selections=2, made=[{"parameters": []}])
    for config in (made, FrostConfig(**FROST, made=[{"parameters": []}])):
        with pytest.raises(ConfigError, match="another run made"):
            run(tmp_path, config)
    with pytest.raises(UnsupportedArgumentError, match="`audit_canaries` to be unset with num_sel"):
        run(tmp_path / "audit", FrostConfig(**FROST, num_selections=2), audit_canaries=20)
    with pytest.raises(InvalidArgumentError, match="num_selections.*at most the 4 steps"):
        run(tmp_path, FrostConfig(**FROST, num_selections=5))


@pytest.fixture(scope="module")
def chose(tmp_path_factory):
    """Return the folder of a run that chose by itself."""

    @functools.cache
    def once(mode: str) -> Path:
        folder = tmp_path_factory.mktemp(mode)
        tiny.trained(run(folder, FrostConfig(**FROST), max_steps=1, privacy_mode=mode)).save_model()
        return folder

    return once


def test_a_selection_of_another_run_is_refused_inside_the_model(chose, tmp_path):
    """It came in uncounted by `get_peft_model`, also from a run without noise."""
    first = chose("dp_sgd")
    config = FrostConfig.from_pretrained(str(first))
    assert config.made and config.parameters
    without_noise = FrostConfig.from_pretrained(str(chose("non_private")))
    only_names = FrostConfig(**FROST, task_type="SEQ_CLS", parameters=config.parameters)
    inner = get_peft_model(tiny.model(), copy.deepcopy(config), "renamed").base_model.model
    wrapped = torch.nn.Sequential(get_peft_model(tiny.model(), copy.deepcopy(config), "renamed"))
    for name, model in (
        ("default", get_peft_model(tiny.model(), copy.deepcopy(config))),
        ("default", get_peft_model(tiny.model(), without_noise)),
        ("default", get_peft_model(tiny.model(), only_names)),
        ("renamed", inner),
        ("renamed", wrapped),
    ):
        said = f"The adapter '{name}' is a FrostConfig .* this run did not make"
        with pytest.raises(UnsupportedModelError, match=f"{said}.*adapter_init_data_is_public"):
            run(tmp_path / "second", None, {"model": model})
        assert not (tmp_path / "second").exists()
    model = get_peft_model(tiny.model(), copy.deepcopy(config))
    options = {"max_steps": 1, "adapter_init_data_is_public": True}
    public = tiny.trained(run(tmp_path / "public", None, {"model": model}, **options))
    assert public.ledger.steps("selection") == 0
    assert read(tmp_path / "public").weaknesses.public_adapter
    said = "an adapter's initial weights, or its selection of what trains, were computed: the user"
    assert any(said in line for line in public.privacy_statement().not_covered)
    # What only evaluates may hold it, and its training may go on where the first run is counted.
    model = get_peft_model(tiny.model(), copy.deepcopy(config))
    assert run(tmp_path / "look", None, {"model": model, "train_dataset": None}).evaluate()
    saved = PeftModel.from_pretrained(tiny.model(), first, is_trainable=True)
    counting = {"earlier_runs": [str(first)], "max_steps": 1, "adapter_init_data_is_public": True}
    again = tiny.trained(run(tmp_path / "again", None, {"model": saved}, **counting))
    assert {entry.purpose for entry in again.ledger.entries} == {"earlier run", "training"}
    assert again.ledger.steps("earlier run") == 4  # three looks and a step
    assert not again.run.book.weaknesses.public_adapter  # it needed no such statement


def test_a_selection_that_is_put_into_the_model_later_is_refused(chose, tmp_path):
    trainer = run(tmp_path, None)
    config = FrostConfig.from_pretrained(str(chose("dp_sgd")))
    trainer.model = trainer.model_wrapped = get_peft_model(trainer.model, config)
    with pytest.raises(UnsupportedModelError, match="this run did not make"):
        trainer.train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_run_that_ended_before_its_first_checkpoint_is_told_what_to_do(chose):
    again = run(chose("dp_sgd"), FrostConfig(**FROST))
    message = "has no checkpoint.*Start a new run in a new output_dir.*earlier_runs"
    with pytest.raises(LedgerError, match=message):
        tiny.resumed(again)


@pytest.mark.parametrize(
    "config", [PvalConfig(task_type="SEQ_CLS"), FrostConfig(task_type="SEQ_CLS")]
)
def test_in_place_what_is_no_layers_stays_frozen(config):
    model = vit()
    ConfiguredTuner(config).only_chosen(model, config.candidates(model).values())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}.isdisjoint(trained)
    assert "classifier.weight" in trained and "vit.layernorm.weight" in trained


def test_rgp_goes_on_in_one_trainer_and_in_float64(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = tiny.trained(run(tmp_path / "a", RgpConfig(learning_rate_scale=3.0), **saving))
    groups = len(trainer.optimizer.param_groups)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert len(trainer.optimizer.param_groups) == groups
    double = run(tmp_path / "b", RgpConfig(), {"model": tiny.model().double()}, max_steps=1)
    double.train()
    assert double.ledger.steps() == 1


@pytest.mark.parametrize("num_selections", [1, 2])
def test_an_optimizer_that_was_made_early_is_seen_before_anything_is_paid(num_selections, tmp_path):
    trainer = run(tmp_path, FrostConfig(**FROST, num_selections=num_selections))
    trainer.create_optimizer()
    with pytest.raises(InvalidArgumentError, match="optimizers"):
        trainer.train()
    assert trainer.ledger.steps() == 0
