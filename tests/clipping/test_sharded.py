"""A model that FSDP2 spreads over processes gives the norms and clipped sums of one process.

Rows are spread unevenly, and a rank without any runs made-up examples that do not count. The oracle
is a loop over single examples by plain autograd on the whole model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES, Architecture, assert_equal, collate, poison, together
from models import Batch, Expected, assert_same_sums, base_of, loop, on
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hf_dp.clipping import ClippingEngine, self_check, sharded_sums
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import Dense
from hf_dp.clipping.masked import MaskedEngine
from hf_dp.clipping.rounding import Norms
from hf_dp.clipping.rules import find_rule
from hf_dp.clipping.sharded_sums import scattered
from hf_dp.clipping.tape import Tape
from hf_dp.distributed import sums as distributed_sums
from hf_dp.errors import HfDpError, UnsupportedModelError

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
            assert total.dtype == torch.float64
        else:
            assert not isinstance(total, DTensor)


def results(
    processes: int,
    architecture: Architecture,
    clipping_norm: float,
    cases: Sequence[tuple[str, int]] = CASES,
    *,
    build: Callable[[], Any] | None = None,
    spoil: Callable[[Any, list[Batch]], None] = lambda model, examples: None,
    shard: Callable[[Any], Any] = sharded,
    **options: Any,
) -> Iterator[Result]:
    """What all ranks together make of the logical batch, for each strategy and limit of
    ``sharded_sums``."""

    def run() -> list[Result]:
        found = []
        for strategy, sharded_sums._WHOLE in cases:
            model = (build or architecture.build)()
            examples = architecture.examples(base_of(model), LENGTHS)
            spoil(model, examples)
            shard(model)
            with architecture.precision():
                norms, sums = result(model, examples, clipping_norm, strategy=strategy, **options)
            assert_placed(model, sums)
            for total in sums.values():  # of an adapter that is not sharded, each rank's own
                if not isinstance(total, DTensor):
                    dist.all_reduce(total)
            found.append((norms, whole(sums)))
        return found

    return (of_all(each) for each in zip(*on_processes(processes, run), strict=True))


# -- exact ---


@pytest.mark.parametrize(
    ("name", "processes"),
    [("bert", 2), ("albert", 2), ("llama", 2), ("gpt2_tied", 3)]
    + [
        pytest.param(name, processes, marks=pytest.mark.slow)
        for name, processes in [("gpt2_tied", 2), ("t5", 2), ("vit", 2), ("gemma3", 2), ("bert", 3)]
    ],
)
def test_equals_the_loop(name, processes):
    architecture = ARCHITECTURES[name]
    expected = expected_of(architecture)
    cases = CASES if name in ("bert", "gpt2_tied") else CASES[::2]
    for found in results(processes, architecture, expected.clipping_norm, cases):
        assert_equal(*found, expected)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2_tied", marks=pytest.mark.slow)])
def test_equals_one_process_in_float32(name, clipping):
    architecture = ARCHITECTURES[name]
    build = partial(architecture.build, dtype=torch.float32)
    model, clipping_norm = build(), expected_of(architecture).clipping_norm
    with ClippingEngine(model, clipping_norm, clipping) as engine:
        batch = collate(model, architecture.examples(model, LENGTHS))
        norms = engine.backward(together(model, batch))
        sums = engine.collect()
    found = results(2, architecture, clipping_norm, CASES[:2], build=build, clipping=clipping)
    for got_norms, got in found:
        torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0)
        assert_same_sums(got, sums, atol=1e-4 * clipping_norm)


def test_replicated_shards():
    """A mesh (replicate, shard): every number has two owners."""
    architecture = ARCHITECTURES["gpt2_tied"]
    expected = expected_of(architecture)

    def shard(model: Any) -> None:
        sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    for found in results(4, architecture, expected.clipping_norm, CASES[:3], shard=shard):
        assert_equal(*found, expected)


@pytest.mark.parametrize(
    ("reshard", "processes"), [(True, 2), (False, 2), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_when_parameters_are_resharded(reshard, processes):
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)
    shard = partial(sharded, reshard_after_forward=reshard)
    cases = [(strategy, ALL) for strategy in STRATEGIES]
    for found in results(processes, architecture, expected.clipping_norm, cases, shard=shard):
        assert_equal(*found, expected)


def test_layers_that_fully_shard_was_called_on_keep_their_rules():
    """fully_shard derives a class of its own from each module's."""
    architecture = ARCHITECTURES["gpt2_tied"]
    expected = expected_of(architecture)

    def shard(model: Any) -> None:
        tied = [model.transformer.wte, model.lm_head]
        fully_shard(tied)
        for module in model.modules():
            if not list(module.children()) and list(module.parameters()) and module not in tied:
                fully_shard(module)
        fully_shard(model)
        assert all(find_rule(m) for m in model.modules() if list(m.parameters(recurse=False)))

    (found,) = results(2, architecture, expected.clipping_norm, CASES[:1], shard=shard)
    assert_equal(*found, expected)


# -- examples that do not count, and those that are removed ---


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(1.0, marks=pytest.mark.slow),
        torch.nan,
        pytest.param(torch.inf, marks=pytest.mark.slow),
    ],
)
def test_made_up_examples_add_exactly_nothing(value):
    architecture = ARCHITECTURES["bert"]

    def run() -> tuple[set[int], bool]:
        lengths = set()
        zero = True
        for strategy, sharded_sums._WHOLE in itertools.product(STRATEGIES, (ALL, NONE)):
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            poison(model, examples, 1, value)
            sharded(model)
            with ClippingEngine(model, 1.0, strategy=strategy) as engine:
                losses = together(model, collate(model, examples))
                lengths.add(len(engine.backward(losses, counted=False)))
                sums = whole(engine.collect())
            zero &= all(not bool(total.any()) for total in sums.values())
        return lengths, zero

    assert on_processes(2, run) == [({0}, True)] * 2


@pytest.mark.parametrize("value", [pytest.param(torch.nan, marks=pytest.mark.slow), torch.inf])
def test_an_example_that_is_not_finite_is_removed_on_its_rank(value):
    architecture = ARCHITECTURES["bert"]

    def spoil(model: Any, examples: list[Batch]) -> None:
        poison(model, examples, 1, value)

    model = architecture.build()
    examples = architecture.examples(model, LENGTHS)
    spoil(model, examples)
    expected = loop(model, [e for place, e in enumerate(examples) if place != 1], clipping_norm=2.0)
    cases = list(itertools.product(STRATEGIES, (ALL, NONE)))
    for norms, sums in results(2, architecture, 2.0, cases, spoil=spoil):
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


def test_ranks_may_use_different_parameters():
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
        for strategy, sharded_sums._WHOLE in itertools.product(STRATEGIES, (ALL, NONE)):
            model = fully_shard(build())
            with ClippingEngine(model, 0.5, strategy=strategy) as engine:
                engine.backward(model(x[2 * rank : 2 * rank + 2], rank).square())
                found.append(whole(engine.collect()))
        return found

    for sums in zip(*on_processes(2, run), strict=True):
        assert bool(expected["experts.1.weight"].any()) and not bool(sums[0]["unused.bias"].any())
        for each in sums:
            assert_same_sums(each, expected, atol=1e-12)


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
    architecture, model = ARCHITECTURES["llama"], adapted()
    with architecture.precision():
        expected = loop(model, architecture.examples(model.get_base_model(), LENGTHS))

    def shard(model: Any) -> None:
        trained = {p for p in model.parameters() if p.requires_grad}
        sharded(model, **({} if adapters == "sharded" else {"ignored_params": trained}))
        of_adapters = [p for p in model.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) == (adapters == "sharded") for p in of_adapters)

    found = results(2, architecture, expected.clipping_norm, build=adapted, shard=shard)
    for each in found:
        assert_equal(*each, expected)


def test_bfloat16_with_float32_shards():
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

    def shard(model: Any) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded(model, mp_policy=policy)
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    build = partial(architecture.build, dtype=torch.float32)
    cases = [("book_keeping", VECTORS), ("two_pass", VECTORS)]
    for got_norms, got in results(2, architecture, clipping_norm, cases, build=build, shard=shard):
        assert {total.dtype for total in got.values()} == {torch.float64}
        torch.testing.assert_close(got_norms, torch.cat(norms), rtol=1e-4, atol=0)
        assert_same_sums(got, sums, atol=1e-4 * clipping_norm)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)

    def build() -> Any:
        model = architecture.build()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    cases = [("book_keeping", NONE), ("two_pass", NONE)]
    for found in results(2, architecture, expected.clipping_norm, cases, build=build):
        assert_equal(*found, expected)


# -- several steps ---


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_steps_with_other_forwards_between(strategy, monkeypatch):
    """A forward without a backward leaves the outermost modules whole, also over the next step.

    FSDP2 itself never reduces a gradient.
    """
    architecture = ARCHITECTURES["gpt2_tied"]

    def train(model: Any, shard: bool) -> tuple[dict[str, Tensor], Tensor]:
        examples = architecture.examples(model, LENGTHS)
        batch = collate(model, examples)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            with ClippingEngine(model, 5.0, strategy=strategy) as engine:
                cuts = CUTS[2][dist.get_rank()] if shard else [range(5)]
                for cut in cuts:
                    mine = [examples[place] for place in cut]
                    losses = together(model, collate(model, mine or examples[:1]))
                    engine.backward(losses, counted=bool(mine))
                    with torch.no_grad():
                        together(model, batch)
                sums = engine.collect()
            for name, parameter in model.named_parameters():
                parameter.grad = sums[name]
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses = together(model, batch)
            model.train()
        with ClippingEngine(model, 5.0):  # whose start reshards
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return whole(parameters), losses

    expected, expected_losses = train(architecture.build(), False)

    def run() -> tuple[dict[str, Tensor], Tensor]:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("FSDP2 reduced a gradient")

        monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", refuse)
        sharded_sums._WHOLE = VECTORS
        return train(sharded(architecture.build()), True)

    for parameters, losses in on_processes(2, run):
        assert_same_sums(parameters, expected, atol=1e-9)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("limit", [pytest.param(16, marks=pytest.mark.slow), 300])
def test_a_bucket_of_sums_of_full_size_at_a_time(strategy, limit, monkeypatch):
    """Under the smaller limit one sum at a time: all have 16 numbers or more, but one of 3."""
    monkeypatch.setattr(distributed_sums, "BUCKET", 4 * limit)  # a quarter of it between CPUs

    def run() -> int:
        sharded_sums._WHOLE = NONE
        alive: list[weakref.ref[Tensor]] = []
        scatter = sharded_sums.scattered

        def watched(parameters: Sequence[DTensor], totals: Sequence[Tensor]) -> list[DTensor]:
            assert [t.shape for t in totals] == [p.shape for p in parameters]
            assert sum(total.numel() for total in totals[:-1]) < limit
            assert not any(each() is not None for each in alive)
            alive.extend(weakref.ref(total) for total in totals)
            return scatter(parameters, totals)

        sharded_sums.scattered = watched
        model = sharded(ARCHITECTURES["bert"].build())
        examples = ARCHITECTURES["bert"].examples(model, LENGTHS)
        result(model, examples, 1.0, strategy=strategy)
        return len(alive)

    parameters = len(list(ARCHITECTURES["bert"].build().parameters()))
    assert on_processes(2, run) == [2 * parameters] * 2  # physical batches


@pytest.mark.parametrize("bucket", [4, 40, 2**23])
def test_scattered_sums_are_placed_as_their_parameters(bucket, monkeypatch):
    monkeypatch.setattr(distributed_sums, "BUCKET", bucket)

    def run() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parameters, totals = [], []
        for each, dim in (((7, 3), 0), ((2, 5), 0), ((4, 6, 2), 1), ((9,), 0)):
            whole = torch.zeros(each, dtype=torch.float64)
            parameters.append(distribute_tensor(whole, mesh, [Shard(dim)]))
            totals.append(torch.arange(whole.numel()).double().view(each) * (1 + dist.get_rank()))
        found = scattered(parameters, totals)
        for one, other in zip(found, parameters, strict=True):
            assert one.to_local().shape == other.to_local().shape
            assert one.placements == other.placements and one.shape == other.shape
        return [each.full_tensor() for each in found]

    for found in on_processes(3, run):
        for total in found:
            assert torch.equal(total, 6 * torch.arange(total.numel()).double().view(total.shape))


def message(count: int, build: Callable[[], Any], use: Callable[[Any], object]) -> str:
    """The message with which every rank refuses."""

    def run() -> str:
        model = build()
        with pytest.raises(HfDpError) as refused:
            use(model)
        return str(refused.value)

    first, *others = on_processes(count, run)
    assert all(each == first for each in others)
    return first


def enter(model: Any) -> None:
    ClippingEngine(model, 1.0).__enter__()


class Outside(nn.Module):
    """Uses a weight outside the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, input: Tensor) -> Tensor:
        return (self.last(self.first(input)) + input @ self.first.weight.sum(0)[:, None])[:, 0]


@pytest.mark.parametrize("synchronized", [True, False])
def test_a_gradient_that_autograd_writes_is_refused(synchronized):
    def use(model: Any) -> None:
        model.set_requires_gradient_sync(synchronized)
        with ClippingEngine(model, 1.0) as engine:
            engine.backward(model(torch.ones(2, 4)))

    found = message(2, lambda: fully_shard(Outside()), use)
    assert "'first.weight'" in found and "bypassing clipping" in found


def test_no_losses_are_refused():
    def use(model: Any) -> None:
        with ClippingEngine(model, 1.0) as engine:
            engine.backward(torch.zeros(0))

    assert "counted=False" in message(2, lambda: fully_shard(Outside()), use)


def test_engines_that_need_whole_parameters_are_refused():
    def use(model: Any) -> None:
        MaskedEngine(model, {}, 1.0).__enter__()

    assert "MaskedEngine needs each parameter whole" in message(
        2, lambda: fully_shard(Outside()), use
    )


class Bare(nn.Module):
    """A parameter beside layers: no rule, and shards within."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input * self.scale)[:, 0]


def test_modules_without_a_rule_around_shards_are_refused():
    def build() -> Any:
        model = Bare()
        fully_shard(model.layer)
        return fully_shard(model)

    found = message(2, build, enter)
    assert "Bare has no clipping rule" in found and "'layer'" in found and "['scale']" in found


def test_a_shared_table_sharded_by_itself_is_refused():
    def build() -> Any:
        model = ARCHITECTURES["t5"].build()
        fully_shard(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias)
        return fully_shard(model)

    found = message(2, build, enter)
    assert "T5Attention" in found and "'relative_attention_bias'" in found


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})


def tensor_parallel_and_sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()}
    )
    return fully_shard(model, mesh=mesh["shard"])


def on_some() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])


def on_two_meshes() -> nn.Module:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=both)
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


class DeepSpeedEngine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)


def zero_3() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.ds_id = 0  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("build", "count", "says"),
    [
        (tensor_parallel, 2, "tensor, sequence, expert or pipeline"),
        (tensor_parallel_and_sharded, 4, "tensor, sequence, expert or pipeline"),
        (on_some, 4, "over 2 of 4 processes"),
        (on_two_meshes, 4, "different meshes"),
        (lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), 2, "FSDP1"),
        (DeepSpeedEngine, 1, "DeepSpeed"),
        (zero_3, 1, "DeepSpeed"),
    ],
    ids=["TP", "TP and FSDP2", "part of the ranks", "two meshes", "FSDP1", "DeepSpeed", "ZeRO-3"],
)  # fmt: skip
def test_other_parallelism_is_refused(build, count, says):
    found = message(count, build, enter)
    assert says in found and "fully_shard" in found


def check(model: Any, architecture: Architecture, loss: Any = together, seed: int = 0) -> None:
    examples = architecture.examples(architecture.build(), (5, 2), seed=seed)
    alone = [collate(model, [example]) for example in examples]
    self_check(model, loss, collate(model, examples), alone)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bert", marks=pytest.mark.slow),
        "gpt2_tied",
        pytest.param("t5", marks=pytest.mark.slow),
    ],
)
def test_the_self_check_passes(name):
    """It leaves parameters and gradients as found."""
    architecture = ARCHITECTURES[name]

    def unchanged(dtype: torch.dtype, precision: Any, **options: Any) -> None:
        with precision:
            model = sharded(architecture.build(dtype=dtype), **options)
            check(model, architecture)
        assert all(p.grad is None for p in model.parameters())
        found = whole({name: p.detach() for name, p in model.named_parameters()})
        before = {n: p.detach() for n, p in architecture.build(dtype=dtype).named_parameters()}
        assert_same_sums(found, before, atol=0)

    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        for options in ({}, {"reshard_after_forward": False, "mesh": mesh}):
            unchanged(torch.float64, architecture.precision(), **options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        unchanged(torch.float32, nullcontext(), mp_policy=policy)

    on_processes(2, run)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("norm", "gradient norm"),
        ("sum", "clipped sum"),
        ("coupled", "beside a longer one"),
        ("rank", "different"),
    ],
)
def test_the_self_check_sees(plant, says):
    architecture = ARCHITECTURES["bert"]

    def use(model: Any) -> None:
        loss, seed = together, 0
        if plant == "norm":
            Dense.norms = lambda self, grams=None: Norms(*[torch.ones(len(self.gradients))] * 3)  # type: ignore[method-assign, assignment]
        elif plant == "sum":
            scatter = sharded_sums.scattered
            sharded_sums._WHOLE = NONE
            sharded_sums.scattered = lambda *given: [2 * each for each in scatter(*given)]
        elif plant == "coupled":
            loss = lambda model, batch: together(model, batch) / len(batch["labels"])  # noqa: E731
        else:
            seed = dist.get_rank()
        check(model, architecture, loss, seed)

    assert says in message(2, lambda: sharded(architecture.build()), use)


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_a_logical_batch_can_start_again_after_an_error_in_backward(strategy):
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)

    def run() -> Result:
        sharded_sums._WHOLE = VECTORS
        model = architecture.build()
        examples = architecture.examples(model, LENGTHS)
        sharded(model)
        capture, calls = Tape.capture, []

        def failing(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 12:
                raise UnsupportedModelError("planted")
            capture(*args)

        Tape.capture = failing  # type: ignore[method-assign]
        with pytest.raises(UnsupportedModelError, match="planted"):
            result(model, examples, expected.clipping_norm, strategy=strategy)
        with torch.no_grad():
            together(model, collate(model, examples))
        assert isinstance(model.bert.encoder.layer[1].output.dense.weight, DTensor)
        norms, sums = result(model, examples, expected.clipping_norm, strategy=strategy)
        return norms, whole(sums)

    assert_equal(*of_all(on_processes(2, run)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_kept_on_the_cpu(strategy, monkeypatch):
    """One process: what is gathered, computed and reduced is on the GPU, what is kept is not."""
    architecture = ARCHITECTURES["bert"]
    expected = expected_of(architecture)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        for numbers in (ALL, NONE):
            monkeypatch.setattr(sharded_sums, "_WHOLE", numbers)
            model = sharded(architecture.build().cuda(), mesh, offload_policy=CPUOffloadPolicy())
            examples = architecture.examples(model, LENGTHS)
            batch = on("cuda", collate(model, examples))
            with ClippingEngine(model, expected.clipping_norm, strategy=strategy) as engine:
                norms = engine.backward(together(model, batch))
                sums = engine.collect()
            assert norms.device.type == "cuda"
            assert {total.device.type for total in sums.values()} == {"cpu"}
            full = {name: total.to("cuda").full_tensor().cpu() for name, total in sums.items()}
            assert_equal(norms.cpu(), full, expected)
            alone = [on("cuda", collate(model, [example])) for example in examples]
            self_check(model, together, batch, alone)
    finally:
        dist.destroy_process_group()
