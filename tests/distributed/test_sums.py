"""One noise for the sums of several processes: its size, its independence, and equal bits."""

import math
import os

import numpy as np
import pytest
import torch
from processes import on_processes
from scipy import stats
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_dp.distributed import processes as module
from hf_dp.distributed.processes import Processes, add_up_with_noise
from hf_dp.noise import SecretRandomness

STD = 0.3
# A false alarm once in ten million runs of a test.
P_VALUE = 1e-7

pytestmark = pytest.mark.os_randomness


def own_sums(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Sums of different shapes, of a total that no count of processes divides."""
    made = torch.Generator().manual_seed(rank)
    shapes = [(301, 97), (7,), (), (13, 5, 3), (1,)]
    return [torch.randn(shape, generator=made, dtype=dtype) for shape in shapes]


def released(dtype: torch.dtype = torch.float32, std: float = STD) -> list[Tensor]:
    here = Processes.here()
    found = own_sums(here.rank, dtype)
    randomness = SecretRandomness()
    add_up_with_noise(found, lambda total: randomness.gaussian_like(total, std), here)
    return found


def noise_of(found: list[Tensor], count: int) -> np.ndarray:
    total = [sum(parts) for parts in zip(*map(own_sums, range(count)), strict=True)]
    return torch.cat([(f - t).flatten() for f, t in zip(found, total, strict=True)]).numpy()


def assert_is_the_noise(noise: np.ndarray, shares: int) -> None:
    """One standard normal in each element, independent of those that another process drew."""
    scaled = noise.astype(np.float64) / STD
    assert stats.kstest(scaled, "norm").pvalue > P_VALUE
    # The sample variance of n normals is within 6 of its standard deviations of 1.
    assert abs(scaled.var() - 1) < 6 * math.sqrt(2 / len(scaled))
    size = -(-len(scaled) // shares)
    parts = [scaled[start : start + size] for start in range(0, len(scaled), size)]
    for first in range(shares):
        for second in range(first):
            length = min(len(parts[first]), len(parts[second]))
            together = np.corrcoef(parts[first][:length], parts[second][:length])[0, 1]
            assert abs(together) < 6 / math.sqrt(length)


def test_the_noise_of_several_processes_is_that_of_one():
    count = 3
    found = on_processes(count, released)
    for other in found[1:]:  # every process gets the same bits
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert_is_the_noise(noise_of(found[0], count), count)


def test_the_total_is_exact_without_noise_whatever_the_buckets(monkeypatch):
    expected = [sum(parts) for parts in zip(*(own_sums(r, torch.float64) for r in range(3)))]
    for bucket in (10_000, 2**23):  # a quarter of it between CPUs
        monkeypatch.setattr(module, "BUCKET", bucket)
        for found in on_processes(3, released, torch.float64, 0.0):
            for total, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-12)


def test_no_bucket_is_larger_than_allowed_whatever_the_tensors(monkeypatch):
    monkeypatch.setattr(module, "BUCKET", 4 * 100)
    large = torch.arange(1050.0).view(30, 35)
    cut = list(module._buckets([large, torch.ones(60), torch.ones(30)]))
    sizes = [sum(each.numel() for each in bucket) for bucket in cut]
    assert max(sizes) <= 100 and sum(sizes) == 1140
    for bucket in cut:
        for part in bucket:
            part.zero_()
    assert not large.any()  # its parts are views of it
    assert [len(bucket) for bucket in module._buckets([large.t()])] == [1]  # cannot be cut in place


def test_types_do_not_mix():
    def act():
        here = Processes.here()
        found = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4)]
        add_up_with_noise(found, torch.zeros_like, here)
        return [(each.dtype, each.tolist()) for each in found]

    expected = [(torch.float32, [2.0] * 3), (torch.float64, [2.0] * 2), (torch.float32, [2.0] * 4)]
    assert on_processes(2, act) == [expected] * 2


HONEST = module._scatter_noise_gather


def noise_everywhere(bucket, noise, processes):
    for total in bucket:
        total.add_(noise(total))
    HONEST(bucket, torch.zeros_like, processes)


def one_generator(self, insecure_seed=None, rank=0):
    self.insecure, self._by_device, self._streams, self._process = False, {}, None, os.getpid()
    self._numpy = np.random.Generator(np.random.SFC64(7))


@pytest.mark.parametrize(
    "planted",
    [(module, "_scatter_noise_gather", noise_everywhere), (SecretRandomness, "__init__", one_generator)],
)  # fmt: skip
def test_planted_noise_of_every_process_or_of_one_generator_is_seen(planted, monkeypatch):
    monkeypatch.setattr(*planted)
    found = on_processes(2, released)
    with pytest.raises(AssertionError):
        assert_is_the_noise(noise_of(found[0], 2), 2)


# -- sums that are sharded --


def sharded(placements, shape) -> tuple[Tensor, list[Tensor]]:
    """The released whole of a sharded sum of zeros, and this process's noisy shard."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    local = torch.zeros(4000 // mesh.size(-1), 5)
    total = DTensor.from_local(local, mesh, placements)
    randomness = SecretRandomness()
    noise = lambda part: randomness.gaussian_like(part, STD)  # noqa: E731
    add_up_with_noise([total], noise, Processes.here())
    return total.full_tensor(), total.to_local()


def test_a_shard_is_noised_where_it_lies():
    (whole, first), (again, second) = on_processes(2, sharded, [Shard(0)], (2,))
    assert torch.equal(whole, again)
    assert torch.equal(whole, torch.cat([first, second]))
    assert_is_the_noise(whole.flatten().numpy(), 2)


def test_copies_of_a_shard_get_the_same_noise_once():
    found = on_processes(4, sharded, [Replicate(), Shard(0)], (2, 2))
    locals_ = [local for _, local in found]
    assert torch.equal(locals_[0], locals_[2]) and torch.equal(locals_[1], locals_[3])
    assert_is_the_noise(torch.cat(locals_[:2]).flatten().numpy(), 2)


def test_planted_copies_with_noise_of_their_own_differ(monkeypatch):
    def everyone(total, noise):
        local = total.to_local()
        local.add_(noise(local))

    monkeypatch.setattr(module, "_add_to_shard", everyone)
    found = on_processes(4, sharded, [Replicate(), Shard(0)], (2, 2))
    assert not torch.equal(found[0][1], found[2][1])
