"""Secret randomness: Gaussian noise, and the private streams of everything else that is random.

All of it is seeded by the operating system, never from ``seed`` or ``data_seed``. Seeds are never
saved, because anyone who knew a seed could draw the same noise and subtract it. The generators are
statistical, not cryptographic; the statement says so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hf_dp.errors import LedgerError


class SecretRandomness:
    """The random sources of one private run.

    ``random_bytes(n)`` feeds the sampler, and ``gaussian_like`` draws noise. ``streams()`` switches
    the global generators of Python, NumPy and PyTorch to private streams and back, for dropout,
    masking collators and augmentation.

    Args:
        insecure_seed: for tests only; makes every draw reproducible and the run *not private*.
        rank: of this process; with a seed, each has a stream of its own.
    """

    def __init__(self, insecure_seed: int | None = None, rank: int = 0):
        self.insecure, self._process = insecure_seed is not None, os.getpid()
        # SeedSequence(None) takes 128 bits from the operating system. PyTorch's CPU generator would
        # keep only 32 bits of its seed: few enough to try them all against a released weight.
        own = (rank,) if rank else ()
        self._numpy = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence(insecure_seed, spawn_key=own))
        )
        self._by_device: dict[torch.device, torch.Generator] = {}
        self._streams: _GlobalState | None = None

    def __copy__(self) -> NoReturn:
        raise TypeError("SecretRandomness cannot be copied: two runs would draw the same noise.")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` random bytes. They come from the operating system's cryptographic
        source, unless ``insecure_seed`` was given."""
        return self._numpy.bytes(count) if self.insecure else os.urandom(count)

    def fingerprint(self) -> str:
        """Return what two sources have in common only if they draw the same noise. It is a digest
        of fresh draws, which are used for nothing else. The operating system's bytes are left out:
        they differ even for copies."""
        return sha256(self._numpy.standard_normal(8).tobytes()).hexdigest()

    def seed(self) -> int:
        """Return a fresh 63-bit seed for a generator that takes one."""
        return int.from_bytes(self.random_bytes(8), "little") >> 1

    def gaussian_like(self, tensor: Tensor, std: float) -> Tensor:
        """Return independent normal noise of the tensor's shape and device, in float32 or better.
        ``std`` is its standard deviation."""
        if os.getpid() != self._process:
            raise LedgerError(
                "This process was forked from the one that made the source of its noise, and would "
                "draw the same noise. Create the trainer, or the PrivateRun, in the process that "
                "trains."
            )
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if tensor.device.type == "cpu":
            numpy_dtype = np.float64 if dtype == torch.float64 else np.float32
            return torch.from_numpy(
                self._numpy.standard_normal(tuple(tensor.shape), dtype=numpy_dtype)
            ).mul_(std)
        if tensor.device not in self._by_device:
            self._by_device[tensor.device] = self._generator_on(tensor.device)
        generator = self._by_device[tensor.device]
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).normal_(
            0, std, generator=generator
        )

    def _generator_on(self, device: torch.device) -> torch.Generator:
        """Return a generator with 125 secret bits on CUDA devices, with 63 on others."""
        generator = torch.Generator(device)
        if device.type != "cuda":
            return generator.manual_seed(self.seed())
        # CUDA's generator is Philox. Its state is a key of 64 bits and a place in the stream, a
        # 63-bit multiple of 4. manual_seed would begin at place 0.
        key, place = self.random_bytes(8), (self.seed() >> 2) << 2
        state = bytearray(key + place.to_bytes(8, "little"))
        generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        return generator

    def reseed(self, index: int | None = None) -> None:
        """Reseed the global generators (Python, NumPy, PyTorch's CPU) for example ``index``. Call
        it inside :meth:`streams`, or in a worker process. The index matters only in tests that give
        each example the same randomness in two runs; see :meth:`example_seed`."""
        _seed_global_generators(self.example_seed(index))

    def example_seed(self, index: int | None) -> int:
        """Return a fresh secret seed for one example."""
        return self.seed()

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Run the global generators on private streams inside. Outside, they are as if nothing had
        been drawn."""
        public = _GlobalState()
        if self._streams is None:
            seed = self.seed()
            torch.manual_seed(seed)  # on all devices
            _seed_global_generators(seed)
        else:
            self._streams.restore()
        try:
            yield
        finally:
            self._streams = _GlobalState()
            public.restore()


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Let the global generators run inside. Outside, they are as if nothing had been drawn."""
    before = _GlobalState()
    try:
        yield
    finally:
        before.restore()


GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)


def seed_in_place(generator: object, seed: int) -> Callable[[], object]:
    """Seed one of ``GENERATORS`` anew, and return what puts it back where it was."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        generator.manual_seed(seed)
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        before = generator.getstate()
        generator.seed(seed)
        return lambda: generator.setstate(before)
    inside = getattr(generator, "_bit_generator", generator)
    bits: Any = getattr(generator, "bit_generator", inside)
    stream = bits.__reduce__()[2]  # with the sequence of seeds from which others are spawned
    bits.__setstate__(type(bits)(seed).__reduce__()[2])
    return lambda: bits.__setstate__(stream)


def _seed_global_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class _GlobalState:
    """Where the global generators of Python, NumPy and PyTorch are."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch = torch.get_rng_state()
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.cuda = torch.cuda.get_rng_state_all() if on_cuda else None

    def restore(self) -> None:
        """Put them there again."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
