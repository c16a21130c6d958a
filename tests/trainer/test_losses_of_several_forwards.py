"""Losses that run a model several times: the recipes of losses.md, and what a teacher must be."""

from typing import Any

import pytest
import tiny
import torch
from pages import blocks
from torch import nn

from hf_dp.clipping import ClippingEngine, per_example_gradients
from hf_dp.errors import SelfCheckError, UnsupportedArgumentError

RECIPES: dict[str, Any] = {}
for program in blocks("hf_dp/trainer/losses.md", "python"):
    lines = program.split("\n\n\ndistilled = ")[0].split("\n\n\ntwice = ")[0]
    exec(lines, RECIPES)


def recipe(name: str, folder: Any, dropout: float = 0.1, kind: Any = None, **options: Any) -> Any:
    teacher = [tiny.model(seed=7)] if name == "Distilled" else []
    given = {"model": tiny.model(dropout), "eval_dataset": None, "max_steps": 1, **options}
    args = tiny.arguments(
        folder, **{k: v for k, v in given.items() if k not in ("model", "eval_dataset")}
    )
    collator = tiny.DataCollatorWithPadding(tiny.tokenizer())
    return (kind or RECIPES[name])(*teacher, given["model"], args, collator, tiny.dataset())


@pytest.mark.parametrize("name", ["Distilled", "RDrop"])
def test_all_runs_of_the_model_are_clipped_together(name, tmp_path):
    """With the same dropout, by autograd of each loss of the batch in turn, in float64."""
    tested = recipe(name, tmp_path, teacher_is_public=True)
    model = tested.model.double().train()
    if name == "Distilled":
        tested.teacher.double()
    batch = tested.data_collator([tested.train_dataset[place] for place in (0, 5, 17, 30)])

    def losses() -> torch.Tensor:
        torch.manual_seed(3)
        return tested.compute_per_example_loss(model, dict(batch))

    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    alone = list(per_example_gradients(losses(), parameters))
    norms = torch.stack([sum(g.square().sum() for g in one.values()).sqrt() for one in alone])
    with ClippingEngine(model, float(norms.median())) as engine:
        torch.testing.assert_close(engine.backward(losses()), norms, rtol=1e-9, atol=1e-12)
        sums = engine.collect()
    weights = (norms.median() / norms).clamp(max=1)
    for each in parameters:
        exact = sum(w * one[each] for w, one in zip(weights, alone, strict=True))
        torch.testing.assert_close(sums[each], exact, rtol=1e-3, atol=1e-9)
    if name == "RDrop":  # the two runs differ
        torch.manual_seed(3)
        first, second = (
            model(**{k: v for k, v in batch.items() if k != "labels"}).logits for _ in range(2)
        )
        assert (first - second).abs().max() > 1e-3


def test_a_teacher_is_refused_unless_it_is_stated_to_be_public_as_the_card_then_says(tmp_path):
    with pytest.raises(
        UnsupportedArgumentError, match="`teacher_is_public` to be True for Distilled.*`teacher`"
    ):
        recipe("Distilled", tmp_path / "not").train()
    in_a_list = recipe("RDrop", tmp_path / "list")
    in_a_list.teachers = [tiny.model(seed=7)]
    with pytest.raises(UnsupportedArgumentError, match="RDrop, which has a model in `teachers`"):
        in_a_list.train()
    tested = recipe("Distilled", tmp_path / "public", teacher_is_public=True)
    tested.train()
    tested.save_model()
    assert (
        "such as a teacher: the user states that it is public"
        in (tmp_path / "public" / "README.md").read_text()
    )
    plain = recipe("RDrop", tmp_path / "none")
    assert not any("teacher" in each for each in plain.privacy_statement().not_covered)


def test_a_dropout_seed_that_rows_share_is_refused(tmp_path):
    class OneMask(RECIPES["RDrop"]):
        """The planted bug."""

        def compute_per_example_loss(self, model, inputs):
            mask = (torch.rand(16) > 0.1).float()
            labels = inputs.pop("labels")
            hidden = model.bert(**inputs).pooler_output * mask
            return nn.functional.cross_entropy(model.classifier(hidden), labels, reduction="none")

    with pytest.raises(SelfCheckError):
        recipe("RDrop", tmp_path, kind=OneMask).train()
