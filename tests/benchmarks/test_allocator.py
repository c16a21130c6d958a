"""Freed memory stays with the process, so that the next allocation costs no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from hf_dp.benchmarks.allocator import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096
def use():
    return [torch.ones(20, 2**18) for _ in range(10)]  # 20 MiB each
before = resident()
for _ in range(3):
    use()
print((resident() - before) / 2**20)
"""


def kept(setting: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, setting], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_stays():
    assert kept("keep") > 150 > 50 > kept("default")
