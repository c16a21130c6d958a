"""Noise of the stated scale, from secret sources, independent from call to call.

The Kolmogorov-Smirnov tests use 100,000 draws and reject below p = 1e-7: the right noise fails one
run in ten million. A scale that is wrong by a tenth moves the statistic by 7.3, twelve standard
deviations above the 2.9 of that p.
"""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from models import DEVICES
from scipy import stats
from torch import Tensor

from hf_dp.noise import SecretRandomness

pytestmark = pytest.mark.os_randomness

REJECT = 1e-7
DRAWS = 100_000


def p_value(noise: Tensor, std: float) -> float:
    return float(stats.kstest(noise.double().flatten().numpy(), stats.norm(0, std).cdf).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [1e-3, 0.7, 40.0])
@pytest.mark.parametrize("device", DEVICES)
def test_the_distribution_is_normal_with_this_standard_deviation(device, std, dtype):
    noise = (
        SecretRandomness().gaussian_like(torch.zeros(DRAWS, dtype=dtype, device=device), std).cpu()
    )
    assert p_value(noise, std) > REJECT


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_planted_wrong_scale_is_seen(factor, monkeypatch):
    right = SecretRandomness.gaussian_like
    monkeypatch.setattr(
        SecretRandomness, "gaussian_like", lambda self, like, std: right(self, like, factor * std)
    )
    assert p_value(SecretRandomness().gaussian_like(torch.zeros(DRAWS), 0.7), 0.7) < REJECT


def test_planted_uniform_noise_is_seen():
    assert p_value((torch.rand(DRAWS) - 0.5) * 12**0.5, 1.0) < REJECT


def test_the_tails_are_there():
    """A float32 generator that stops at 5 sigma or repeats values would leak; 2e6 draws pass 4.5
    sigma about 14 times."""
    noise = SecretRandomness().gaussian_like(torch.zeros(2_000_000), 1.0).abs()
    beyond = int((noise > 4.5).sum())
    assert stats.binomtest(beyond, 2_000_000, 2 * stats.norm.sf(4.5)).pvalue > REJECT


@pytest.mark.parametrize("insecure_seed", [None, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_calls_are_independent(device, insecure_seed):
    randomness = SecretRandomness(insecure_seed)
    zeros = torch.zeros(DRAWS, device=device)
    calls = torch.stack([randomness.gaussian_like(zeros, 1.0) for _ in range(4)]).double().cpu()
    correlation = torch.corrcoef(calls) - torch.eye(4)
    assert float(correlation.abs().max()) < 6 / DRAWS**0.5
    assert p_value((calls[0] + calls[1]) / 2**0.5, 1.0) > REJECT


def test_objects_are_independent():
    """Two ranks of one run, or two runs: neither shares anything with the other."""
    one, other = (
        SecretRandomness().gaussian_like(torch.zeros(DRAWS), 1.0).double() for _ in range(2)
    )
    assert abs(float((one * other).mean())) < 6 / DRAWS**0.5


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_precision(shape, dtype):
    noise = SecretRandomness().gaussian_like(torch.zeros(shape, dtype=dtype), 1.0)
    assert isinstance(noise, Tensor)
    assert noise.shape == torch.Size(shape)
    assert noise.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw_everything() -> list[Any]:
    return [torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]]


def test_global_seeds_do_not_reproduce_it():
    found = []
    for _ in range(2):
        seed_everything()
        found.append(SecretRandomness().gaussian_like(torch.zeros(100), 1.0))
    assert not torch.equal(*found)


def test_global_generators_are_left_alone():
    seed_everything()
    expected = draw_everything()
    seed_everything()
    randomness = SecretRandomness()
    randomness.gaussian_like(torch.zeros(100), 1.0)
    randomness.random_bytes(100)
    randomness.seed()
    assert draw_everything() == expected


def test_an_insecure_seed_repeats_and_says_so():
    one, other = SecretRandomness(7), SecretRandomness(7)
    assert torch.equal(
        one.gaussian_like(torch.zeros(9), 1.0), other.gaussian_like(torch.zeros(9), 1.0)
    )
    assert one.random_bytes(16) == other.random_bytes(16)
    assert one.insecure
    assert not SecretRandomness().insecure


def test_bytes_come_from_the_operating_system(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: b"\x01" * count)
    assert SecretRandomness().random_bytes(3) == b"\x01\x01\x01"


def test_seeds_are_wide():
    seeds = {SecretRandomness().seed() for _ in range(64)}
    assert len(seeds) == 64
    assert max(seeds) > 2**60  # missed with probability 8**-64
    assert all(0 <= seed < 2**63 for seed in seeds)


class Noted:
    """Stands for a generator on a GPU; notes its state."""

    def __init__(self, device: torch.device):
        self.state = b""

    def set_state(self, state: Tensor) -> None:
        self.state = bytes(state.tolist())


def test_a_generator_on_a_gpu_begins_at_a_secret_place(monkeypatch):
    """Its key alone has 64 bits. The place must be a multiple of 4."""
    monkeypatch.setattr(torch, "Generator", Noted)
    states = [SecretRandomness()._generator_on(torch.device("cuda")).state for _ in range(64)]
    assert {len(state) for state in states} == {16}
    keys = {int.from_bytes(state[:8], "little") for state in states}
    places = {int.from_bytes(state[8:], "little") for state in states}
    assert len(keys) == len(places) == 64
    assert max(keys) > 2**61 and max(places) > 2**60  # missed with probability 8**-64
    assert all(place % 4 == 0 and place < 2**63 for place in places)


# -- streams ---


def test_streams_leave_the_public_generators_as_found():
    """Also where a collator calls set_seed, or fails."""
    seed_everything()
    expected = draw_everything()
    seed_everything()
    randomness = SecretRandomness()
    for _ in range(2):
        with randomness.streams():
            draw_everything()
            torch.nn.functional.dropout(torch.ones(50))
            seed_everything(2)
    with pytest.raises(KeyError), randomness.streams():
        raise KeyError(draw_everything())
    assert draw_everything() == expected


@pytest.mark.parametrize("sources", [1, 2])
def test_draws_inside_follow_no_public_seed_and_go_on_where_they_stopped(sources):
    """A stream that began again at every step would reuse its dropout masks."""
    randomness = [SecretRandomness() for _ in range(sources)]
    found = []
    for source in (randomness[0], randomness[-1]):
        seed_everything()
        with source.streams():
            found.append(draw_everything())
    assert all(one != other for one, other in zip(*found))


def test_reseeding_inside_does_not_stop_the_noise_from_being_secret():
    randomness, noises = SecretRandomness(), []
    for _ in range(2):
        with randomness.streams():
            seed_everything(2)
            noises.append(randomness.gaussian_like(torch.zeros(50), 1.0))
    assert not torch.equal(*noises)
