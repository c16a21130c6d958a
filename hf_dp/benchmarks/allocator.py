"""Tell the C library's allocator to keep what is freed.

By default glibc gives freed memory back to the operating system and takes it again a moment later,
page by page. On virtual machines such page faults cost more than the arithmetic that they
interrupt, and they fall on one mode or the other by chance. A timing process therefore keeps its
memory, for all modes alike, and the report says so.

Large blocks (the gradient of an embedding) would be mapped again each time unless enough memory is
free at the end of the heap, which depends on the order of the modes. Nothing is mapped, therefore.
For a training of your own on the CPU, the environment variables ``MALLOC_TRIM_THRESHOLD_=2000000000
MALLOC_MMAP_MAX_=0`` do the same.
"""

from __future__ import annotations

import ctypes

# <malloc.h>: which numbers mallopt takes
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Return whether the allocator took the settings; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # mallopt returns 1 for success
    return bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST)) and bool(mallopt(_M_MMAP_MAX, 0))
