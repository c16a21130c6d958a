"""One draw for all processes: the main one makes it, and each process takes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_dp.distributed.processes import Processes
from hf_dp.plans.samplers import Sampler, uniform_below


@dataclass(frozen=True)
class SharedDraws:
    """This process's part of each draw of a sampler, in increasing order, possibly empty.

    The main process alone draws, by its own secret source, cuts a draw that is too large, and sends
    the indices to all. So the draw is that of one process, and the sampler's event is what the
    accountant is told, for any number of processes and after a resume with another one.

    Which process takes an example is drawn, in each draw, by secret bits for it alone, whoever else
    is drawn. If the k-th of a draw belonged to process k mod W, one example that leaves would move
    all after it to other processes, and so to other physical batches (:mod:`hf_dp.batches.loader`).
    An index mod W would be no better where it counts examples before it, as that of a stream does.

    Args:
        begin: called in each process as an iteration begins, before anything of it is drawn.
    """

    sampler: Sampler
    processes: Processes
    begin: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.begin is not None:
            self.begin()
        draws, rank = iter(self.sampler), self.processes.rank
        while (parts := self.processes.on_main(lambda: self._parts(next(draws, None)))) is not None:
            yield parts[rank]

    def _parts(self, drawn: list[int] | None) -> list[list[int]] | None:
        """Return each process's part of a draw; None after the last draw."""
        count = self.processes.count
        if drawn is None:
            return None
        if count == 1:
            return [drawn]
        of = uniform_below(count, len(drawn), self.sampler.random_bytes)
        return [[i for i, own in zip(drawn, of, strict=True) if own == r] for r in range(count)]

    def __len__(self) -> int:
        return len(self.sampler)
