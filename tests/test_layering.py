"""A module imports only its own layer and lower ones, and every module has a layer (design, section
2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_dp"

LAYERS = {
    "errors": 0, "_validate": 0, "_version": 0, "_borrowed": 0, "_dataclasses": 0, "_arguments": 0,
    "accounting": 1,
    "plans": 2, "planning": 2,
    "clipping": 3, "distributed": 3, "noise": 3, "losses": 3, "statement": 3,
    "batches": 4, "overlap": 4, "run": 4, "streams": 4, "tasks": 4,
    "mechanisms": 5, "tuners": 5,
    "features": 6,
    "cards": 7, "publishing": 7, "trainer": 7,
    "cli": 8, "audit": 8, "benchmarks": 8,
}  # fmt: skip

# `__init__` lists the public names and loads each when first used, so it may name all layers;
# nobody may import from it.
FACADE = "__init__"


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Dotted names below the package, ``clipping.rules.affine``, and their files."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def names_imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """What this source imports, ``hf_dp.plans.PrivacyPlan``, at any depth and also for type
    checking."""
    here = ["hf_dp", *module.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + is_package] if node.level else []
            base = [*above, *filter(None, [node.module])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


@cache
def imported_by(module: str, path: Path) -> tuple[str, ...]:
    source = path.read_text(encoding="utf-8")
    return tuple(names_imported(source, module, path.name == "__init__.py"))


def violations(package: Path) -> list[str]:
    found = []
    for module, path in modules(package):
        top = module.split(".")[0]
        if module == FACADE:
            continue
        if top not in LAYERS:
            found.append(f"{module} has no layer: add it to LAYERS and to the design")
            continue
        names = (name.split(".") for name in imported_by(module, path))
        # '' is hf_dp itself
        for target in sorted({"".join(rest[:1]) for first, *rest in names if first == "hf_dp"}):
            if target not in LAYERS:
                found.append(
                    f"{module} imports hf_dp{'.' if target else ''}{target}, which has no layer"
                )
            elif LAYERS[target] > LAYERS[top]:
                found.append(
                    f"{module} (layer {LAYERS[top]}) imports {target} (layer {LAYERS[target]})"
                )
    return found


def circles(package: Path) -> list[list[str]]:
    """Return the groups of modules that import each other."""
    paths = {f"hf_dp.{name}": path for name, path in modules(package) if name != FACADE}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = imported_by(name.removeprefix("hf_dp."), path)
        targets = {each if each in paths else each.rpartition(".")[0] for each in found}
        graph[name] = targets & set(paths) - {name}
    reached = {name: _reachable(graph, name) for name in graph}
    together = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(together)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def test_no_modules_import_each_other():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "from hf_dp.plans import b",
        "def f():\n    import hf_dp.plans.b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_dp.plans.b import B",
    ],
)
def test_planted_circles_are_seen(source, tmp_path):
    folder = tmp_path / "hf_dp" / "plans"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text(source)
    (folder / "b.py").write_text("from hf_dp.plans.a import A")
    assert circles(tmp_path / "hf_dp") == [["hf_dp.plans.a", "hf_dp.plans.b"]]


def test_no_module_imports_a_higher_layer():
    assert violations(PACKAGE) == []


def test_the_checker_reads_every_module():
    deeper = {"accounting.pld", "clipping.rules.affine", "plans.privacy"}
    assert {"errors", "accounting", FACADE, *deeper} <= set(dict(modules(PACKAGE)))


PLANTED = {
    "absolute": ("clipping/engine.py", "from hf_dp.trainer.arguments import X", "clipping.engine (layer 3) imports trainer"),
    "plain import": ("plans/privacy.py", "import hf_dp.clipping.engine", "plans.privacy (layer 2) imports clipping (layer 3)"),
    "from the package": ("accounting/pld.py", "from hf_dp import plans", "accounting.pld (layer 1) imports plans (layer 2)"),
    "relative": ("accounting/pld.py", "from ..plans import PrivacyPlan", "accounting.pld (layer 1) imports plans (layer 2)"),
    "relative to the package": ("noise.py", "from . import trainer", "noise (layer 3) imports trainer (layer 7)"),
    "inside a package's init": ("clipping/__init__.py", "from ..cards import x", "clipping (layer 3) imports cards (layer 7)"),
    "inside a function": ("errors.py", "def f():\n    from hf_dp import plans", "errors (layer 0) imports plans (layer 2)"),
    "for type checking": (
        "errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hf_dp.cli.main",
        "errors (layer 0) imports cli (layer 8)",
    ),
    "a new module": ("novelty.py", "", "novelty has no layer"),
    "a new package": ("novelty/inner.py", "", "novelty.inner has no layer"),
    "a public name from the facade": ("cli/main.py", "from hf_dp import DPTrainer", "imports hf_dp.DPTrainer, which has no"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_planted_violations_are_seen(case, tmp_path):
    name, source, message = PLANTED[case]
    path = tmp_path / "hf_dp" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    found = violations(tmp_path / "hf_dp")
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("trainer/trainer.py", "from hf_dp.clipping import ClippingEngine\nfrom hf_dp import _validate\nimport torch"),
        ("clipping/rules/linear.py", "from ..gradients import Dense\nfrom hf_dp.clipping.tape import Tape"),
        ("accounting/__init__.py", "from .pld import f\nfrom hf_dp.errors import HfDpError"),
    ],
)  # fmt: skip
def test_lower_and_own_layers_are_allowed(name, source, tmp_path):
    path = tmp_path / "hf_dp" / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path / "hf_dp") == []
