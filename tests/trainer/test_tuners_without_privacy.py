"""DP-FROST, PARAM, PVAL and RGP in ``non_private`` mode: the same choices, by exact numbers."""

import copy
import json

import pytest
import torch
from peft import PeftModel

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.tuners.frost.tuner import FrostConfig
from hf_dp.tuners.rgp import RgpConfig, carriers
from hf_dp.tuners.single_entries import ParamConfig, PvalConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

PLAIN = {"privacy_mode": "non_private", "per_device_train_batch_size": 8}


def plain(folder, config, **options):
    return tiny.trainer(folder, given={"peft_config": config}, **{**PLAIN, **options})


def gradients() -> list[dict[str, torch.Tensor]]:
    """The gradient of each row's loss, one by one, at the initial weights."""
    model, found = tiny.model(), []
    for row in tiny.dataset():
        inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask")}
        model.zero_grad()
        model(**inputs, labels=torch.tensor([row["label"]])).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("iterations", [1, 3])
def test_frost_chooses_by_the_magnitudes_of_definition_6(tmp_path, iterations):
    share = {"unfreeze_ratio": 0.3, "selection_sample_rate": 1.0}
    trainer = tiny.trained(plain(tmp_path, FrostConfig(**share, selection_iterations=iterations)))
    (made,) = trainer.tuner.config.made
    rows = gradients()
    exact = {}
    for part in FrostConfig(task_type="SEQ_CLS").candidate_partitions(tiny.model()):
        total = float(sum(row[p].abs().sum() for row in rows for p in part.parameters))
        exact[part.name] = total / sum(rows[0][p].numel() for p in part.parameters)
    assert made["magnitudes_without_noise"][0] == pytest.approx(exact, rel=1e-4)
    largest = max(exact, key=exact.__getitem__)
    assert made["partitions"][0] == largest
    assert not {"noisy_magnitudes", "events", "plan"} & set(made)
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert len([n for n in trained if "ln_tuning" in n]) == len(made["parameters"])
    trainer.save_model()
    assert json.loads((tmp_path / "selection.json").read_text())["made"] == [made]
    assert not (tmp_path / "ledger.jsonl").exists()
    PeftModel.from_pretrained(tiny.model(), tmp_path)


def test_a_resumed_run_takes_over_what_was_chosen(tmp_path, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    frost = FrostConfig(unfreeze_ratio=0.3, selection_sample_rate=0.5)
    param = ParamConfig(selection_sample_rate=0.5)
    first = tiny.trained(plain(tmp_path / "frost", copy.deepcopy(frost), **options))
    masked = tiny.trained(plain(tmp_path / "param", copy.deepcopy(param), **options))
    for place in ("frost.tuner.select_partitions", "single_entries.select_entries"):
        monkeypatch.setattr(f"hf_dp.tuners.{place}", lambda *a: pytest.fail("chosen again"))
    again = tiny.resumed(plain(tmp_path / "frost", frost, **options))
    assert again.tuner.config.made == first.tuner.config.made
    again = tiny.resumed(plain(tmp_path / "param", param, **options), 1)
    assert all(torch.equal(mask, again.tuner.masks[n]) for n, mask in masked.tuner.masks.items())


@pytest.mark.parametrize(
    "config",
    [PvalConfig(unfreeze_ratio=0.1), ParamConfig(unfreeze_ratio=0.1, selection_sample_rate=1.0)],
)
def test_single_entries_are_chosen_exactly_and_only_they_move(tmp_path, config):
    before = tiny.model().state_dict()
    trainer = tiny.trained(plain(tmp_path, config))
    masks = trainer.tuner.masks
    rows = gradients()
    values = {
        name: before[name] if isinstance(config, PvalConfig) else sum(row[name] for row in rows)
        for name in masks
    }
    kept = torch.cat([values[n][mask].abs() for n, mask in masks.items()])
    left = torch.cat([values[n][~mask].abs() for n, mask in masks.items()])
    assert len(kept) == int(0.1 * (len(kept) + len(left)))
    assert kept.min() >= left.max() - 1e-6
    after = trainer.model.state_dict()
    moved = False
    for name, mask in masks.items():
        changed = before[name] != after[name]
        assert not changed[~mask].any()
        moved |= bool(changed.any())
    assert moved and not torch.equal(before["classifier.weight"], after["classifier.weight"])


def test_a_step_of_rgp_is_the_projected_gradient(tmp_path):
    """Through the carriers of the step, of which the second has others; batches are added up."""
    before = {name: p.detach().clone() for name, p in tiny.model().named_parameters()}
    step = {
        "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "per_device_train_batch_size": 10, "gradient_accumulation_steps": 4,  # the whole set
    }  # fmt: skip
    trainer = tiny.trained(plain(tmp_path, RgpConfig(rank=2), **step))
    rows, differs = gradients(), False
    for name, each in trainer.tuner._carriers.items():
        gradient = sum(row[name] for row in rows) / len(rows)
        left, right = each.left @ each.left.mT, each.right.mT @ each.right
        eye = [torch.eye(len(side)) for side in (left, right)]
        projected = gradient - (eye[0] - left) @ gradient @ (eye[1] - right)
        step = before[name] - trainer.model.get_parameter(name).detach()
        scale = float(gradient.abs().max())
        torch.testing.assert_close(step, projected, rtol=1e-3, atol=max(1e-3 * scale, 1e-7))
        differs |= not torch.allclose(step, gradient, rtol=0, atol=0.1 * scale)
    assert differs
    frozen = trainer.model.get_parameter("bert.embeddings.word_embeddings.weight")
    assert torch.equal(frozen, before["bert.embeddings.word_embeddings.weight"])


def test_accumulated_batches_give_the_gradient_of_all_their_rows(tmp_path):
    """Not the sum of their means, which transformers 5.20 to 5.23 takes for a classifier."""
    after = []
    for size in (40, 10):
        step = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 40 // size}
        trainer = tiny.trained(tiny.trainer(tmp_path / str(size), **{**PLAIN, **batches}, **step))
        after.append(trainer.model.state_dict())
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-5, atol=1e-6)
    assert not torch.equal(after[0]["classifier.weight"], tiny.model().classifier.weight)


def test_carriers_are_new_in_each_step_and_what_does_not_work_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedArgumentError, match="`num_selections` to be 1"):
        plain(tmp_path, FrostConfig(num_selections=2))
    with pytest.raises(ValueError, match="weight_decay"):
        plain(tmp_path, PvalConfig(), weight_decay=0.1)
    trainer = plain(tmp_path, RgpConfig(rank=1), max_steps=3, gradient_accumulation_steps=2)
    made = []
    monkeypatch.setattr("hf_dp.tuners.rgp.carriers", lambda *a: (made.append(a), carriers(*a))[1])
    trainer.train()
    assert len(made) == 3 * len(trainer.tuner._weights)
