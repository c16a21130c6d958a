"""A model that FSDP2 spreads over processes gives the norms and clipped sums of one process.

Rows are spread unevenly, and a rank without any runs made-up examples that do not count. The oracle
is a loop over single examples by plain autograd on the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
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
    poison,
    together,
)
from models import Batch, assert_same_sums
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


# -- examples that do not count, and those that are removed ---


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_made_up_examples_add_exactly_nothing(strategy, value):
    architecture = ARCHITECTURES["bert"]

    def run() -> tuple[list[int], bool]:
        lengths = []
        zero = True
        for sharded_sums._WHOLE in (ALL, NONE):
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            poison(model, examples, 1, value)
            sharded(model)
            with ClippingEngine(model, 1.0, strategy=strategy) as engine:
                losses = together(model, collate(model, examples))
                lengths.append(len(engine.backward(losses, counted=False)))
                sums = whole(engine.collect())
            zero &= all(not bool(total.any()) for total in sums.values())
        return lengths, zero

    assert on_processes(2, run) == [([0, 0], True)] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_example_that_is_not_finite_is_removed_on_its_rank(strategy, value):
    architecture = ARCHITECTURES["bert"]
    model = architecture.build()
    examples = architecture.examples(model, LENGTHS)
    poison(model, examples, 1, value)
    expected = loop(model, [e for place, e in enumerate(examples) if place != 1], clipping_norm=2.0)

    def run() -> list[Result]:
        found = []
        for sharded_sums._WHOLE in (ALL, NONE):
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            poison(model, examples, 1, value)
            sharded(model)
            norms, sums = result(model, examples, 2.0, strategy=strategy)
            found.append((norms, whole(sums)))
        return found

    for results in zip(*on_processes(2, run), strict=True):
        norms, sums = of_all(results)
        assert norms[1] == torch.inf
        assert_equal(norms[torch.arange(5) != 1], sums, expected)


class Experts(nn.Module):
    """Sends each example to one of two layers, so that a rank may use only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 6) for _ in "ab"])
        self.unused = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, input: Tensor, expert: int) -> Tensor:
        return self.last(torch.tanh(self.experts[expert](torch.tanh(self.first(input)))))[:, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_use_different_parameters(strategy):
    """All still make the same reductions in the same order."""

    def build() -> Experts:
        torch.manual_seed(0)
        return Experts().double()

    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = build()
    with ClippingEngine(model, 0.5) as engine:
        for expert in (0, 1):
            engine.backward(model(x[2 * expert : 2 * expert + 2], expert).square())
        expected = engine.collect()

    def run() -> list[dict[str, Tensor]]:
        found = []
        rank = dist.get_rank()
        for sharded_sums._WHOLE in (ALL, NONE):
            model = fully_shard(build())
            with ClippingEngine(model, 0.5, strategy=strategy) as engine:
                engine.backward(model(x[2 * rank : 2 * rank + 2], rank).square())
                found.append(whole(engine.collect()))
        return found

    for sums in zip(*on_processes(2, run), strict=True):
        assert bool(expected["experts.1.weight"].any()) and not bool(sums[0]["unused.bias"].any())
        for each in sums:
            assert_same_sums(each, expected, atol=1e-12)


# -- parameter-efficient tuning ---


def adapted() -> Any:
    """A Llama with LoRA away from its zeros."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "up_proj"],
    )
    model = peft.get_peft_model(ARCHITECTURES["llama"].build(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().train()


@pytest.mark.parametrize("adapters", ["sharded", "replicated"])
def test_lora_on_a_sharded_base(adapters):
    """Sums of an adapter that is not sharded are each rank's own."""
    architecture = ARCHITECTURES["llama"]
    model = adapted()
    with architecture.precision():
        examples = architecture.examples(model.get_base_model(), LENGTHS)
        expected = loop(model, examples)

    def run() -> list[Result]:
        found = []
        for strategy, sharded_sums._WHOLE in CASES:
            model = adapted()
            of_adapters = {p for p in model.parameters() if p.requires_grad}
            options = {} if adapters == "sharded" else {"ignored_params": of_adapters}
            sharded(model, **options)
            with architecture.precision():
                own, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
            assert_placed(model, sums)
            assert all(isinstance(s, DTensor) == (adapters == "sharded") for s in sums.values())
            if adapters == "replicated":
                for total in sums.values():
                    dist.all_reduce(total)
            found.append((own, whole(sums)))
        return found

    for results in zip(*on_processes(2, run), strict=True):
        assert_equal(*of_all(results), expected)


# -- mixed precision and checkpointing ---


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_bfloat16_with_float32_shards(strategy):
    """Sums and norms are those of the same forward in one process, with float32 parameters that
    are rounded where they are used."""
    architecture = ARCHITECTURES["gpt2_tied"]
    rounded = architecture.build(dtype=torch.float32).to(torch.bfloat16)
    examples = architecture.examples(rounded, LENGTHS)
    clipping_norm = expected_of(architecture).clipping_norm
    norms, sums = [], {}
    with ClippingEngine(rounded, clipping_norm) as engine:
        for cut in [each for cuts in CUTS[2] for each in cuts if each]:
            mine = collate(rounded, [examples[place] for place in cut])
            norms.append(engine.backward(together(rounded, mine)))
        sums = engine.collect()

    def run() -> Result:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded_sums._WHOLE = VECTORS
        model = sharded(architecture.build(dtype=torch.float32), mp_policy=policy)
        own, sums = result(model, examples, clipping_norm, strategy=strategy)
        assert_placed(model, sums)
        assert {total.dtype for total in sums.values()} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return own, whole(sums)

    got_norms, got = of_all(on_processes(2, run))
    torch.testing.assert_close(got_norms, torch.cat(norms), rtol=1e-4, atol=0)
    assert_same_sums(got, sums, atol=1e-4 * clipping_norm)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_gradient_checkpointing(strategy, reentrant):
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)

    def run() -> Result:
        sharded_sums._WHOLE = NONE
        model = architecture.build()
        examples = architecture.examples(model, LENGTHS)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        sharded(model)
        norms, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
        return norms, whole(sums)

    assert_equal(*of_all(on_processes(2, run)), expected)
