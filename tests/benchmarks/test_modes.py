"""Every mode does the same work: equal gradients without dropout; what cannot be done is refused
with its reason."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch

from hf_dp.benchmarks import modes
from hf_dp.benchmarks.modes import (
    FORWARD,
    MODES,
    NON_PRIVATE,
    OPACUS,
    Refused,
    build_mode,
    check_modes,
    refusals,
)
from hf_dp.benchmarks.workload import SHAPES, Workload, build_model, make_batch
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.errors import HfDpError, InvalidArgumentError, UnsupportedModelError
from hf_dp.losses import per_example_loss
from hf_dp.tasks.classification import DataArguments
from hf_dp.trainer.arguments import DPTrainingArguments


def clipped_sum(workload, batch):
    """One example at a time, plain autograd."""
    model = build_model(workload)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(batch["labels"])):
        model.zero_grad()
        one = {name: value[i : i + 1] for name, value in batch.items()}
        per_example_loss(model, one).sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for name, p in model.named_parameters():
            total[name] += p.grad * min(1.0, modes.CLIPPING_NORM / float(norm))
    return total


def result(mode):
    """What a step left: mean gradients, or clipped sums, by name."""
    named = dict(mode.model.named_parameters())
    if isinstance(mode, modes.Clipped):
        return mode.sums
    which = "summed_grad" if isinstance(mode, modes.OpacusMode) else "grad"
    found = {name: getattr(p, which) for name, p in named.items()}
    return {name: value.clone() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", [*STRATEGIES, *OPACUS])
@pytest.mark.parametrize("model", ["tiny", "tiny-bert"])
def test_private_modes_form_the_clipped_sum_of_a_batch(model, name):
    if name in OPACUS:
        pytest.importorskip("opacus")
    workload = Workload(model, 4, 12, dropout=0.0, threads=1)
    mode = build_mode(name, workload)
    if "untied" in mode.note:
        pytest.skip(mode.note)  # another model: the head has a weight of its own
    batch = make_batch(workload, mode.model)
    for _ in range(2):  # a step starts from nothing
        mode.step(batch)
    found, expected = result(mode), clipped_sum(workload, batch)
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        torch.testing.assert_close(value, expected[parameter].to(value), rtol=1e-3, atol=1e-6)
    mode.reset()
    assert all(p.grad is None for p in mode.model.parameters())


def test_non_private_mode_forms_the_mean_gradient():
    workload = Workload("tiny", 4, 12, dropout=0.0, threads=1)
    mode = build_mode(NON_PRIVATE, workload)
    batch = make_batch(workload, mode.model)
    mode.step(batch)
    once = result(mode)
    per_example_loss(mode.model, batch).mean().backward()  # as much again
    assert len(once) == len(list(mode.model.parameters()))
    for name, value in result(mode).items():
        torch.testing.assert_close(value, 2 * once[name])
    mode.reset()
    assert result(mode) == {}


def test_ghost_unties_a_tied_head_and_says_so():
    pytest.importorskip("opacus")
    mode = build_mode("opacus_ghost", Workload("tiny", 4, 12, threads=1))
    assert "untied" in mode.note
    assert mode.model.lm_head.weight is not mode.model.transformer.wte.weight
    assert build_mode("opacus_ghost", Workload("tiny-bert", 4, 12, threads=1)).note == ""


def test_dp_fp_noises_the_forward_and_gives_every_parameter_its_gradient():
    workload = Workload("tiny-bert", 4, 12, dropout=0.0, threads=1)
    noised = build_mode(FORWARD, workload)
    plain = build_mode(NON_PRIVATE, workload, shared=noised.model)
    batch = make_batch(workload, noised.model)
    results = []
    for mode in (plain, noised, noised):
        mode.step(batch)
        results.append(result(mode))
        mode.reset()
    assert results[0].keys() == results[1].keys() == dict(noised.model.named_parameters()).keys()
    heads = [each["classifier.weight"] for each in results]
    assert not any(itertools.starmap(torch.allclose, itertools.combinations(heads, 2)))


@pytest.mark.parametrize(
    ("name", "model", "checkpointing", "reason"),
    [
        (FORWARD, "tiny", False, "UnsupportedModelError: .*predicts for each token"),
        *((name, "tiny-bert", True, "Error: .+") for name in OPACUS),
    ],
)
def test_what_a_mode_cannot_do_is_refused_with_its_reason(name, model, checkpointing, reason):
    if name in OPACUS:
        pytest.importorskip("opacus")
    workload = Workload(model, 4, 12, threads=1, gradient_checkpointing=checkpointing)
    mode = build_mode(name, workload)
    with pytest.raises(Refused, match=reason), refusals(name):
        mode.step(make_batch(workload, mode.model))


def test_only_known_inabilities_of_our_own_modes_are_refusals():
    with pytest.raises(Refused, match="UnsupportedModelError: no"), refusals("book_keeping"):
        raise UnsupportedModelError("no\nmore")
    with pytest.raises(Refused, match="out of memory"), refusals(NON_PRIVATE):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        )
    with pytest.raises(KeyError), refusals("book_keeping"):
        raise KeyError("a bug")


def test_modes_are_checked():
    assert check_modes(["book_keeping", "book_keeping"]) == (NON_PRIVATE, "book_keeping")
    assert MODES == (NON_PRIVATE, *STRATEGIES, FORWARD, *OPACUS)
    message = r"`modes`.*'book_keeping'.*Did you mean 'book_keeping'"
    with pytest.raises(InvalidArgumentError, match=message):
        check_modes(["bookkeeping"])


def test_opacus_is_named_with_its_extra_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HfDpError, match=r"`modes`.*'opacus_ghost'.*pip install hf-dp\[bench\]"):
        check_modes(["opacus_ghost"])


PARAMETERS = {  # published, in millions; a classifier's head included
    "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "roberta-base": 124.6, "minilm": 22.7,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = SHAPES[name].build(0.1, True)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(PARAMETERS[name], abs=0.1)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_lora_trains_its_own_weights_only():
    with torch.device("meta"):
        model = SHAPES["gpt2-lora"].build(0.1, True)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == 12 * 8 * (768 + 3 * 768)
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt-2"}, "`model`.*Did you mean 'gpt2'"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size`.*>= 1"),
        ({"max_length": 33}, "`max_length`.*at most 32.*33"),
        ({"max_length": 1}, "`max_length`.*>= 2"),
        ({"threads": 0.5}, "`threads`.*whole"),
    ],
)
def test_a_wrong_workload_is_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Workload(**{"model": "tiny", "max_length": 12, **fields})


def test_options_of_training_have_its_names_and_defaults():
    """All but three are options of ``hf-dp train``; the model is a shape, not a name of the Hub."""
    trained = {
        field.name: field.default
        for cls in (DPTrainingArguments, DataArguments)
        for field in dataclasses.fields(cls)
    }
    trained["gradient_checkpointing"] = bool(trained["gradient_checkpointing"])  # None is off
    own = {field.name: field.default for field in dataclasses.fields(Workload)}
    assert own.keys() - trained.keys() == {"model", "threads", "dropout"}
    for name in own.keys() & trained.keys():
        assert own[name] == trained[name], name


def test_every_example_of_a_batch_is_its_own():
    workload = Workload("tiny-bert", 4, 12, threads=1)
    model = build_model(workload)
    state = torch.get_rng_state()
    batch, again = make_batch(workload, model), make_batch(workload, model)
    assert torch.equal(state, torch.get_rng_state())
    assert len(batch["input_ids"].unique(dim=0)) == 4 and batch["attention_mask"].all()
    assert all(torch.equal(value, again[name]) for name, value in batch.items())
