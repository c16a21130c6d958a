"""Give each worker its own cache of data sets, do once what is costly and the same for all, and leave
out of short runs what takes longer than they do."""

import copy
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest_plugins = ["seeds"]
gc.disable()  # while millions of objects are made that stay: until the tests are collected

SHORT_RUNS = ("trainer", "run", "distributed", "cli", "publishing", "tuners", "features")


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker a cache of data sets of its own.

    ``datasets`` names the cache of a local folder by its name and content. Loading such a folder
    anew deletes what another worker may be reading.
    """
    cache = tempfile.TemporaryDirectory(prefix="hf_dp-datasets-")
    config.add_cleanup(cache.cleanup)
    os.environ["HF_DATASETS_CACHE"] = cache.name


def pytest_collection_finish() -> None:
    """Keep what the imports left out of later collections.

    Each ``Trainer.train()`` calls ``gc.collect()``, which searches every object of torch,
    transformers and the collected tests: a third of a second, longer than most runs here take.
    """
    _keep_what_lives()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file, keep what its tests imported and cached out of later collections, too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_lives()


def _keep_what_lives() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def parsers_are_built_once() -> Iterator[None]:
    """Build the parser of a task's 180 arguments once, and give each who asks a copy.

    It takes transformers 15 ms, and the tests ask a thousand times.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.hf_argparser import HfArgumentParser

    built = functools.cache(HfArgumentParser)

    def copied(kinds: Iterable[type], **options: Any) -> HfArgumentParser:
        parser = copy.copy(built(tuple(kinds), **options))
        actions = {action: copy.copy(action) for action in parser._actions}
        for action in actions.values():
            action.default = copy.copy(action.default)
        parser._actions, parser._defaults = list(actions.values()), {}
        options_of = parser._option_string_actions.items()
        parser._option_string_actions = {word: actions[action] for word, action in options_of}
        return parser

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transformers.hf_argparser.HfArgumentParser", copied)
        yield


@pytest.fixture(autouse=True)
def quick_word_on_equal_rows(monkeypatch):
    """Many tests train on a few rows that repeat; only tests/run/test_outlook.py reads for what
    epsilon, which takes half a second."""
    if (outlook := sys.modules.get("hf_dp.planning")) is not None:
        monkeypatch.setattr(outlook, "_epsilon", lambda events, delta: 0.0)


@pytest.fixture(scope="module", autouse=True)
def without_prv(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave PRV's epsilon out of statements, which tests/cards is about: it takes a quarter of a
    second for each new event, as long as a short run."""
    if request.path.parent.name not in SHORT_RUNS:
        yield
        return
    from statements import comparison_by

    with pytest.MonkeyPatch.context() as patch:
        compare = comparison_by("pld", "rdp", "gdp_clt")
        patch.setattr("hf_dp.statement.wording.compare", compare)
        yield


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the self-check of the engine, which is most of a short run, in files that are about
    other things: ``pytestmark = pytest.mark.usefixtures("unchecked")``."""
    monkeypatch.setattr("hf_dp.run.engine_check.EngineCheck.check", lambda self: None)


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(
        "hf_dp.noise.SecretRandomness.gaussian_like",
        lambda self, tensor, std: tensor.new_zeros(tensor.shape),
    )


@pytest.fixture
def warnings_of(monkeypatch) -> Callable[[str], list[str]]:
    """Return the texts that a module of the library will have warned with."""

    def collect(module: str) -> list[str]:
        told: list[str] = []
        monkeypatch.setattr(
            f"hf_dp.{module}.logger.warning",
            lambda text, *values: told.append(text % values if values else text),
        )
        return told

    return collect
