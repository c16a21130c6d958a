"""Same draws, noise and weights in each run of a test, so that none fails by chance.

All seeds follow from the name of the test, or of the fixture that tests share. Neither the order of
tests nor the worker matters. Runs do not know: their statements speak of the operating system's
randomness. Tests that are about that source have it, by ``@pytest.mark.os_randomness``.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_of_runs: random.Random | None = None  # seeds the next run; None: the operating system does


def pytest_collection_finish() -> None:
    """Let runs ask here for their seeds, where what was collected can run any."""
    noise: Any = sys.modules.get("hf_dp.noise")
    if noise is None:
        return
    kind, honest = noise.SecretRandomness, noise.SecretRandomness.__init__

    def seeded(self: Any, insecure_seed: int | None = None, rank: int = 0) -> None:
        given = insecure_seed is not None
        self.of_test = not given and _of_runs is not None
        if self.of_test:
            insecure_seed = _of_runs.getrandbits(64)
        honest(self, insecure_seed, rank)
        self.insecure = given

    def random_bytes(self: Any, count: int) -> bytes:
        if self.insecure or getattr(self, "of_test", False):
            return self._numpy.bytes(count)
        return os.urandom(count)

    kind.__init__, kind.random_bytes = seeded, random_bytes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed all by the name of the test, before any of its fixtures is set up."""
    global _of_runs
    _seed_global_generators(item.nodeid)
    asked = item.get_closest_marker("os_randomness") is not None
    _of_runs = None if asked else random.Random(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Seed what tests share by its own name: which of them comes first must not matter."""
    if fixturedef.scope == "function":
        return (yield)
    with _seeded(f"{fixturedef.baseid}::{fixturedef.argname}"):
        return (yield)


@contextmanager
def _seeded(name: str) -> Iterator[None]:
    global _of_runs
    before, torch = (_of_runs, random.getstate()), sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    of_torch = torch and torch.get_rng_state()
    of_numpy = numpy and numpy.random.get_state()
    _of_runs = random.Random(name)
    _seed_global_generators(name)
    try:
        yield
    finally:
        _of_runs = before[0]
        random.setstate(before[1])
        if of_torch is not None:
            torch.set_rng_state(of_torch)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)


def _seed_global_generators(name: str) -> None:
    random.seed(name)
    seed = random.Random(name).getrandbits(32)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
