"""Per-example losses equal the model's own on a batch of one, and depend on their example alone."""

import re

import pytest
import torch
from models import (
    BUILDERS,
    CLASSIFIERS,
    LANGUAGE_MODELS,
    SHORT,
    alone,
    batch_for,
    bert,
    distilbert,
    gpt2,
    llama,
    rows,
)
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dp.errors import DataError, UnsupportedLossError, UnsupportedModelError
from hf_dp.losses import per_example_loss, problem_type, task_of, with_position_ids

# transformers rounds language-model logits to float32 before its loss; classifiers stay in float64
RTOL = {"classifier": 1e-12, "language_model": 1e-5}


@pytest.mark.parametrize("name", BUILDERS)
def test_each_loss_is_the_models_own_on_that_example_alone(name):
    model = BUILDERS[name]()
    batch = batch_for(model, (5, 2, 13, 4))
    found = per_example_loss(model, batch)
    assert found.shape == (4,)
    expected = torch.stack([model(**alone(batch, i)).loss for i in range(4)])
    kind = "classifier" if name in CLASSIFIERS else "language_model"
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=RTOL[kind], atol=1e-12)
    for cut in ([0], [1, 0], [3, 1, 0]):  # neighbors and their padding do not matter
        fewer = per_example_loss(model, rows(batch, cut))
        torch.testing.assert_close(fewer, found[cut], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", BUILDERS)
def test_each_loss_has_a_gradient_at_its_own_example_only(name):
    """By autograd at the input embeddings."""
    model = BUILDERS[name]()
    batch = batch_for(model, SHORT if name in CLASSIFIERS else (5, 2, 3, 4))
    seen = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    losses = per_example_loss(model, batch)
    handle.remove()
    for i, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
        touched = gradient.flatten(1).abs().sum(1) > 0
        assert touched.tolist() == [j == i for j in range(len(losses))]


# -- classification ---


SEVERAL = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 1}, [0.5, -1.0]),
        ({"num_labels": 1}, [[0.5], [-1.0]]),
        ({"num_labels": 2, "problem_type": "regression"}, [[0.3, -2.0], [1.5, 0.1]]),
        ({}, SEVERAL),
        ({"problem_type": "multi_label_classification"}, SEVERAL),
    ],
    ids=["regression", "regression, (b, 1)", "several targets", "several labels", "declared"],
)
def test_float_labels_have_the_models_own_loss(options, labels):
    model = bert(**options)
    batch = {**batch_for(model, (4, 4)), "labels": torch.tensor(labels).double()}
    found = per_example_loss(model, batch)
    torch.testing.assert_close(found, own_losses(model, batch), rtol=1e-12, atol=0)


def test_regression_takes_integer_targets():
    model = bert(num_labels=1)
    batch = {**batch_for(model, (4, 2)), "labels": torch.tensor([1, 3])}
    expected = (model(**without_labels(batch)).logits[:, 0] - batch["labels"]) ** 2
    torch.testing.assert_close(per_example_loss(model, batch), expected)


@pytest.mark.parametrize(
    ("options", "labels", "kind"),
    [
        ({"num_labels": 1}, torch.tensor([1.0]), "regression"),
        ({"num_labels": 3}, torch.tensor([1]), "single_label_classification"),
        ({"num_labels": 3}, torch.tensor([[1.0, 0.0, 1.0]]), "multi_label_classification"),
        ({"num_labels": 3, "problem_type": "regression"}, torch.tensor([1]), "regression"),
    ],
)
def test_problem_type_is_inferred_as_transformers_does(options, labels, kind):
    model = bert(**options)
    assert problem_type(model, labels) == kind
    # Looking does not decide for the next batch.
    assert model.config.problem_type == options.get("problem_type")


def test_unknown_problem_type():
    model = bert()
    model.config.problem_type = "ranking"
    with pytest.raises(UnsupportedLossError, match="problem_type.*got 'ranking'"):
        per_example_loss(model, {**batch_for(model, (3,)), "labels": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    "labels", [torch.tensor([1]), torch.tensor([[1], [0]])], ids=["one missing", "two dimensions"]
)
def test_labels_that_do_not_fit_a_single_label_model(labels):
    model = bert()
    with pytest.raises(DataError, match=r"one label per example, shape \(2,\), got "):
        per_example_loss(model, {**batch_for(model, (3, 2)), "labels": labels})


@pytest.mark.parametrize(
    "options", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}], ids=str
)
def test_labels_that_do_not_fit_the_outputs(options):
    """(b, K) wanted, (b + 1,) given, which torch's own words would not say."""
    model = bert(**options)
    with pytest.raises(DataError, match=r"got \(3,\)"):
        per_example_loss(model, {**batch_for(model, (3, 2)), "labels": torch.zeros(3)})


def own_losses(model: nn.Module, batch: dict) -> torch.Tensor:
    """The model's own loss of each row alone."""
    rows = ({k: v[i : i + 1] for k, v in batch.items()} for i in range(len(batch["labels"])))
    return torch.stack([model(**row).loss for row in rows])


def without_labels(batch: dict) -> dict:
    return {key: value for key, value in batch.items() if key != "labels"}


def test_missing_labels():
    model = bert()
    said = re.escape("no `labels` (they have ['attention_mask', 'input_ids'])")
    with pytest.raises(DataError, match=said):
        per_example_loss(model, without_labels(batch_for(model, (3,))))


# -- causal language models ---


def test_a_language_model_averages_over_its_own_tokens_that_count():
    """Two of five targets count for the first example, all for the second; a batch mean would
    weight them by tokens."""
    model = gpt2()
    batch = batch_for(model, (6, 6))
    batch["labels"][0, :4] = -100
    found = per_example_loss(model, batch)
    expected = [model(**alone(batch, i)).loss for i in range(2)]
    torch.testing.assert_close(found, torch.stack(expected).to(found.dtype), rtol=1e-5, atol=0)
    batch_mean = model(**batch).loss
    assert abs(float((found.mean() - batch_mean).detach())) > 1e-3  # the conventions differ here


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_an_example_without_targets_has_loss_zero_and_no_gradient(name):
    model = BUILDERS[name]()
    batch = batch_for(model, (4, 1, 3))
    batch["labels"][2] = -100
    losses = per_example_loss(model, batch)
    assert losses[1:].tolist() == [0.0, 0.0]  # one token only; nothing but -100
    gradients = torch.autograd.grad(losses[1:].sum(), list(model.parameters()), allow_unused=True)
    assert not any(bool(g.any()) for g in gradients if g is not None)


@pytest.mark.parametrize("name", ["gpt2_tied", "llama", "gpt2_classifier"])
def test_left_padding_equals_no_padding(name):
    """The first real token must not count as predicted from the last padding position: what a
    padding position attends to depends on how much padding the batch's longest row calls for."""
    model = BUILDERS[name]()
    batch = batch_for(model, (7, 3, 2), left=True)
    expected = torch.stack([per_example_loss(model, alone(batch, i))[0] for i in range(3)])
    found = per_example_loss(model, batch)
    # llama normalises in float32 also in a float64 model
    torch.testing.assert_close(found, expected, rtol=1e-5 if name == "llama" else 1e-10, atol=0)
    gradients = torch.autograd.grad(found.sum(), list(model.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_position_ids_count_real_tokens():
    model = gpt2()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    found = with_position_ids(model, {"input_ids": mask, "attention_mask": mask})["position_ids"]
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 2]]


def test_position_ids_are_left_alone_where_nothing_is_to_be_done():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    left = mask.flip(1)
    for batch in ({"input_ids": mask, "attention_mask": mask}, {"input_ids": mask}):
        assert "position_ids" not in with_position_ids(gpt2(), batch)
    given = {"input_ids": left, "attention_mask": left, "position_ids": left}
    assert with_position_ids(gpt2(), given)["position_ids"] is left


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "albert"])
def test_left_padding_of_an_encoder_is_refused(name):
    """Its positions, or the place of its first token, would depend on the batch's longest row."""
    model = BUILDERS[name]()
    said = f"{type(model).__name__} .*padding_side = 'right'"
    with pytest.raises(UnsupportedModelError, match=said):
        per_example_loss(model, batch_for(model, (4, 2), left=True))


def test_bf16_logits_are_reduced_in_float32():
    for model in (bert(dtype=torch.bfloat16), llama(dtype=torch.bfloat16)):
        assert per_example_loss(model, batch_for(model, (4, 3))).dtype == torch.float32


# -- which loss ---


def test_task_of_a_subclass_and_of_a_peft_model():
    class Mine(type(distilbert())):  # type: ignore[misc]
        pass

    assert task_of(Mine(distilbert().config)) == "sequence_classification"
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(gpt2(), config)
    assert task_of(model) == "causal_lm"
    assert per_example_loss(model, batch_for(model, (4, 2), left=True)).shape == (2,)


@pytest.mark.parametrize(
    "model", [bert().bert, nn.Linear(2, 2)], ids=lambda model: type(model).__name__
)
def test_other_classes_are_refused_by_name(model):
    said = f"known for {type(model).__name__}.*compute_per_example_loss"
    with pytest.raises(UnsupportedLossError, match=said):
        task_of(model)


# -- planted ---


PLANTED = {
    "divided by the batch size": lambda model, inputs: per_example_loss(model, inputs) / len(inputs["input_ids"]),
    "batch mean": lambda model, inputs: per_example_loss(model, inputs).mean().expand(len(inputs["input_ids"])),
    "divided by the batch's tokens": lambda model, inputs: per_example_loss(model, inputs) / inputs["attention_mask"].sum(),
    "divided by the padded length": lambda model, inputs: per_example_loss(model, inputs) / inputs["input_ids"].shape[1],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_coupled_losses_are_seen(name):
    model, planted = gpt2(), PLANTED[name]
    batch = batch_for(model, (5, 2, 4))
    together = planted(model, batch)
    apart = torch.stack([planted(model, alone(batch, i))[0] for i in range(3)])
    assert float((together - apart).detach().abs().max()) > 1e-3


def test_images_beside_text_do_not_excuse_a_missing_mask():
    """Only a batch of images alone has nothing to pad."""
    model = bert()
    batch = batch_for(model, (4, 2))
    batch.pop("attention_mask")
    with pytest.raises(DataError, match="no `attention_mask`"):
        per_example_loss(model, {**batch, "pixel_values": torch.zeros(2, 3, 4, 4)})


def test_longer_logits_are_taken_for_virtual_tokens_only_under_peft():
    model = gpt2()
    batch = batch_for(model, (4, 4))
    with pytest.raises(DataError, match="one label per token"):
        per_example_loss(model, {**batch, "labels": batch["labels"][:, :3]})
