"""Accounting loads neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from hf_dp.accounting import PoissonSampledGaussian, calibrate_noise_multiplier, epsilon
event = PoissonSampledGaussian(1.0, 0.01, 10)
for name in ("pld", "rdp", "prv", "gdp_clt"):
    epsilon(event, 1e-5, name)
calibrate_noise_multiplier(3, 1e-5, 0.01, 10, "rdp")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")))
"""


def test_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
