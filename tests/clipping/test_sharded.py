"""A model that FSDP2 spreads over processes gives the norms and clipped sums of one process.

Rows are spread unevenly, and a rank without any runs synthetic examples that do not count. The oracle
is a loop over single examples by plain autograd on the whole model.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from models import (
    ARCHITECTURES,
    Architecture,
    Batch,
    Expected,
    Net,
    assert_equal,
    assert_same_sums,
    base_of,
    clip_losses,
    collate,
    loop,
    on,
    poison,
    shaken,
    together,
)
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

from hf_dp.clipping import ClippingEngine, self_check, sharding
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import Dense
from hf_dp.clipping.partial_gradients import MaskedEngine
from hf_dp.clipping.rounding import Norms
from hf_dp.clipping.rules import find_rule
from hf_dp.clipping.sharding import scattered
from hf_dp.clipping.tape import Tape
from hf_dp.distributed import processes as distributed_sums
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
TOGETHER, BY_PARTS, TWICE, ALONE = CASES = [
    ("book_keeping", ALL), ("book_keeping", NONE), ("two_pass", NONE), ("per_example", VECTORS),
]  # fmt: skip
ONE_LAYER = {
    "bert": {"num_hidden_layers": 1},
    "gpt2_tied": {"n_layer": 1},
    "llama": {"num_hidden_layers": 1},
}


def small(name: str) -> Architecture:
    """An architecture with one layer, where it may: what it costs to shard grows with the parameters."""
    architecture = ARCHITECTURES[name]
    build = partial(architecture.build, **ONE_LAYER.get(name, {}))
    return dataclasses.replace(architecture, build=build)


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharded(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Call fully_shard as usual: on each layer, then on the whole."""
    mesh = mesh or mesh_of(shard=dist.get_world_size())
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


Result = tuple[Tensor, dict[str, Tensor]]


def result(model: Any, examples: Sequence[Batch], clipping_norm: float, **options: Any) -> Result:
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
    ``sharding``."""

    def run() -> list[Result]:
        found = []
        for strategy, sharding._WHOLE in cases:
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


def adapted() -> Any:
    """A Llama with LoRA."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(ARCHITECTURES["llama"].build(), config)
    return shaken(model).double().train()


def of_adapters(model: Any, replicated: bool) -> None:
    trained = {p for p in model.parameters() if p.requires_grad}
    sharded(model, **({"ignored_params": trained} if replicated else {}))
    of_adapters = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) != replicated for p in of_adapters)


def checkpointed(reentrant: bool) -> Any:
    model = small("bert").build()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def replicated(model: Any) -> None:
    """A mesh (replicate, shard): every number has two owners."""
    sharded(model, mesh_of(replicate=2, shard=2))


def each_layer(model: Any) -> None:
    """fully_shard derives a class of its own from each module's, which keeps its rule."""
    tied = [model.transformer.wte, model.lm_head]
    fully_shard(tied)
    for module in model.modules():
        if not list(module.children()) and list(module.parameters()) and module not in tied:
            fully_shard(module)
    fully_shard(model)
    assert all(find_rule(m) for m in model.modules() if list(m.parameters(recurse=False)))


@dataclass
class Setting:
    """An architecture, on so many processes, and what is special. Of the cases, these run each
    time, and all with the slow tests."""

    name: str
    processes: int = 2
    cases: Sequence[tuple[str, int]] = ()
    shard: Callable[[Any], object] = sharded
    build: Callable[[], Any] | None = None


WHOLE = [(strategy, ALL) for strategy in STRATEGIES]
SETTINGS = {
    "bert": Setting("bert", 2, CASES),
    "albert": Setting("albert", 2, [BY_PARTS]),
    "llama": Setting("llama", 2, [TWICE]),
    "gpt2, 3 processes": Setting("gpt2_tied", 3, [BY_PARTS, ALONE]),
    "replicated shards": Setting("gpt2_tied", 4, [TWICE], replicated),
    "each layer by itself": Setting("gpt2_tied", 2, [TOGETHER], each_layer),
    "whole until backward": Setting("bert", 2, WHOLE[1:], partial(sharded, reshard_after_forward=False)),
    "checkpointing": Setting("bert", 2, [TWICE], build=partial(checkpointed, reentrant=False)),
    "reentrant checkpointing": Setting("bert", 2, [TOGETHER], build=partial(checkpointed, reentrant=True)),
    "LoRA": Setting("llama", 2, [TOGETHER], partial(of_adapters, replicated=False), adapted),
    # Sums of an adapter that is not sharded are each rank's own.
    "LoRA, not sharded": Setting("llama", 2, [BY_PARTS], partial(of_adapters, replicated=True), adapted),
    "gpt2": Setting("gpt2_tied"), "t5": Setting("t5"), "vit": Setting("vit"), "bit": Setting("bit"), "gemma3": Setting("gemma3"),
    "bert, 3 processes": Setting("bert", 3),
    "resharded to 2 of 4": Setting("bert", 4, shard=partial(sharded, reshard_after_forward=2)),
}  # fmt: skip
SLOW = [pytest.param(name, CASES, marks=pytest.mark.slow) for name in SETTINGS]


@pytest.mark.parametrize(
    ("name", "cases"), [*((name, s.cases) for name, s in SETTINGS.items() if s.cases), *SLOW]
)
def test_equals_the_loop(name, cases):
    setting = SETTINGS[name]
    architecture = ARCHITECTURES["bert"] if name == "bert" else small(setting.name)
    model = adapted() if setting.build is adapted else architecture.build()
    with architecture.precision():
        expected = loop(model, architecture.examples(base_of(model), LENGTHS))
    given = {"build": setting.build, "shard": setting.shard}
    norm = expected.clipping_norm
    for each in results(setting.processes, architecture, norm, cases, **given):
        assert_equal(*each, expected)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "clipping", "cases", "policy"),
    [
        ("bert", "automatic", [TOGETHER], MixedPrecisionPolicy()),
        ("bert", "per_layer", [BY_PARTS], MixedPrecisionPolicy()),
        ("gpt2_tied", "flat", [("book_keeping", VECTORS), ("two_pass", VECTORS)], BFLOAT16),
        pytest.param(
            "gpt2_tied", "flat", [BY_PARTS], MixedPrecisionPolicy(), marks=pytest.mark.slow
        ),
    ],
    ids=["automatic", "per layer", "bfloat16", "flat"],
)
def test_equals_one_process_in_float32(name, clipping, cases, policy):
    """And where float32 shards are rounded to bfloat16 as they are used."""
    architecture = small(name)
    clipping_norm = expected_of(architecture).clipping_norm
    build = partial(architecture.build, dtype=torch.float32)
    model = build().to(policy.param_dtype)
    examples = architecture.examples(model, LENGTHS)
    with ClippingEngine(model, clipping_norm, clipping=clipping) as engine:
        parts = [[examples[i] for i in cut] for cuts in CUTS[2] for cut in cuts if cut]
        norms = [engine.backward(together(model, collate(model, part))) for part in parts]
        sums = engine.collect()

    def shard(model: Any) -> None:
        sharded(model, mp_policy=policy)
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    given = {"build": build, "shard": shard, "clipping": clipping}
    for found_norms, found in results(2, architecture, clipping_norm, cases, **given):
        torch.testing.assert_close(found_norms, torch.cat(norms), rtol=1e-4, atol=0)
        assert_same_sums(found, sums, atol=1e-4 * clipping_norm)


# -- examples that do not count, and those that are removed ---


@pytest.mark.parametrize("value", [torch.nan, pytest.param(1.0, marks=pytest.mark.slow)])
def test_made_up_examples_add_exactly_nothing(value):
    architecture = small("bert")

    def run() -> None:
        for strategy, sharding._WHOLE in CASES:
            model = architecture.build()
            examples = architecture.examples(model, LENGTHS)
            poison(model, examples, 1, value)
            sharded(model)
            with ClippingEngine(model, 1.0, strategy=strategy) as engine:
                losses = together(model, collate(model, examples))
                assert len(engine.backward(losses, counted=False)) == 0
                assert not any(bool(each.any()) for each in whole(engine.collect()).values())

    on_processes(2, run)


def test_an_example_that_is_not_finite_is_removed_on_its_rank():
    architecture = small("bert")

    def spoil(model: Any, examples: list[Batch]) -> None:
        poison(model, examples, 1, torch.inf)

    model = architecture.build()
    examples = architecture.examples(model, LENGTHS)
    spoil(model, examples)
    expected = loop(model, [e for place, e in enumerate(examples) if place != 1], clipping_norm=2.0)
    for norms, sums in results(2, architecture, 2.0, [BY_PARTS, ALONE], spoil=spoil):
        assert norms[1] == torch.inf
        assert_equal(norms[torch.arange(5) != 1], sums, expected)


def experts() -> Net:
    """Send each example to one of two layers, so that a rank may use only one of them."""

    def losses(net: Any, given: tuple[Tensor, int]) -> Tensor:
        x, expert = given
        return net.last(torch.tanh(net.experts[expert](torch.tanh(net.first(x)))))[:, 0].square()

    torch.manual_seed(0)
    parts = {"experts": nn.ModuleList([nn.Linear(6, 6) for _ in "ab"]), "unused": nn.Linear(6, 6)}
    return Net(losses, first=nn.Linear(4, 6), **parts, last=nn.Linear(6, 1)).double()


def test_ranks_may_use_different_parameters():
    """All still make the same reductions in the same order."""
    x = torch.randn(2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = experts()
    with ClippingEngine(model, 0.5) as engine:
        for expert in (0, 1):
            engine.backward(model((x[expert], expert)))
        expected = engine.collect()

    def run() -> list[dict[str, Tensor]]:
        found, rank = [], dist.get_rank()
        for strategy, sharding._WHOLE in itertools.product(STRATEGIES, (ALL, NONE)):
            model = fully_shard(experts())
            losses = partial(model, (x[rank], rank))
            found.append(whole(clip_losses(model, losses, 0.5, strategy=strategy)[1]))
        return found

    for sums in zip(*on_processes(2, run), strict=True):
        assert bool(expected["experts.1.weight"].any()) and not bool(sums[0]["unused.bias"].any())
        for each in sums:
            assert_same_sums(each, expected, atol=1e-12)


# -- several steps ---


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_steps_with_other_forwards_between(strategy, monkeypatch):
    """A forward without a backward leaves the outermost modules whole, also over the next step.
    FSDP2 itself never reduces a gradient."""
    architecture = small("gpt2_tied")

    def train(model: Any, shard: bool) -> tuple[dict[str, Tensor], Tensor]:
        examples = architecture.examples(model, LENGTHS)
        batch = collate(model, examples)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
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
        sharding._WHOLE = VECTORS
        return train(sharded(architecture.build()), True)

    for parameters, losses in on_processes(2, run):
        assert_same_sums(parameters, expected, atol=1e-9)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)


def test_one_sum_of_full_size_at_a_time(monkeypatch):
    """What travels, a piece of at most 64 numbers, is a copy."""
    monkeypatch.setattr(distributed_sums, "BUCKET", 4 * 64)  # a quarter of it between CPUs
    monkeypatch.setattr(sharding, "_WHOLE", VECTORS)
    architecture, alive, scatter = small("bert"), [], sharding.scattered

    def watched(parameter: DTensor, total: Tensor) -> DTensor:
        assert total.shape == parameter.shape
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(total))
        return scatter(parameter, total)

    def run() -> list[int]:
        sharding.scattered, found = watched, []
        for strategy in STRATEGIES:
            alive.clear()
            model = sharded(architecture.build())
            result(model, architecture.examples(model, LENGTHS), 1.0, strategy=strategy)
            found.append(len(alive))
        return found

    parameters = len(sharding.reduced_each_batch(architecture.build().parameters()))
    # of each of two physical batches
    assert on_processes(2, run) == [[2 * parameters] * len(STRATEGIES)] * 2


def test_scattered_sums_are_placed_as_their_parameters(monkeypatch):
    def run() -> None:
        mesh = mesh_of(shard=dist.get_world_size())
        for bucket in (4, 40, 2**23):  # numbers of a piece
            monkeypatch.setattr(distributed_sums, "BUCKET", bucket)
            for shape, dim in (((7, 3), 0), ((2, 5), 0), ((4, 6, 2), 1), ((9,), 0)):
                ones = torch.arange(torch.Size(shape).numel()).double().view(shape)
                parameter = distribute_tensor(torch.zeros_like(ones), mesh, [Shard(dim)])
                found = scattered(parameter, ones * (1 + dist.get_rank()))
                assert found.to_local().shape == parameter.to_local().shape
                assert found.placements == parameter.placements and found.shape == parameter.shape
                assert torch.equal(found.full_tensor(), 6 * ones)

    on_processes(3, run)


# -- refused in the same words by every rank ---


def backward(model: Any, losses: Callable[[Any], Tensor]) -> None:
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(losses(model))


def enter(model: Any) -> None:
    ClippingEngine(model, 1.0).__enter__()


def outside(synchronized: bool = True) -> Any:
    """Uses a weight outside the module that owns it."""

    def losses(net: Any, x: Tensor) -> Tensor:
        return (net.last(net.first(x)) + x @ net.first.weight.sum(0)[:, None])[:, 0]

    model = fully_shard(Net(losses, first=nn.Linear(4, 4), last=nn.Linear(4, 1)))
    model.set_requires_gradient_sync(synchronized)
    return model


class Bare(nn.Module):
    """A parameter beside layers: no rule, and shards within."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input * self.scale)[:, 0]


def bare() -> Any:
    model = Bare()
    fully_shard(model.layer)
    return fully_shard(model)


def shared_table_by_itself() -> Any:
    model = ARCHITECTURES["t5"].build()
    fully_shard(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias)
    return fully_shard(model)


def tensor_parallel(mesh: DeviceMesh | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    return parallelize_module(model, mesh or mesh_of(tensor=2), {"0": ColwiseParallel()})


def tensor_parallel_and_sharded() -> nn.Module:
    mesh = mesh_of(shard=2, tensor=2)
    return fully_shard(tensor_parallel(mesh["tensor"]), mesh=mesh["shard"])


def on_some() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh_of(replicate=2, shard=2)["shard"])


def on_two_meshes() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(replicate=2, shard=2))
    return fully_shard(model, mesh=mesh_of(shard=4))


def fsdp_1() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


class DeepSpeedEngine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)


def zero_3() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.ds_id = 0  # type: ignore[assignment]
    return model


by_autograd = partial(backward, losses=lambda model: model(torch.ones(2, 4)))
nothing = partial(backward, losses=lambda model: torch.zeros(0))
ENTER_WHOLE = lambda model: MaskedEngine(model, {}, 1.0).__enter__()  # noqa: E731
Refusal = tuple[Callable[[], Any], Callable[[Any], object], str]
# How many processes; what is built, what is done with it, and what matches the refusal.
REFUSALS: dict[int, list[Refusal]] = {
    1: [(DeepSpeedEngine, enter, "DeepSpeed.*fully_shard"), (zero_3, enter, "DeepSpeed.*fully_shard")],
    2: [
        (outside, by_autograd, "'first.weight'.*bypassing clipping"),
        (partial(outside, synchronized=False), by_autograd, "'first.weight'.*bypassing clipping"),
        (outside, nothing, "counted=False"),
        (outside, ENTER_WHOLE, "MaskedEngine needs each parameter whole"),
        (bare, enter, r"Bare has no clipping rule.*'layer'.*\['scale'\]"),
        (shared_table_by_itself, enter, "T5Attention.*'relative_attention_bias'"),
        (tensor_parallel, enter, "tensor, sequence, expert or pipeline.*fully_shard"),
        (fsdp_1, enter, "FSDP1.*fully_shard"),
    ],
    4: [
        (tensor_parallel_and_sharded, enter, "tensor, sequence, expert or pipeline.*fully_shard"),
        (on_some, enter, "over 2 of 4 processes.*fully_shard"),
        (on_two_meshes, enter, "different meshes.*fully_shard"),
    ],
}  # fmt: skip


def assert_refused(count: int, refusals: Sequence[Refusal]) -> None:
    """Each is refused, and by every rank in the same words."""

    def run() -> list[str]:
        found = []
        for build, use, says in refusals:
            model = build()
            with pytest.raises(HfDpError, match=says) as refused:
                use(model)
            found.append(str(refused.value))
        return found

    first, *others = on_processes(count, run)
    assert all(each == first for each in others)


@pytest.mark.parametrize("count", REFUSALS)
def test_what_cannot_be_is_refused(count):
    assert_refused(count, REFUSALS[count])


# -- the self-check ---


def check(model: Any, architecture: Architecture, loss: Any = together, seed: int = 0) -> None:
    examples = architecture.examples(architecture.build(), (5, 2), seed=seed)
    alone = [collate(model, [example]) for example in examples]
    self_check(model, loss, collate(model, examples), alone)


@pytest.mark.parametrize(
    "name", ["gpt2_tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "t5"))]
)
def test_the_self_check_passes(name):
    """It leaves parameters and gradients as found."""
    architecture = small(name)

    def unchanged(dtype: torch.dtype, precision: Any, **options: Any) -> None:
        with precision:
            model = sharded(architecture.build(dtype=dtype), **options)
            check(model, architecture)
        assert all(p.grad is None for p in model.parameters())
        found = whole({name: p.detach() for name, p in model.named_parameters()})
        before = {n: p.detach() for n, p in architecture.build(dtype=dtype).named_parameters()}
        assert_same_sums(found, before, atol=0)

    def run() -> None:
        unchanged(torch.float64, architecture.precision())
        mesh = mesh_of(replicate=1, shard=2)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        options = {"reshard_after_forward": False, "mesh": mesh, "mp_policy": policy}
        unchanged(torch.float32, nullcontext(), **options)

    on_processes(2, run)


def test_the_self_check_sees():
    """Planted: wrong norms, sums added twice, losses that are coupled, and other examples by rank."""
    architecture = small("bert")

    def ones(self: Dense, grams: object = None) -> Norms:
        return Norms(*[torch.ones(len(self.gradients))] * 3)

    def norms(model: Any) -> None:
        with patch.object(Dense, "norms", ones):
            check(model, architecture)

    def sums(model: Any) -> None:
        scatter = sharding.scattered
        twice = patch.object(sharding, "scattered", lambda *given: 2 * scatter(*given))
        with patch.object(sharding, "_WHOLE", NONE), twice:
            check(model, architecture)

    def coupled(model: Any) -> None:
        check(model, architecture, lambda net, batch: together(net, batch) / len(batch["labels"]))

    def by_rank(model: Any) -> None:
        check(model, architecture, seed=dist.get_rank())

    said = "gradient norm", "clipped sum", "beside a longer one", "different"
    build = lambda: sharded(architecture.build())  # noqa: E731
    planted = zip((norms, sums, coupled, by_rank), said, strict=True)
    assert_refused(2, [(build, use, says) for use, says in planted])


@pytest.mark.parametrize("strategy", ["book_keeping", "two_pass"])
def test_a_logical_batch_can_start_again_after_an_error_in_backward(strategy):
    architecture = small("bert")
    expected = expected_of(architecture)

    def run() -> Result:
        sharding._WHOLE = VECTORS
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
        assert isinstance(model.bert.encoder.layer[0].output.dense.weight, DTensor)
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
            monkeypatch.setattr(sharding, "_WHOLE", numbers)
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
