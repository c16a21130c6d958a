"""Every package that hf_dp imports is declared in pyproject.toml, with a bound that holds here, and
what is installed fits together."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_layering import names_imported

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Imported inside a function, where the feature of an extra is used, or by a module that is the
# feature.
EXTRAS = {
    "matplotlib": "plot", "opacus": "bench", "bitsandbytes": "quantized",
    "sacrebleu": "generation", "nltk": "generation", "rouge_score": "generation",
    "pycocoevalcap": "generation", "bert_score": "generation", "trl": "trl",
    "sentence_transformers": "embeddings",
    "PIL": "images", "ray": "ray",
}  # fmt: skip
# Modules that are not called as their package.
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}


def imported() -> dict[str, set[str]]:
    """Return the top-level modules that hf_dp imports, with the files that import them."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "hf_dp").rglob("*.py"):
        for name in names_imported(path.read_text(encoding="utf-8"), "", False):
            found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    comes_with_python = {*sys.stdlib_module_names, "_typeshed"}  # the latter for type checkers
    return {name: files for name, files in found.items() if name not in comes_with_python}


def declared(requirements: list[str]) -> dict[str, Requirement]:
    """Return requirements by the canonical name of their distribution."""
    parsed = [Requirement(text) for text in requirements]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def package(module: str) -> str:
    """Return the canonical name of the package that has this module."""
    return canonicalize_name(PACKAGES.get(module, module))


def test_every_import_is_declared():
    required = declared(PROJECT["dependencies"])
    problems = []
    for module, files in imported().items():
        if module == "hf_dp" or module in EXTRAS:
            continue
        if package(module) not in required:
            problems.append(f"{module}, imported by {sorted(files)}")
    assert problems == []


def test_optional_imports_belong_to_an_extra():
    for module, extra in EXTRAS.items():
        assert package(module) in declared(PROJECT["optional-dependencies"][extra])


def test_every_dependency_is_imported():
    """Except those that a feature needs though no module of ours imports them."""
    without_import = {"accelerate"}  # transformers' Trainer imports it
    used = set(map(package, imported()))
    assert set(declared(PROJECT["dependencies"])) - used <= without_import


def test_bounds_hold_for_the_pinned_versions():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", line):
            pins[canonicalize_name(match[1])] = match[2]
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for name, requirement in declared([text for group in groups for text in group]).items():
        if name in pins:
            assert requirement.specifier.contains(pins[name]), f"{requirement} and {pins[name]}"
    assert set(declared(PROJECT["dependencies"])) <= pins.keys()


def test_what_is_installed_fits_together():
    """As ``pip check`` finds, in a part of its time."""
    installed = list(metadata.distributions())
    versions = {canonicalize_name(each.name): each.version for each in installed}
    problems = []
    for each in installed:
        for needed in map(Requirement, each.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                version = versions.get(canonicalize_name(needed.name))
                if version is None or not needed.specifier.contains(version, prereleases=True):
                    problems.append(f"{each.name} needs {needed}, and has {version}")
    assert problems == []
