"""Compiled forwards and backwards add up to what ordinary ones do, and draw anew each time."""

from functools import partial
from shutil import which

import pytest
import torch
from models import (
    ARCHITECTURES,
    DEVICES,
    EXACT,
    alone,
    assert_equal,
    batch_for,
    built,
    collate,
    loop,
    on,
    shaken,
    together,
)
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor

from hf_dp._borrowed import traced
from hf_dp.clipping import ClippingEngine, compiled, self_check
from hf_dp.clipping.chunked_loss import without_logits
from hf_dp.clipping.compiled import Compiled
from hf_dp.errors import SelfCheckError, UnsupportedModelError

LENGTHS = (5, 1, 3)
COMPILER = pytest.mark.skipif(not (which("g++") or which("clang++")), reason="no C++ compiler")
LINEAR = torch.ops.aten.linear.default
MODELS = ["bert", "gpt2_tied", "llama", LORA := "LoRA of a Llama"]
SLOW = [pytest.param(name, "cpu", marks=pytest.mark.slow) for name in MODELS]  # C++ compiles
ON_GPU = pytest.param("llama", "cuda", marks=DEVICES[-1].marks)


def of(name, dropout=0.0):
    if name == LORA:
        from peft import LoraConfig, get_peft_model  # not in the kit for GPUs

        architecture = ARCHITECTURES["llama"]
        adapter = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])
        model = shaken(get_peft_model(architecture.build(), adapter)).double().train()
        model.config.use_cache = False
        return architecture, model, architecture.examples(model.get_base_model(), LENGTHS)
    architecture, model, examples = built(name, LENGTHS, dropout=dropout)
    model.config.use_cache = False
    return architecture, model, examples


def sums(model, batch, norm, program=None, seed=0, loss=together):
    """Norms and clipped sums of a batch; random numbers are those of a seed."""

    def losses():
        torch.manual_seed(seed)
        return loss(model, batch)

    engine = ClippingEngine(model, norm)
    engine.compiled = program
    with engine:
        return engine.backward(losses()), engine.collect()


def moved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:3]), LORA]
)
def test_sums_are_those_of_single_examples_also_when_weights_change(name):
    architecture, model, examples = of(name)
    program, batch = Compiled("aot_eager"), collate(model, examples)
    with architecture.precision():
        for _ in range(2):
            expected = loop(model, examples)
            assert_equal(*sums(model, batch, expected.clipping_norm, program), expected, EXACT)
            program.seal()
            graphs = dict(counters["stats"])
            moved(model)  # as an optimizer does, in place
    assert len(program) == 1 and counters["stats"] == graphs


def test_a_buffer_that_is_written_and_given_back_keeps_its_graph():
    architecture, model, examples = of("bert")
    model.register_buffer("largest", torch.full((), 1e3))
    inner = model.forward

    def forward(*args, **kwargs):
        output = inner(*args, **kwargs)
        model.largest.copy_(torch.maximum(model.largest, output.logits.detach().abs().max()))
        return output

    model.forward = forward
    program, batch = Compiled("aot_eager"), collate(model, examples)
    with architecture.precision():
        for _ in range(3):
            sums(model, batch, 1.0, program)
            program.seal()
    assert len(program) == 1


@COMPILER
@pytest.mark.parametrize(("name", "device"), [ON_GPU, *SLOW])
def test_sums_by_inductor_are_those_of_eager(name, device):
    """In float32: a few hundred roundings of 6e-8 in another order, relative to C in a sum."""
    _, model, examples = of(name)
    model, batch = model.float().to(device), on(device, collate(model, examples))
    norms, expected = sums(model, batch, 1.0)
    norm = 0.99 * float(norms.median())
    program = Compiled()
    for _ in range(2):
        norms, expected = sums(model, batch, norm)
        found_norms, found = sums(model, batch, norm, program)
        torch.testing.assert_close(found_norms, norms, rtol=2e-5, atol=1e-8)
        for each, total in expected.items():
            assert float((found[each] - total).norm()) <= 2e-5 * norm * len(LENGTHS), each
        program.seal()
        moved(model)


@COMPILER
@pytest.mark.slow
def test_by_inductor_dropout_is_of_the_stream_at_run_time():
    """With the generator's own numbers, as eager draws them, the sums are eager's in float64."""
    _, model, examples = of("bert", 0.5)
    batch, program = collate(model, examples), Compiled()
    sums(model, batch, 0.1, program)
    program.seal()
    one, again, other = (sums(model, batch, 0.1, program, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.allclose(one, other)
    with torch._inductor.config.patch(fallback_random=True):
        as_eager = Compiled()
        sums(model, batch, 0.1, as_eager)
        for seed in (3, 4):
            (norms, expected), (found_norms, found) = (
                sums(model, batch, 0.1, each, seed) for each in (None, as_eager)
            )
            torch.testing.assert_close(found_norms, norms, rtol=1e-9, atol=0)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def check(model, program, lengths=LENGTHS):
    batch = batch_for(model, lengths)
    singles = [alone(batch, place) for place in range(len(lengths))]
    self_check(model, together, batch, singles, compiled=program)


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_self_check_runs_on_the_compiled_path(dropout):
    program = Compiled("aot_eager")
    check(of("bert", dropout)[1], program)
    assert len(program) == 1 + bool(dropout)  # without dropout, and with it as in training


def fixed_masks(graph):
    """Planted: what the first dropout removes is decided when it is compiled."""
    nodes = (n for n in graph.graph.nodes if n.target is torch.ops.aten.dropout.default)
    if (node := next(nodes, None)) is None:  # in the graph without dropout
        return
    with graph.graph.inserting_before(node):
        half = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 0.5))
    node.replace_all_uses_with(half)
    graph.graph.erase_node(node)
    graph.recompile()


def swapped_taps(graph):
    """Planted: two outputs of one shape get each other's tap."""
    taps = [n for n in graph.graph.nodes if n.op == "placeholder" and n.users]
    added = [(tap, user) for tap in taps for user in tap.users if user.args[0].target is LINEAR]
    (taps, users) = zip(*added[:2], strict=True)  # of queries and keys
    for user, tap in zip(users, taps[::-1], strict=True):
        user.args = (user.args[0], tap)
    graph.recompile()


def seeded(graph, inputs):
    """Planted: a backend whose graphs draw the same numbers each time."""

    def run(*args):
        torch.manual_seed(0)
        return graph(*args)

    return run


@pytest.mark.parametrize(("plant", "backend", "says"), [
    (fixed_masks, "aot_eager", "compiling fixed what dropout removes"),
    (swapped_taps, "aot_eager", "clipped sum of .*query"),
    (lambda graph: None, seeded, "the same ones each time"),
])  # fmt: skip
def test_planted_graphs_are_seen_by_the_self_check(plant, backend, says, monkeypatch):
    def planted(function, *args):
        graph = traced(function, *args)
        plant(graph)
        return graph

    monkeypatch.setattr(compiled, "traced", planted)
    with pytest.raises(SelfCheckError, match=says):
        check(of("bert", 0.5)[1], Compiled(backend))


class Net(nn.Module):
    def __init__(self, kind=""):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 4), nn.Linear(4, 2), kind
        if kind == "token":
            self.token = nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = self.first(x)
        if self.kind == "branch" and h.sum() > 0:
            h = -h
        if self.kind == "other" and isinstance(x, FakeTensor):
            h = self.first(h)
        return self.last(h + self.token if self.kind == "token" else h)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
square = lambda model, x: model(x).square().sum(-1)  # noqa: E731


def without_head(model, x):
    with without_logits(model.last):
        return square(model, x)


@pytest.mark.parametrize(("kind", "says"), [
    ("branch", r"Linear `first`, or what follows it: it fails \(.*Set torch_compile=False"),
    ("other", "differently when it is traced than when it runs"),
    ("token", r"Net, which has no clipping rule: it runs again .*or freeze"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused_by_name(kind, says):
    with pytest.raises(UnsupportedModelError, match=says):
        sums(Net(kind), X, 1.0, Compiled("aot_eager"), loss=square)


def test_what_would_be_compiled_later_is_refused():
    model, program = Net(), Compiled("aot_eager")
    run = partial(sums, model, norm=1.0, program=program, loss=square)
    run(batch=X)
    program.seal()
    run(batch=X + 1)
    with pytest.raises(
        UnsupportedModelError, match=r"shapes \[\(2, 4\)\] now.*shapes='few' or 'one'"
    ):
        run(batch=X[:2])
    with pytest.raises(UnsupportedModelError, match="does not call the model's forward"):
        run(batch=X, loss=lambda model, x: model.last(model.first(x)).square().sum(-1))
    with pytest.raises(UnsupportedModelError, match="`last`, whose forward was replaced.*chunked"):
        run(batch=X, loss=without_head)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedModelError, match="or other types, modes or places"):
            run(batch=X)
    finally:
        torch.use_deterministic_algorithms(False)
    model.last.weight.data = model.last.weight.data.clone()
    with pytest.raises(UnsupportedModelError, match="places of weights"):
        run(batch=X)


@pytest.mark.parametrize(
    ("strategy", "checkpointing"), [("two_pass", False), ("book_keeping", True)]
)
def test_what_frees_as_it_goes_is_refused(strategy, checkpointing):
    model = of("bert")[1]
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine = ClippingEngine(model, 1.0, strategy=strategy)
    engine.compiled = Compiled("aot_eager")
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing"), engine:
        pass
