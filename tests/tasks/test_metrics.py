"""The metric modules: what they compute, and that they are part of the installed package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hf_dp.errors import InvalidArgumentError
from hf_dp.tasks.classification import METRICS, metrics

ROOT = Path(__file__).parents[2]


def test_accuracy_and_f1_against_counts():
    labels = np.array([0, 1, 1, 0, 1, 1])
    predicted = np.array([0, 1, 0, 1, 1, 1])  # 3 true positives, 1 false positive, 1 false negative
    prediction = SimpleNamespace(predictions=np.eye(2)[predicted], label_ids=labels)
    assert metrics(METRICS, 2)(prediction) == {
        "accuracy": pytest.approx(4 / 6),
        "f1": pytest.approx(2 * 3 / (2 * 3 + 1 + 1)),
    }
    nothing = SimpleNamespace(predictions=np.eye(2)[[0, 0]], label_ids=np.array([0, 0]))
    assert metrics(["f1"], 2)(nothing) == {"f1": 0.0}


def test_f1_is_of_two_classes():
    with pytest.raises(InvalidArgumentError, match="without f1 for 3 classes"):
        metrics(["f1"], 3)
    with pytest.raises(InvalidArgumentError, match="`metrics` to be one of"):
        metrics(["bleu"], 2)


def test_the_modules_are_shipped():
    """A Python file inside a package that setuptools finds is in the wheel."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    setuptools = pytest.importorskip("setuptools")
    packages = setuptools.find_namespace_packages(str(ROOT), include=found["find"]["include"])
    assert {"hf_dp.tasks.generation", "hf_dp.cli.tasks"} <= set(packages)
