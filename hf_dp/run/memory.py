"""Say clearly that memory ran out inside a logical batch, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_dp.errors import MemoryShortError

_TEXTS = ("out of memory", "not enough memory", "can't allocate memory")


@contextmanager
def named_memory_errors() -> Iterator[None]:
    """Raise MemoryShortError when memory runs out inside the ``with``, before anything is recorded
    or released."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory and not any(each in text for each in _TEXTS):
            raise
        raise MemoryShortError(
            "Memory ran out while a logical batch was computed. Its step is neither recorded nor "
            "released, and costs nothing. Lower `per_device_train_batch_size` or set "
            "`max_tokens_per_physical_batch`: both change memory and speed, never the result. Then "
            "go on with resume_from_checkpoint=True."
        ) from error
