"""Give each worker its own cache of data sets, and search what lives on for garbage only once."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file, keep what its tests imported and cached out of later collections, too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_lives()


def _keep_what_lives() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick_word_on_equal_rows(monkeypatch):
    """Many tests train on a few rows that repeat; only tests/run/test_outlook.py reads for what
    epsilon, which takes half a second."""
    if (outlook := sys.modules.get("hf_dp.planning")) is not None:
        monkeypatch.setattr(outlook, "_epsilon", lambda events, delta: 0.0)
