"""Recipes of images that no paper has values for: what they say, and the halves of a small ViT."""

from __future__ import annotations

import pytest
from test_recipes import PRIVACY, RECIPES, REPRODUCTIONS, ROOT, parsed

from hf_dp.cli.config import read_yaml
from hf_dp.statement.facts import seen_in_pretraining

METHODS = ("full", "random", "pval", "lora", "adapter", "frost")
PUBLIC = "recipes/images/small_vit/public.yaml"
SMALL = [f"recipes/images/small_vit/{m}.yaml" for m in ("full", "lora", "rgp", "frost", "random")]
CIFAR_10 = [f"recipes/images/cifar10/vit_base_{method}.yaml" for method in METHODS]


def test_the_image_recipes_are_there():
    found = {name for name in RECIPES if name.startswith("recipes/images/")}
    table = {name for name in REPRODUCTIONS if name.startswith("recipes/images/")}
    assert len(table) == 6 and found == {PUBLIC, *SMALL, *CIFAR_10, *table}


@pytest.mark.parametrize("name", SMALL)
def test_an_image_recipe_takes_the_private_half(name):
    model, data, _ = parsed(read_yaml(str(RECIPES[name])))
    _, _, _, rows = PRIVACY.search(RECIPES[name].read_text()).groups()
    assert data.image_column == "img" and not data.augmentation
    assert (int(rows), data.train_split, model.new_head) == (5000, "train[5000:]", True)


@pytest.mark.parametrize("name", CIFAR_10)
def test_cifar_10_runs_as_cifar_100_does(name):
    beside = name.replace("cifar10/", "cifar100/")
    ours, theirs = (read_yaml(str(RECIPES[each])) for each in (name, beside))
    privacy = [PRIVACY.search(RECIPES[each].read_text()).group() for each in (name, beside)]
    assert privacy[0] == privacy[1]  # which test_recipes.py computes again
    data = ("dataset_name", "label_column", "output_dir")
    assert {k: v for k, v in ours.items() if k not in data} == {
        k: v for k, v in theirs.items() if k not in data
    }


def test_the_page_on_images_has_the_values_of_table_2():
    page = (ROOT / "recipes/images/README.md").read_text()
    for name, recipe in REPRODUCTIONS.items():
        if name.startswith("recipes/images/"):
            values = " | ".join(f"{v:.2f}" for v in recipe.of(recipe.experiment["scores"]))
            assert f"({name.removeprefix('recipes/images/')}) | {values}" in page


def test_the_public_half_and_the_private_half_share_no_row():
    """And the card of a private run does not take one for the other."""
    _, public, args = parsed(read_yaml(str(RECIPES[PUBLIC])))
    assert (public.train_split, args.privacy_mode) == ("train[:5000]", "non_private")
    for name in SMALL:
        model, private, _ = parsed(read_yaml(str(RECIPES[name])))
        assert model.model_name_or_path == args.output_dir
        assert private.train_split == "train[5000:]"
        assert not seen_in_pretraining(private.public_name, [public.public_name])
        assert seen_in_pretraining("cifar10", [public.public_name])
