"""The processes that train one model together, and how they agree.

What one process refuses, all refuse: a process that went on alone would wait forever for the
others, or release what they do not know of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hf_dp.errors import DistributedError

Result = TypeVar("Result")

_DIGEST = 16  # bytes
_KNOWN = "_known_to_all_processes"  # of an error
# One group for each default group: a message must not wait for a device, nor pair with a sum.
_GROUPS: dict[dist.ProcessGroup | None, dist.ProcessGroup] = {}


class Processes:
    """The processes of one run; by default this one alone. Rank 0, the main one, keeps the ledger.

    Messages go over gloo on the CPU, also where tensors go over NCCL. Every method must be called
    by all processes in the same order.
    """

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @classmethod
    def here(cls) -> Processes:
        """Return those of ``torch.distributed``, or this process alone where it is not used."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.count == 1

    # -- acting together --

    def together(self, act: Callable[[], Result]) -> Result:
        """Return ``act()``, once it has succeeded in every process; raise what it raises here, or
        DistributedError when it failed elsewhere."""
        if self.alone:
            return act()
        with self.telling():
            result = act()
        self._hear("")
        return result

    def agree(self, what: str) -> None:
        """Go on when every process is about to do the same, or raise DistributedError."""
        if not self.alone:
            self._hear(what)

    def on_main(self, act: Callable[[], Result]) -> Result:
        """Return in every process what ``act()`` returns in the main one, which alone runs it;
        raise what it raises there, and DistributedError elsewhere."""
        if self.alone:
            return act()
        done: list[Any] = [self.together(act if self.is_main else lambda: None)]
        with others_present():
            dist.broadcast_object_list(done, src=0, group=self._group())
        result: Result = done[0]
        return result

    def from_each(self, act: Callable[[], Result]) -> list[Result]:
        """Return what ``act()`` returns in each process, by rank; raises as :meth:`together`."""
        result = self.together(act)
        return [result] if self.alone else self._everyones(result)

    def tell(self, error: BaseException) -> None:
        """Let the others raise in their next :meth:`together` or :meth:`agree`, once: an error that
        was told, or that all have heard of, is told to nobody again, who would not listen."""
        if self.alone or getattr(error, _KNOWN, False):
            return
        setattr(error, _KNOWN, True)
        try:
            self._gathered(b"\1" + bytes(_DIGEST))
            self._everyones(f"{type(error).__name__}: {error}"[:2000])
        except Exception as lost:  # the others are gone: the first error is what matters
            error.add_note(f"The other processes could not be told: {lost}")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error inside, where they go on to act together or to agree. They
        would not listen inside another collective."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def _hear(self, said: str) -> None:
        """Raise DistributedError when another process failed or says something else."""
        found = self._gathered(b"\0" + hashlib.blake2b(said.encode(), digest_size=_DIGEST).digest())
        failed = [rank for rank, each in enumerate(found) if each[0]]
        if failed:
            texts = self._everyones("")
            raise _known(
                f"Rank {failed[0]} of {self.count} failed, so this one (rank {self.rank}) stops "
                f"too: {texts[failed[0]]}"
            )
        other = [rank for rank, each in enumerate(found) if each != found[0]]
        if other:
            raise _known(
                f"Ranks {other} of {self.count} disagree with rank 0 about what happens next "
                f"(rank {self.rank}: {said}). Nothing more is released. Start all processes "
                "together, with the same code, arguments and data."
            )

    def _everyones(self, value: Result) -> list[Result]:
        """Return what each process gives, by rank."""
        found: list[Any] = [None] * self.count
        with others_present():
            dist.all_gather_object(found, value, group=self._group())
        return found

    def _gathered(self, message: bytes) -> list[bytes]:
        """Return the messages of all processes, of equal length, by rank."""
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with others_present():
            dist.all_gather(found, own, group=self._group())
        return [bytes(each.tolist()) for each in found]

    # -- comparing --

    def refuse_differences(self, facts: Mapping[str, str]) -> None:
        """Raise DistributedError naming the first fact that differs from rank 0's, with both."""
        if self.alone:
            return
        everyone = self._everyones(dict(facts))
        main = everyone[0]
        for rank, theirs in enumerate(everyone):
            for name in [*main, *(name for name in theirs if name not in main)]:
                if theirs.get(name) != main.get(name):
                    raise DistributedError(
                        f"The processes of one run differ in {name}: rank {rank} has "
                        f"{theirs.get(name)}, rank 0 has {main.get(name)}. Start all of them with "
                        "the same code, arguments and data."
                    )

    def refuse_equal(self, what: str, fingerprint: str, remedy: str) -> None:
        """Raise DistributedError when two processes have the same of what must differ."""
        if self.alone:
            return
        everyone = self._everyones(fingerprint)
        for rank, theirs in enumerate(everyone):
            if theirs in everyone[:rank]:
                raise DistributedError(
                    f"Ranks {everyone.index(theirs)} and {rank} have the same {what}. {remedy}"
                )

    def largest(self, number: int) -> int:
        """Return the largest of the processes' numbers."""
        if self.alone:
            return number
        found = torch.tensor(number)
        with others_present():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group())
        return int(found)

    # -- tensors --

    @torch.no_grad()
    def summed(self, tensor: Tensor) -> Tensor:
        """Add up the processes' tensors of equal shape, in place, and return the sum."""
        if not self.alone:
            with others_present():
                dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def from_main(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the main process's, and return it."""
        if not self.alone:
            with others_present():
                dist.broadcast(tensor, src=0)
        return tensor

    def _group(self) -> dist.ProcessGroup:
        """Return the group for messages; made when all processes first meet."""
        world = dist.group.WORLD
        if world not in _GROUPS:
            _GROUPS.clear()
            with others_present():
                _GROUPS[world] = dist.new_group(backend="gloo")
        return _GROUPS[world]


def _known(message: str) -> DistributedError:
    """Return the error of a process that has heard what all hear."""
    error = DistributedError(message)
    setattr(error, _KNOWN, True)
    return error


@contextmanager
def others_present() -> Iterator[None]:
    """Raise DistributedError where a collective fails inside, because a process is gone."""
    try:
        yield
    except RuntimeError as problem:
        if isinstance(problem, DistributedError) or not _is_of_a_collective(problem):
            raise
        raise DistributedError(
            "Another process of this run has ended, or did not answer in time "
            f"({str(problem).splitlines()[0][:200]}). What was released is in the ledger. Look for "
            "the first error in the other processes' output, and resume from the last checkpoint."
        ) from problem


def _is_of_a_collective(problem: RuntimeError) -> bool:
    # gloo has no class of errors of its own
    text = str(problem).lower()
    return isinstance(problem, dist.DistError) or any(name in text for name in ("gloo", "nccl"))


# -- one noisy sum from the sums of several processes --
#
# Each process holds a clipped sum over its own examples. Their total gets its noise once, element
# by element: the totals are scattered over the processes, the one that owns an element draws its
# noise, and the noisy elements are gathered. No process holds another's sum, nor a total without
# noise that it does not own; and all end with the same bits.

# Numbers that travel together: large enough for the bandwidth of a network, and small beside the
# sums of a model. Between processes on CPUs a quarter, which stays in a cache: gloo then takes half
# the time.
BUCKET = 2**23

Noise = Callable[[Tensor], Tensor]  # of the shape, type and device of its argument


@torch.no_grad()
def add_up_with_noise(sums: Sequence[Tensor], noise: Noise, processes: Processes) -> None:
    """Replace this process's sums in place, everywhere in the same order, by those of all processes
    with independent noise. A sharded one (DTensor) was added up before, and is noised where it is.
    """
    for total in sums:
        if isinstance(total, DTensor):
            _add_to_shard(total, noise)
    own = [total for total in sums if not isinstance(total, DTensor)]
    for bucket in _buckets(own):
        if processes.alone:
            _add_noise(bucket, noise)
        else:
            _scatter_noise_gather(bucket, noise, processes)


def reduce_scatter(owned: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``owned`` with this process's part of the sum of all processes' ``flat``, of one
    dimension.

    What travels is of flat's type and is added in that of ``owned``: a reduction of float32 numbers
    would round each sum as its partners make it. (With gloo this also takes half the time.)
    """
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    torch.sum(received.view(-1, len(owned)), 0, dtype=owned.dtype, out=owned)


def _buckets(sums: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list into lists of one type and device, of at most a bucket's numbers each; larger
    tensors into views of parts."""
    bucket: list[Tensor] = []
    size = 0
    for part in (part for total in sums for part in _parts(total)):
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (part.dtype, part.device)
        if bucket and (not alike or size + part.numel() > bucket_numbers(part)):
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.numel()
    if bucket:
        yield bucket


def _parts(total: Tensor) -> Sequence[Tensor]:
    if total.numel() > bucket_numbers(total) and total.is_contiguous():
        return total.view(-1).split(bucket_numbers(total))
    return [total]


def bucket_numbers(tensor: Tensor) -> int:
    """Return how many numbers travel together at most, where this tensor is."""
    return max(1, BUCKET // 4) if tensor.device.type == "cpu" else BUCKET


def _add_noise(bucket: list[Tensor], noise: Noise) -> None:
    """Draw the noise of a bucket at once: a GPU starts two kernels and not two for each tensor."""
    if len(bucket) == 1:
        bucket[0].add_(noise(bucket[0]))
        return
    sizes = [total.numel() for total in bucket]
    drawn = noise(bucket[0].new_empty(sum(sizes))).split(sizes)
    parts = [part.view(total.shape) for part, total in zip(drawn, bucket, strict=True)]
    torch._foreach_add_(bucket, parts)


def _scatter_noise_gather(bucket: list[Tensor], noise: Noise, processes: Processes) -> None:
    sizes = [total.numel() for total in bucket]
    padding = -sum(sizes) % processes.count
    flat = torch.cat([*(total.reshape(-1) for total in bucket), bucket[0].new_zeros(padding)])
    owned = flat.new_empty(len(flat) // processes.count)
    with others_present():
        reduce_scatter(owned, flat)
        owned.add_(noise(owned))
        dist.all_gather_single(flat, owned)
    for total, part in zip(bucket, flat.split([*sizes, padding]), strict=False):
        total.copy_(part.view(total.shape))


def _add_to_shard(total: DTensor, noise: Noise) -> None:
    """Noise this process's shard; where several processes hold a copy of it, one of them draws."""
    local, mesh = total.to_local(), total.device_mesh
    drawn = noise(local)
    for dimension, placement in enumerate(total.placements):
        if isinstance(placement, Replicate) and mesh.size(dimension) > 1:
            group = mesh.get_group(dimension)
            with others_present():
                dist.broadcast(drawn, src=dist.get_global_rank(group, 0), group=group)
    local.add_(drawn)
