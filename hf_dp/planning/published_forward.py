"""State what the noise of DP-FP as published would cost under weaker and weaker assumptions.

The paper's figure rests on assumptions that do not hold for what runs: everything below the noise
would have to be out of reach, and who took part in which step a secret. Each row here takes
assumptions that come nearer to what runs, with a bound in place of the paper's estimate.
"""

from __future__ import annotations

from hf_dp.accounting import (
    Event,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RecordRelease,
    SampledRecordRelease,
)


def assumptions(published: PublishedForwardNoise) -> list[tuple[str, Event | None]]:
    """Return what is assumed, and what would then be released; None where nothing is known."""
    sigma, rate = published.noise_multiplier, published.sample_rate
    draws, steps = published.num_micro_batches, published.steps
    return [
        (
            "all of the paper's, with a bound in place of its limit theorem's estimate",
            PoissonSampledGaussian(sigma, rate, steps * draws),
        ),
        (
            "nothing trains below the noise, and who took part in which step is visible",
            SampledRecordRelease(sigma, rate, steps, draws),
        ),
        (
            "nothing trains below the noise, and each row is released once",
            RecordRelease(sigma, 1),
        ),
        ("none: what is below the noise trains", None),
    ]
