"""The project's recipes, each read once."""

from functools import cache

from pages import ROOT

from hf_dp.cli.config import Recipe, read_yaml

RECIPES = {
    str(path.relative_to(ROOT)): path
    for path in sorted((ROOT / "recipes").rglob("*.yaml"))
    if "accelerate" not in path.parts
}


@cache
def values_of(name: str) -> Recipe:
    """Return the keys of a recipe, for all who ask: nobody changes them."""
    return read_yaml(str(RECIPES[name]))
