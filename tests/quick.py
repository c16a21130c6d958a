"""Commands that must be quick, by the processor's clock, which does not care who else is at it."""

import resource
import subprocess
import sys

SECONDS = 2.0


def run_quickly(*words: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with the words, and see that it takes no more than two processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < SECONDS, f"{words} took {used:.1f} processor seconds"
    return done
