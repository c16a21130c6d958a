"""Let only one process at a time work on the ledger of a run."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from hf_dp.errors import LedgerError

# If two processes resumed one run, each would record its own "step 51", and the ledger would keep
# only one of the two. The operating system drops the lock when a process dies.
LOCK = "_privacy.lock"  # (names that start with "_" are never pushed to the Hub)


def lock_run(folder: Path) -> FileLock:
    """Take the lock of the run in ``folder`` and return it.

    Raises: LedgerError when another process has it.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise LedgerError(
            f"Another process is training in output_dir {folder.name!r}; two processes cannot "
            "share one ledger. Wait for it to end, or use another output_dir."
        ) from None
    return lock
