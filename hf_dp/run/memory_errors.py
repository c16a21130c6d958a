"""Say clearly that memory ran out inside a logical batch, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_dp.errors import MemoryShortError
from hf_dp.run.memory import is_out_of_memory


@contextmanager
def named_memory_errors() -> Iterator[None]:
    """Raise MemoryShortError when memory runs out inside the ``with``, before anything is recorded
    or released."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(
            "Memory ran out while a logical batch was computed. Its step is neither recorded nor "
            "released, and costs nothing. Set `auto_physical_batch_size=True` (on a GPU), or lower "
            "`per_device_train_batch_size` or set `max_tokens_per_physical_batch`: all change "
            "memory and speed, never the result. Then go on with resume_from_checkpoint=True."
        ) from error
