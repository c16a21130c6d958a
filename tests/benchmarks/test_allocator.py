"""The settings reach the C library. (What they save is seen in the timings: kernels differ in when
they take memory back.)"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from hf_dp.benchmarks import allocator

IS_GLIBC = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not IS_GLIBC, reason="the settings are glibc's")
def test_glibc_takes_the_settings():
    """In a process of its own: they hold for good."""
    program = (
        "import sys; from hf_dp.benchmarks.allocator import keep_freed_memory; sys.exit(0 if "
        "keep_freed_memory() else 3)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_another_c_library_is_told_apart(monkeypatch):
    class Other:
        pass

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Other())
    assert allocator.keep_freed_memory() is False


@pytest.mark.parametrize("refused", [-1, -4])
def test_a_refused_setting_is_reported(monkeypatch, refused):
    class Library:
        @staticmethod
        def mallopt(setting, value):
            return 0 if setting == refused else 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    assert allocator.keep_freed_memory() is False
