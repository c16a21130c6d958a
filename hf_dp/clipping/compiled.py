"""A model's forward and backward, compiled, with what the rules need as outputs of the graph.

A traced function must not append to a list, nor set anything: of a graph, only what it returns can
be relied on. So the forward is a function here, ``f(inputs, taps) -> (outputs, kept)``. A *tap* is
a tensor of zeros that is added to what a layer with a rule returns; the gradient of the tap is then
that of the output, and what the rule keeps of the forward (the layer's input) is returned. Both
reach the rule outside of the graph, in the order in which an ordinary backward pass would bring
them, so that norms, weights and sums are computed as ever.

The function is traced by ``make_fx``, which runs the model's own Python once on tensors without
values. Whatever depends on a value fails there, by name. ``torch.compile`` then compiles a graph
that has no branches, and no Python of the model's. Its key is all that could lead to another graph:
shapes, types, modes, and where each weight lies. After :meth:`Compiled.seal` a new key is an error.

Random numbers are operators of the graph. Compiled or not they are drawn at run time, from torch's
generators; :func:`hf_dp.clipping.self_check` looks at that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook as register_pre_hook
from torch.utils import _pytree as pytree

from hf_dp._borrowed import traced
from hf_dp.clipping.tape import Context, Noted, See, Tape, has_own_forward
from hf_dp.errors import HfDpError, UnsupportedModelError

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_TENSOR = object()
_DROPOUT = torch.ops.aten.dropout.default
_OTHERWISE = "it uses its layers differently when it is traced than when it runs"
Kept = Sequence[Tensor | None]
Program = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


def not_compiled(what: str, why: str, instead: str = "") -> UnsupportedModelError:
    """Return the refusal of what cannot be compiled."""
    return UnsupportedModelError(
        f"torch_compile cannot compile {what}: {why}. Set torch_compile=False (in a loop of your "
        f"own, engine.compiled=None){f', or {instead}' if instead else ''}."
    )


@dataclass
class _Trace:
    """Notes what one run of a forward shows: each tapped output, what was kept of it, and whose
    rule sees its gradient."""

    taps: Sequence[Tensor] | None = None  # None: nothing is added
    tapped: list[Tensor] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    see: list[Callable[[Tape], See]] = field(default_factory=list)

    def tap(self, output: Tensor, kept: Kept, see: Callable[[Tape], See]) -> Tensor:
        place, taps = len(self.tapped), self.taps
        if taps is not None and (place >= len(taps) or taps[place].shape != output.shape):
            raise RuntimeError(_OTHERWISE)
        self.tapped.append(output)
        self.kept.append(kept)
        self.see.append(see)
        return output if taps is None else output + taps[place]


@dataclass
class _Graph:
    """The forward for one key, and what its trace noted."""

    program: Program
    graph: GraphModule
    outputs: list[object]  # leaves of what the forward returns, with _TENSOR for each tensor
    spec: pytree.TreeSpec
    taps: list[Tensor]  # zeros that take no memory
    places: list[list[int | None]]  # of what each tap's rule keeps, among all that is kept
    see: list[Callable[[Tape], See]]
    noted: Noted

    def run(self, tape: Tape, tensors: list[Tensor]) -> object:
        tape.repeat(self.noted)
        anchor = next(p for p in self.noted.uses if p is not None and p.requires_grad)
        waiting = _Waiting([each(tape) for each in self.see], self.places)
        taps = _Taps.apply(anchor, waiting, *self.taps)
        outputs, waiting.kept = self.program(tensors, list(taps))
        given = iter(outputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.outputs]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class _Waiting:
    """Holds what waits for the gradients of taps."""

    see: Sequence[See]
    places: Sequence[Sequence[int | None]]
    kept: Sequence[Tensor] = ()


class _TapsContext(Context, Protocol):
    waiting: _Waiting


class _Taps(torch.autograd.Function):
    """Taps, whose gradients go to the rules. The ``anchor``, a parameter, makes backward come here;
    autograd writes nothing for it."""

    @staticmethod
    def forward(
        ctx: _TapsContext, anchor: Tensor, waiting: _Waiting, *taps: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.waiting = waiting
        ctx.set_materialize_grads(False)  # type: ignore[attr-defined]
        return tuple(tap.view_as(tap) for tap in taps)

    @staticmethod
    def backward(ctx: _TapsContext, *grads: Tensor | None) -> tuple[None, ...]:
        waiting = ctx.waiting
        for see, places, grad in reversed([*zip(waiting.see, waiting.places, grads, strict=True)]):
            if grad is not None:
                see([None if at is None else waiting.kept[at] for at in places], grad)  # type: ignore[misc]
        return None, None, *[None] * len(grads)


class Compiled:
    """Compiles the forwards of one model, each when it is first met; after :meth:`seal` it only
    runs those it knows.

    Args: backend, mode: as :func:`torch.compile` takes them.

    Attributes: draws: how often the graph that was compiled last draws random numbers.
    """

    def __init__(self, backend: str = "inductor", mode: str | None = None):
        self.backend, self.mode, self.sealed = backend, mode, False
        self.draws = 0
        self._known: dict[object, _Graph] = {}

    def __len__(self) -> int:
        """Return how many graphs were compiled."""
        return len({id(each.program) for each in self._known.values()})

    def seal(self) -> None:
        """Compile nothing from here on."""
        self.sealed = True

    def forward(
        self,
        tape: Tape,
        own: Callable[..., object],
        module: nn.Module,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run ``own``, the model's forward, compiled; gradients of its parameters reach ``tape``.

        Raises: UnsupportedModelError for what cannot be traced, and for what is not known once this
            is sealed.
        """
        if tape.bypassed or not torch.is_grad_enabled():
            return own(module, *args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for each in module.modules():
            if each is not module and has_own_forward(each):
                what = f"{tape.describe(each)}, whose forward was replaced"
                why = "what replaced it may set or read something outside the graph"
                raise not_compiled(what, why, "set chunked_loss=False")
        key = self._key(module, leaves, spec)
        known = self._known.get(key)
        if self.sealed:
            try:
                if known is not None:
                    with torch.compiler.set_stance("fail_on_recompile"):
                        return known.run(tape, tensors)
            except RuntimeError as problem:
                if "fail_on_recompile" not in str(problem):
                    raise
            raise self._unknown(tensors)

        def run(tensors: list[Tensor]) -> object:
            given = iter(tensors)
            now = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            again, named = pytree.tree_unflatten(now, spec)
            return own(module, *again, **named)

        if known is None:
            last = [module]

            def enter(each: nn.Module, given: object) -> None:
                last[0] = each

            where = lambda: f"{tape.describe(last[0])}, or what follows it"  # noqa: E731
            with _named_errors(where), register_pre_hook(enter):
                known = self._known[key] = self._traced(tape, run, tensors)
        with _named_errors(lambda: tape.describe(module)):
            return known.run(tape, tensors)

    def _unknown(self, tensors: Sequence[Tensor]) -> UnsupportedModelError:
        return not_compiled(
            f"inputs of the shapes {[tuple(each.shape) for each in tensors]} now",
            "they, or other types, modes or places of weights, were not compiled before the first "
            "draw, and compiling during a draw would take minutes",
            "give batches known shapes (shapes='few' or 'one'), and change nothing after the "
            "self-check",
        )

    def _key(self, module: nn.Module, leaves: Sequence[object], spec: object) -> object:
        """Return all that the graph of a forward depends on."""
        described: list[object] = [str(spec), F.dropout.__module__]  # other in `no_dropout`
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                device = leaf.device.type
                described += [leaf.shape, leaf.stride(), leaf.dtype, leaf.device]
                described += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
            elif isinstance(leaf, _PLAIN):
                described += [type(leaf), leaf]
            else:
                raise not_compiled(
                    f"a forward that is given a {type(leaf).__name__}", "it may hide tensors"
                )
        for weight in (*module.parameters(), *module.buffers()):
            described += [weight.data_ptr(), weight.requires_grad]
        return (*described, *[each.training for each in module.modules()])

    def _traced(
        self, tape: Tape, run: Callable[[list[Tensor]], object], tensors: list[Tensor]
    ) -> _Graph:
        seen = _Trace()
        with tape.rehearsing(seen) as eager:
            run(tensors)
        taps = [
            torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
            for each in seen.tapped
        ]
        found: dict[str, Any] = {}

        def functional(
            tensors: list[Tensor], taps: list[Tensor]
        ) -> tuple[list[Tensor], list[Tensor]]:
            with tape.rehearsing(trace := _Trace(taps)) as noted:
                outputs, spec = pytree.tree_flatten(run(tensors))
            for leaf in outputs:
                if not isinstance(leaf, (Tensor, *_PLAIN)):
                    raise TypeError(f"it returns a {type(leaf).__name__}; config.use_cache=False?")
            kept = {id(each): each for of_one in trace.kept for each in of_one if each is not None}
            at = {key: place for place, key in enumerate(kept)}
            places = [[None if e is None else at[id(e)] for e in of_one] for of_one in trace.kept]
            plain = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in outputs]
            found.update(outputs=plain, spec=spec, places=places, see=trace.see, noted=noted)
            only_tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
            return only_tensors, [each.detach() for each in kept.values()]

        graph = traced(functional, tensors, taps)
        if [*map(id, found["noted"].uses)] != [*map(id, eager.uses)]:
            raise RuntimeError(_OTHERWISE)
        for node in graph.graph.find_nodes(op="call_function", target=_DROPOUT):
            if not _draws(node):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        graph.recompile()
        self.draws = sum(map(_draws, graph.graph.nodes))
        return _Graph(self._compiled(graph), graph, taps=taps, **found)

    def _compiled(self, graph: GraphModule) -> Program:
        """Compile a graph, or return what was compiled of an equal one. Without dropout, that of
        the self-check is that of training."""
        for known in self._known.values():
            if known.graph.code == graph.code and _constants(known.graph) == _constants(graph):
                return known.program
        return torch.compile(
            graph.forward, fullgraph=True, dynamic=False, backend=self.backend, mode=self.mode
        )


def _constants(graph: GraphModule) -> list[object]:
    """Return where the weights of a graph lie, and the values of its single numbers."""
    every = graph.state_dict().values()
    return [each.item() if each.dim() == 0 else each.data_ptr() for each in every]


def _draws(node: Node) -> bool:
    """Return whether a node of a graph draws random numbers."""
    given, kwargs = [*node.args, *[None] * 5], node.kwargs
    if node.target is _DROPOUT:
        return bool(given[1] and given[2])
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(given[4] or kwargs.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@contextmanager
def _named_errors(what: Callable[[], str]) -> Iterator[None]:
    """Name what cannot be traced or compiled; memory that ran out is no fault of it."""
    try:
        yield
    except (HfDpError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        said = next(iter(str(problem).splitlines()), "")
        raise not_compiled(what(), f"it fails ({type(problem).__name__}: {said})") from problem
