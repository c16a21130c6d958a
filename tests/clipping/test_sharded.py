"""A model that FSDP2 spreads over processes gives the norms and clipped sums of one process.

Rows are spread unevenly, and a rank without any runs made-up examples that do not count. The oracle
is a loop over single examples by plain autograd on the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import (
    ARCHITECTURES,
    Architecture,
    Expected,
    assert_equal,
    collate,
    loop,
    together,
)
from models import Batch, assert_same_sums
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_dp.clipping import ClippingEngine, sharded_sums
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.rules import find_rule

LENGTHS = (5, 1, 3, 4, 2)
# The physical batches of each rank, as positions in the logical batch; all have equally many.
CUTS = {
    2: [[[0, 1], [2]], [[3, 4], []]],
    3: [[[0], [1, 2]], [[], []], [[3, 4], []]],
    4: [[[0], [1, 2]], [[], []], [[3], []], [[], [4]]],
}
# How many numbers are reduced at the end of a logical batch: all, some, none.
ALL, VECTORS, NONE = 2**25, 500, 0
CASES = [
    ("book_keeping", ALL),
    ("book_keeping", NONE),
    ("two_pass", NONE),
    ("per_example", VECTORS),
]


def sharded(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Call fully_shard as usual: on each layer, then on the whole."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


Result = tuple[Tensor, dict[str, Tensor]]


def result(
    model: Any, examples: Sequence[Batch], clipping_norm: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's norms, and the sums, of one logical batch."""
    norms = []
    with ClippingEngine(model, clipping_norm, **options) as engine:
        for cut in CUTS[dist.get_world_size()][dist.get_rank()]:
            mine = [examples[position] for position in cut]
            losses = together(model, collate(model, mine or examples[:1]))
            norms.append(engine.backward(losses, counted=bool(mine)))
        sums = engine.collect()
    return torch.cat(norms), sums


def whole(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: s.full_tensor() if isinstance(s, DTensor) else s for n, s in sums.items()}


def of_all(results: Sequence[Result]) -> Result:
    """The norms of all ranks in the order of the examples; their sums, which must be equal."""
    places = [p for cuts in CUTS[len(results)] for cut in cuts for p in cut]
    norms = torch.cat([norms for norms, _ in results])
    for _, sums in results[1:]:
        assert_same_sums(sums, results[0][1], atol=0)
    return norms[torch.tensor(places).argsort()], results[0][1]


def expected_of(architecture: Architecture, lengths: Sequence[int] = LENGTHS) -> Expected:
    model = architecture.build()
    with architecture.precision():
        return loop(model, architecture.examples(model, lengths))


# -- exact ---


@pytest.mark.parametrize(
    ("name", "processes"),
    [(name, 2) for name in ("bert", "gpt2_tied", "llama", "albert", "t5", "vit", "gemma3")]
    + [("bert", 3), ("gpt2_tied", 3)],
)
def test_equals_the_loop(name, processes):
    architecture = ARCHITECTURES[name]
    expected = expected_of(architecture)

    def run() -> list[Result]:
        found = []
        for strategy, sharded_sums._WHOLE in CASES:
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            sharded(model)
            with architecture.precision():
                norms, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
            assert_placed(model, sums)
            found.append((norms, whole(sums)))
        return found

    for results in zip(*on_processes(processes, run), strict=True):
        assert_equal(*of_all(results), expected)


def assert_placed(model: nn.Module, sums: dict[str, Tensor]) -> None:
    """Sums lie as their parameters do, rows of padding left out, and nothing has a gradient."""
    parameters = dict(model.named_parameters())
    assert list(sums) == [name for name, p in parameters.items() if p.requires_grad]
    for name, total in sums.items():
        parameter = parameters[name]
        assert parameter.grad is None and not total.requires_grad
        if isinstance(parameter, DTensor):
            assert isinstance(total, DTensor)
            assert total.placements == parameter.placements
            assert total.device_mesh == parameter.device_mesh
            assert total.to_local().shape == parameter.to_local().shape
            assert total.dtype == sharded_sums.accumulation_dtype(parameter.dtype)
        else:
            assert not isinstance(total, DTensor)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_equals_one_process_in_float32(name, clipping):
    architecture = ARCHITECTURES[name]
    model = architecture.build(dtype=torch.float32)
    examples = architecture.examples(model, LENGTHS)
    clipping_norm = expected_of(architecture).clipping_norm
    with ClippingEngine(model, clipping_norm, clipping) as engine:
        norms = engine.backward(together(model, collate(model, examples)))
        sums = engine.collect()

    def run() -> list[Result]:
        found = []
        for sharded_sums._WHOLE in (ALL, NONE):
            model = sharded(architecture.build(dtype=torch.float32))
            own, sums = result(model, examples, clipping_norm, clipping=clipping)
            assert_placed(model, sums)
            found.append((own, whole(sums)))
        return found

    for results in zip(*on_processes(2, run), strict=True):
        got_norms, got = of_all(results)
        torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0)
        assert_same_sums(got, sums, atol=1e-4 * clipping_norm)


def test_replicated_shards():
    """A mesh (replicate, shard): every number has two owners."""
    architecture = ARCHITECTURES["gpt2_tied"]
    expected = expected_of(architecture)

    def run() -> list[Result]:
        found = []
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for strategy, sharded_sums._WHOLE in CASES[:3]:
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            sharded(model, mesh)
            own, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
            assert_placed(model, sums)
            found.append((own, whole(sums)))
        return found

    for results in zip(*on_processes(4, run), strict=True):
        assert_equal(*of_all(results), expected)


@pytest.mark.parametrize(("reshard", "processes"), [(True, 2), (False, 2), (2, 4)])
def test_when_parameters_are_resharded(reshard, processes):
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)

    def run() -> list[Result]:
        found = []
        for strategy in STRATEGIES:
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            sharded(model, reshard_after_forward=reshard)
            norms, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
            found.append((norms, whole(sums)))
        return found

    for results in zip(*on_processes(processes, run), strict=True):
        assert_equal(*of_all(results), expected)


def test_layers_that_fully_shard_was_called_on_keep_their_rules():
    """fully_shard derives a class of its own from each module's."""
    architecture = ARCHITECTURES["gpt2_tied"]
    expected = expected_of(architecture)

    def run() -> Result:
        model = architecture.build()
        examples = architecture.examples(model, LENGTHS)
        fully_shard([model.transformer.wte, model.lm_head])
        for module in model.modules():
            if not list(module.children()) and list(module.parameters()):
                if module not in (model.transformer.wte, model.lm_head):
                    fully_shard(module)
        fully_shard(model)
        assert all(find_rule(m) for m in model.modules() if list(m.parameters(recurse=False)))
        norms, sums = result(model, examples, expected.clipping_norm)
        return norms, whole(sums)

    assert_equal(*of_all(on_processes(2, run)), expected)
