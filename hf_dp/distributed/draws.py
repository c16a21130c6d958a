"""One draw for all processes: the main one makes it, and each process takes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_dp.distributed.processes import Processes
from hf_dp.plans.samplers import Sampler


@dataclass(frozen=True)
class SharedDraws:
    """This process's part of each draw of a sampler, in increasing order, possibly empty.

    The main process alone draws, by its own secret source, cuts a draw that is too large, and sends
    the indices to all. So the draw is that of one process, and the sampler's event is what the
    accountant is told, for any number of processes and after a resume with another one.

    Index i belongs to process i mod W, whoever else is drawn. If the k-th of a draw belonged to
    process k mod W, one example that leaves would move all after it to other processes, and so to
    other physical batches (:mod:`hf_dp.batches.loader`).

    Args:
        begin: called in each process as an iteration begins, before anything of it is drawn.
    """

    sampler: Sampler
    processes: Processes
    begin: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.begin is not None:
            self.begin()
        draws, rank, count = iter(self.sampler), self.processes.rank, self.processes.count
        while (drawn := self.processes.on_main(lambda: next(draws, None))) is not None:
            yield [index for index in drawn if index % count == rank]

    def __len__(self) -> int:
        return len(self.sampler)
