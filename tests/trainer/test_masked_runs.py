"""In place: PVAL and PARAM, whose other entries stay and whose look PARAM pays for; RGP."""

import dataclasses

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from watch import watch

from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedModelError
from hf_dp.plans.rounding import ROUNDING_MARGIN
from hf_dp.run.gate import Release
from hf_dp.statement.evidence import disagreements, read
from hf_dp.tuners.rgp import RgpConfig
from hf_dp.tuners.single_entries import Masks, ParamConfig, PvalConfig, largest, packed, unpacked
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

SAVING = {"save_strategy": "steps", "save_steps": 1}

PARAM = {"unfreeze_ratio": 0.2, "selection_noise_multiplier": 2.0, "selection_sample_rate": 0.3}


def masked(folder, config, **options):
    options = {"accountant": "rdp", "max_steps": 2, **options}
    return tiny.trainer(folder, given={"peft_config": config}, **options)


def outside(folder, config, **options) -> int:
    """How many entries moved that the mask does not keep."""
    before = tiny.weights(tiny.model())
    trainer = tiny.trained(masked(folder, config, **options))
    after = trainer.model.state_dict()
    moved = {name: before[name] != after[name] for name in before}
    masks = trainer.tuner.masks
    assert all(moved[name][mask].all() for name, mask in masks.items())  # noise moves each
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert kept == int(0.2 * sum(mask.numel() for mask in masks.values()))
    assert moved["classifier.weight"].all() and "classifier.weight" not in masks
    return sum(int(moved[name][~mask].sum()) for name, mask in masks.items())


@pytest.mark.parametrize("config", [PvalConfig(unfreeze_ratio=0.2), ParamConfig(**PARAM)])
def test_only_the_mask_moves(config, tmp_path):
    assert outside(tmp_path, config) == 0


def test_planted_noise_outside_the_mask_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(Masks, "finish", lambda self, noised: noised)
    assert outside(tmp_path, PvalConfig(unfreeze_ratio=0.2)) > 0


def test_pval_keeps_the_largest_and_masks_are_bits(tmp_path):
    model = tiny.model()
    trainer = masked(tmp_path, PvalConfig(unfreeze_ratio=0.1))
    trainer.tuner.start(trainer.run)
    masks, values = trainer.tuner.masks, dict(model.named_parameters())
    kept = torch.cat([values[n][m].abs() for n, m in masks.items()])
    left = torch.cat([values[n][~m].abs() for n, m in masks.items()])
    assert kept.min() >= left.max() and len(kept) == int(0.1 * (len(kept) + len(left)))
    model = tiny.model()
    masks = {n: torch.rand(p.shape) < 0.4 for n, p in model.named_parameters()}
    again = unpacked(packed(masks), model)
    assert all(torch.equal(mask, again[name]) for name, mask in masks.items())
    with pytest.raises(InvalidArgumentError, match="'other'"):
        unpacked({"other": torch.zeros(1, dtype=torch.uint8)}, model)


def test_param_is_charged_and_pval_is_free(tmp_path):
    trainer = masked(tmp_path / "a", ParamConfig(unfreeze_ratio=0.2), target_epsilon=2.0)
    trainer.train()
    trainer.save_model()
    entries = [(entry.purpose, entry.event.steps) for entry in trainer.ledger.entries]
    assert entries == [("selection", 1), ("training", 2)]
    assert trainer.epsilon().value <= 2.0
    assert disagreements(read(tmp_path / "a")) == []
    trainer = tiny.trained(masked(tmp_path / "b", PvalConfig(unfreeze_ratio=0.2)))
    assert [entry.purpose for entry in trainer.ledger.entries] == ["training"]


@pytest.mark.parametrize("config", [PvalConfig(unfreeze_ratio=0.2), ParamConfig(**PARAM)])
def test_a_resumed_run_reads_its_masks(config, tmp_path, monkeypatch):
    first, checkpoint = masked(tmp_path, config, **SAVING), str(tmp_path / "checkpoint-1")
    first.train()
    monkeypatch.setattr(
        "hf_dp.tuners.single_entries.select_entries", lambda *a: pytest.fail("selected again")
    )
    again = masked(tmp_path, config)
    again.train(resume_from_checkpoint=checkpoint)
    masks = again.tuner.masks
    assert all(torch.equal(mask, masks[name]) for name, mask in first.tuner.masks.items())
    other = masked(tmp_path, dataclasses.replace(config, unfreeze_ratio=0.5))
    with pytest.raises(ConfigError, match="Cannot resume: `unfreeze_ratio`"):
        other.train(resume_from_checkpoint=checkpoint)


def test_refusals(tmp_path):
    both = {"clipping": "per_layer", "clipping_strategy": "two_pass"}
    of_masks = {"weight_decay": 0.01, "optim": "lion_32bit", "adam_epsilon": 0.0}
    for config, options in ((PvalConfig(), both | of_masks), (RgpConfig(), both)):
        for name, value in options.items():
            with pytest.raises(InvalidArgumentError, match=name):
                masked(tmp_path, config, **{name: value})
    with pytest.raises(InvalidArgumentError, match="unfreeze_ratio"):
        PvalConfig(unfreeze_ratio=0)
    with pytest.raises(InvalidArgumentError, match="leave room for one"):
        largest({"a": torch.ones(3)}, 0.1)
    with pytest.raises(UnsupportedModelError, match="Pass its configuration to DPTrainer"):
        get_peft_model(tiny.model(), PvalConfig())


def test_rgp_trains_matrices_and_head_along_its_carriers(tmp_path, monkeypatch):
    before = tiny.weights(tiny.model())
    trainer = masked(tmp_path, RgpConfig(rank=2), optim="sgd", **SAVING)

    def shapes(sums):
        return {name: total.shape for name, total in sums.items()}

    seen = watch(monkeypatch, trainer.tuner, "finish", before=shapes)
    trainer.train()
    after = trainer.model.state_dict()
    matrices = {
        n for n in before if n.endswith("weight") and before[n].dim() == 2 and "embeddings" not in n
    }
    assert tiny.moved(before, trainer.model) == matrices | {"classifier.bias"}
    assert seen[0]["bert.pooler.dense.weight.left_carrier"] == (16, 2)
    assert seen[0]["bert.encoder.layer.0.output.dense.weight.right_carrier"] == (2, 32)
    assert "bert.pooler.dense.weight" not in seen[0]
    # One step of SGD is of rank at most 2r; two with carriers of their own, of more.
    one = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert not tiny.model().load_state_dict(one).missing_keys
    name = "bert.pooler.dense.weight"
    ranks = [torch.linalg.matrix_rank(new[name] - before[name], rtol=1e-4) for new in (one, after)]
    assert ranks[0] == 4 < ranks[1]
    again = tiny.resumed(masked(tmp_path, RgpConfig(rank=2), optim="sgd"), 1)
    assert again.ledger.steps() == 3
    assert disagreements(read(tmp_path)) == []
    # The weights that a checkpoint holds have an update already; the base's are the start.
    assert all(torch.equal(value, before[name]) for name, value in again.tuner._start.items())


def test_rgp_scales_its_learning_rate(tmp_path):
    trainer = masked(tmp_path, RgpConfig(rank=1, learning_rate_scale=3.0), learning_rate=1e-3)
    trainer.train()
    groups = [group for group in trainer.optimizer.param_groups if group["params"]]
    rates = {group["initial_lr"]: len(group["params"]) for group in groups}
    assert set(rates) == {1e-3, 3e-3} and rates[3e-3] > rates[1e-3]


class Look:
    """PARAM's look at gradients that are clipped to 1e-3, as the gate releases it."""

    def __init__(self, folder, monkeypatch):
        trainer = masked(folder, ParamConfig(**PARAM, selection_clipping_norm=1e-3), max_steps=1)
        feed, original = trainer.run.feed, Release.sum

        def noted(engine, batches, *more):
            self.drawn = sum(len(batch["labels"]) for batch in batches)
            return feed(engine, batches, *more)

        def watched(release, sums):
            if release.planned.purpose == "selection":
                values = torch.cat([total.flatten() for total in sums.values()])
                self.norm, self.numbers, self.rows = float(values.norm()), len(values), self.drawn
                self.sensitivity = release.planned.sensitivities["sum"]
            return original(release, sums)

        trainer.run.feed = noted
        monkeypatch.setattr(Release, "sum", watched)
        trainer.train()


def test_params_look_is_clipped_and_noised_for_the_whole_gradient(tmp_path, monkeypatch):
    """One row's part in what is released has a norm of at most the clipping norm."""
    look, named = Look(tmp_path, monkeypatch), tiny.model().named_parameters()
    assert look.numbers == sum(p.numel() for n, p in named if not n.startswith("classifier"))
    assert look.sensitivity == 1e-3 * (1 + ROUNDING_MARGIN)
    assert look.norm <= 1e-3 * look.rows * (1 + 1e-5)
    assert look.norm > 0 or not look.rows


def test_planted_smaller_margin_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dp.tuners.base.rounding_margin", lambda *draw: -0.5)
    assert Look(tmp_path, monkeypatch).sensitivity != 1e-3 * (1 + ROUNDING_MARGIN)
