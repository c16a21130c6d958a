"""A check, before any private data is read, of the engine on *this* model and loss.

Synthetic examples of different lengths run through the model together, padded, inside the engine;
then each runs alone, unpadded, through plain autograd. Losses, norms and clipped sums must agree.
Dropout is off there; what it draws must belong to one example each.

In 16 bits, another batch shape rounds otherwise, and a logit near 16 moves by up to 1/16. Where two
words share the probability, losses then differ by 6 %, and gradients by more. So plain autograd
takes the gradients of single examples there in the same batch, whose forward rounds alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from hf_dp.clipping import sharding
from hf_dp.clipping.compiled import Compiled
from hf_dp.clipping.draws import Batch, PerExampleLoss, draws_of, no_dropout, refuse_shared_draws
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.norms import clipping_weights
from hf_dp.clipping.rounding import squared_norms
from hf_dp.clipping.sharding import held
from hf_dp.errors import HfDpError, SelfCheckError, UnsupportedModelError

# For 16-bit forwards, whose products have three digits.
AUTOCAST_TOLERANCE = 5e-2
_LOSS_TOLERANCE = 0.25  # there, of a loss in two batch shapes
# Of a loss that is computed twice by the same operations, in 32 bits and in 16.
_REPEATED, _REPEATED_ROUNDED = 1e-6, 1e-3
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ADDED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, *_WHOLE}
_MOVE = 0.01  # about as much as an initial weight
_IGNORED = -100  # the label of a position that is not predicted


def per_example_gradients(
    losses: Tensor, parameters: Mapping[str, nn.Parameter]
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of each loss in turn, ``{name: tensor like the parameter}``.

    This is the oracle: each takes one backward pass of plain autograd, which keeps the graph.
    Unused parameters get zeros. All passes share one graph, so an example that is not finite spoils
    the others (0 * NaN is NaN): this is not fit for training.

    Args: losses: (b,), of a forward that ran without the engine.
    """
    for loss in losses:
        gradients = torch.autograd.grad(
            loss,
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        yield dict(zip(parameters, gradients, strict=True))


def self_check(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    padded: Batch,
    alone: Sequence[Batch],
    *,
    clipping: str = "flat",
    strategy: str = "book_keeping",
    rtol: float | None = None,
    have_neighbors: bool = True,
    compiled: Compiled | None = None,
) -> None:
    """Compare the engine with one-by-one gradients on synthetic examples.

    Parameters, their gradients and training mode are left as found. If FSDP2 shards the model, all
    processes must call this with the same examples, and no parameter may have a ``.grad``.

    Args:
        per_example_loss: ``(model, batch) -> (b,)``.
        padded: the examples as one batch, of different lengths and not sorted by length.
        alone: each of them as a batch of one, unpadded.
        rtol: relative tolerance of losses, norms and clipped sums; the default depends on the
            dtype that the parameters have in the forward (1e-3 in float32). From
            AUTOCAST_TOLERANCE on, 16 bits compute: gradients are compared within the batch, and
            losses alone and together with a tolerance of 0.25.
        have_neighbors: False where each forward has one example, which draws for itself alone.
        compiled: runs the engine's forward on ``padded``, and is compared alone. It must draw as
            many random numbers as the model, and new ones each time.

    Raises:
        SelfCheckError: says what differed: a loss (it depends on neighbors or padding), a norm, a
            clipped sum, or a buffer that the forward changed; or what the examples draw together.
    """
    sharded = sharding.is_sharded(model)
    if sharded:
        sharding.prepare_shards(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with _on_copies(per_example_loss) as loss, in_training(model), _moved(model, trainable):
        state = _State(model)
        if have_neighbors:
            refuse_shared_draws(model, loss, padded, len(alone))
        with no_dropout():
            singles = [_alone(model, loss, example, trainable) for example in alone]
            rtol = _tolerance(model, trainable) if rtol is None else rtol
            # Below every norm, so that every example is clipped.
            clipping_norm = min(example.norm for example in singles) / 2 or 1.0
            engine = ClippingEngine(model, clipping_norm, clipping, strategy)
            engine.compiled = compiled
            for batch, order in _arrangements(padded, len(alone)):
                if compiled is not None and batch is not padded:
                    break
                losses_alone = [singles[place].loss for place in order]
                expected = [singles[place] for place in order]
                if rtol >= AUTOCAST_TOLERANCE:
                    within = {
                        place: _alone(model, loss, batch, trainable, order.index(place))
                        for place in set(order)
                    }
                    expected = [within[place] for place in order]
                with engine:
                    losses = loss(model, batch)
                    norms = engine.backward(losses)
                    sums = engine.collect()
                    if sharded:
                        sharding.refuse_different_examples(
                            [each.loss for each in singles], losses.device
                        )
                    _compare_losses(losses.detach().double(), losses_alone, rtol)
                    _compare_norms(norms.double(), expected, rtol)
                    if batch is padded:
                        _compare_sums(sums, expected, engine, rtol)
                    _compare_one(engine, partial(loss, model, batch), len(order))
            if (fewer := _without_one_label(padded, len(alone))) is not None:
                _refuse_selected(engine, partial(loss, model, fewer))
            with torch.no_grad():
                _refuse_memory(singles[0].loss, float(loss(model, alone[0])[0]), rtol)
        with engine:  # and once with dropout on, as in training
            engine.backward(loss(model, padded))
        if compiled is not None:
            found = draws_of(model, loss, padded, len(alone))
            # Kernels of attention count as drawing also without dropout.
            draws = sum(not each.operator.startswith("_scaled_dot_product") for each in found)
            _refuse_fixed_draws(compiled, draws, engine, partial(loss, model, padded))
        state.refuse_changes()


def refuse_notice_of_length(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    alone: Batch,
    beside: Batch,
    *,
    rtol: float | None = None,
) -> None:
    """Compare loss and gradient of a short example ``alone`` with those ``beside`` a longer one.
    The examples of :func:`self_check` are short, and some models do something else from a length
    on: Llama 4 scales attention by places in the padded row, from 8,192 on."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with (
        _on_copies(per_example_loss) as loss,
        in_training(model),
        _moved(model, trainable),
        no_dropout(),
    ):
        one, other = (_alone(model, loss, each, trainable) for each in (alone, beside))
        rtol = _tolerance(model, trainable) if rtol is None else rtol
    differences = (held(other.gradients[name]) - held(g) for name, g in one.gradients.items())
    apart = float(_squared_norms(differences, [*one.gradients.values()]).sum().sqrt())
    alike = abs(other.loss - one.loss) <= rtol * max(abs(one.loss), 1.0)
    if not (alike and apart <= rtol * one.norm):
        raise SelfCheckError(
            f"A short synthetic example has the loss {one.loss:.6g} and the gradient norm "
            f"{one.norm:.6g} alone; beside one as long as the longest row the loss is "
            f"{other.loss:.6g}, and the gradient is {apart:.3g} away: from some length on it "
            "depends on its neighbors. Truncate the rows to less than that, pad on the right, or "
            "set per_device_train_batch_size=1."
        )


def refuse_state_of_length(
    model: nn.Module, per_example_loss: PerExampleLoss, longest: Batch
) -> None:
    """Raise SelfCheckError where a training forward of one as long as the longest row changes a
    buffer or parameter: dynamic rotary embeddings keep frequencies from some length on, which the
    examples of :func:`self_check` may not have."""
    with _on_copies(per_example_loss) as loss, in_training(model), no_dropout(), torch.no_grad():
        state = _State(model)
        loss(model, longest)
        state.refuse_changes()


@contextmanager
def _on_copies(per_example_loss: PerExampleLoss) -> Iterator[PerExampleLoss]:
    """Let the loss change copies of its batches, and say what fails on which synthetic rows. A rule
    may meet a use of its layer that it cannot compute."""
    tried: Mapping[str, object] = {}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal tried
        tried = batch if isinstance(batch, Mapping) else {}
        return per_example_loss(model, copy.deepcopy(batch))

    try:
        yield loss
    except (HfDpError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        said = next(iter(str(problem).splitlines()), "")
        shapes = {n: tuple(each.shape) for n, each in tried.items() if isinstance(each, Tensor)}
        if "memory" in said.lower() or "alloc" in said.lower():  # a lack of it
            raise
        raise SelfCheckError(
            f"Model, loss or clipping engine fail on synthetic examples of shapes {shapes} "
            f"({type(problem).__name__}: {said}). If the model runs with them in eval mode, a "
            "layer's input does not have the examples in its first dimension (but, say, windows "
            "of images): freeze parts of the model to find it, or set "
            "gradient_checkpointing=False. If it runs only with one of them at a time, it needs "
            "rows that have something in common: make the rows alike, or choose another model."
        ) from problem


def _arrangements(padded: Batch, count: int) -> Iterator[tuple[Batch, list[int]]]:
    """Yield the batch as it is, and repeated until it has as many examples as positions. In the
    second, a tensor whose first dimension is the positions looks like one of examples."""
    yield padded, list(range(count))
    tokens = padded.get("input_ids") if isinstance(padded, Mapping) else None
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] != count:
        order = [position % count for position in range(tokens.shape[1])]

        def arranged(value: object) -> object:
            if isinstance(value, Tensor):
                return value[order]
            of_examples = isinstance(value, list) and len(value) == count
            return [value[place] for place in order] if of_examples else value  # type: ignore[index]

        yield {name: arranged(value) for name, value in padded.items()}, order


def _refuse_selected(engine: ClippingEngine, losses: Callable[[], Tensor]) -> None:
    """Raise UnsupportedModelError where a layer works on vectors that the engine cannot split by
    example. Other errors and NaN are passed over here: a loss may need a label in each row."""
    try:
        with engine:
            found = losses()
            engine.backward(found, torch.zeros_like(found, dtype=torch.bool))
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        return


def _without_one_label(padded: Batch, count: int) -> Batch | None:
    """Return the batch with one label ignored; None where none is ignored already, or one example
    has no neighbor.

    A loss may give a layer only the vectors at labels, and there may happen to be as many as
    examples, or a multiple. With one fewer there are not, so the engine refuses to split them.
    """
    tensors = padded if isinstance(padded, Mapping) and count > 1 else {}
    for name, labels in tensors.items():
        if isinstance(labels, Tensor) and labels.dim() == 2 and len(labels) == count:
            known = labels != _IGNORED
            if known.any() and not known.all() and not labels.is_floating_point():
                example = int(known.sum(1).argmax())
                places = known[example].nonzero().flatten()
                fewer = labels.clone()
                fewer[example, places[len(places) // 2]] = _IGNORED
                return {**padded, name: fewer}
    return None


def _compare_one(engine: ClippingEngine, losses: Callable[[], Tensor], examples: int) -> None:
    """Back-propagate one example's loss alone; raise if any other example gets a gradient. Not the
    first: what all share and is mistaken for its own would go unnoticed."""
    for index in sorted({examples // 2, examples - 1} - {0}):
        values = losses()
        norms = engine.backward(values * (torch.arange(examples, device=values.device) == index))
        norms[index] = 0
        if bool(norms.any()):
            other = int(norms.argmax())
            raise SelfCheckError(
                f"The loss of synthetic example {index} alone gave example {other} a gradient norm "
                f"of {float(norms[other]):.3g} in the clipping engine: the first dimension of a "
                "layer's input is not the examples in their order. Freeze parts of the model to "
                "find the layer, or give it inputs with the examples in their first dimension."
            )


@contextmanager
def _moved(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Move trainable parameters a little: zeros (LoRA's B, gates) hide what is behind them.
    Autocast around the check keeps 16-bit copies of them, which would not have moved."""
    values = {name: held(parameter.detach()).clone() for name, parameter in trainable.items()}
    torch.clear_autocast_cache()
    try:
        with torch.no_grad():
            for parameter in trainable.values():
                generator = torch.Generator(parameter.device).manual_seed(0)
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                noise = sharding.placed_as(parameter, noise.to(parameter.dtype))
                held(parameter).add_(held(noise), alpha=_MOVE)
        yield
    finally:
        sharding.reshard(model)
        with torch.no_grad():
            for name, parameter in trainable.items():
                held(parameter).copy_(values[name])
        torch.clear_autocast_cache()


@dataclass
class _Expected:
    """The loss, gradient norm and gradients of one example by plain autograd, and the squared norm
    of each gradient."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    squares: list[float]


def _alone(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Batch,
    trainable: Mapping[str, nn.Parameter],
    place: int = 0,
) -> _Expected:
    loss = per_example_loss(model, batch)[place : place + 1]
    gradients = (
        sharding.averaged_gradients(loss[0], trainable)
        if sharding.is_sharded(model)
        else next(per_example_gradients(loss, trainable))
    )
    squares = _squared_norms(map(held, gradients.values()), [*gradients.values()])
    expected = _Expected(
        float(loss.detach()[0]), float(squares.sum().sqrt()), gradients, squares.tolist()
    )
    if not (math.isfinite(expected.loss) and math.isfinite(expected.norm)):
        raise SelfCheckError(
            "On synthetic examples the model's losses or gradients are not finite, so no private "
            "step could use an example. Look for weights that are not finite, or a precision that "
            "overflows."
        )
    return expected


def _squared_norms(parts: Iterable[Tensor], of: Sequence[Tensor]) -> Tensor:
    """Return squared norms (n,) in float64, without float64 copies, of tensors that are placed as
    ``of`` are, of which this process holds ``parts``."""
    own = [squared_norms(part.reshape(1, -1))[0].double() for part in parts]
    return sharding.of_all_shards(torch.stack(own), of)


def _compare_losses(losses: Tensor, losses_alone: Sequence[float], rtol: float) -> None:
    rtol = _LOSS_TOLERANCE if rtol >= AUTOCAST_TOLERANCE else rtol
    for together, alone in zip(losses.tolist(), losses_alone, strict=True):
        if not abs(together - alone) <= rtol * max(abs(alone), 1.0):
            raise SelfCheckError(
                f"The loss of a synthetic example is {alone:.6g} alone but {together:.6g} "
                "beside a longer one, so an example's gradient depends on its neighbors. Look for "
                "a batch mean, positions that count padding, or attention to padding; override "
                "DPTrainer.compute_per_example_loss if the loss is your own."
            )


def _refuse_memory(first: float, again: float, rtol: float) -> None:
    """Raise SelfCheckError where the loss of one example changed after those of others: a slow mean
    hardly moves in this check, and by any amount for a row that is far from all others."""
    rtol = _REPEATED_ROUNDED if rtol >= AUTOCAST_TOLERANCE else min(rtol, _REPEATED)
    if not abs(again - first) <= rtol * max(abs(first), 1.0):
        raise SelfCheckError(
            f"The loss of a synthetic example is {first:.9g} at first but {again:.9g} after those "
            "of others: model or loss keep something from call to call. If that is of earlier "
            "examples, a running mean perhaps, a row would move the gradients of later ones. "
            "Compute the loss from its own example, the weights and the step "
            "(trainer.state.global_step) alone."
        )


def _compare_norms(norms: Tensor, expected: Sequence[_Expected], rtol: float) -> None:
    largest = max(example.norm for example in expected)
    for measured, example in zip(norms.tolist(), expected, strict=True):
        if not abs(measured - example.norm) <= rtol * max(example.norm, 1e-3 * largest):
            raise SelfCheckError(
                f"A synthetic example's gradient norm is {example.norm:.6g} by autograd but "
                f"{measured:.6g} by the clipping engine: this model uses a layer in a way that "
                "the layer's clipping rule does not cover. Freeze parts of the model to find it."
            )


def _compare_sums(
    sums: Mapping[str, Tensor], expected: Sequence[_Expected], engine: ClippingEngine, rtol: float
) -> None:
    groups, clipping_norm = engine.groups, engine.clipping_norm
    norms = torch.zeros(len(set(groups.values())), len(expected), dtype=torch.float64)
    for column, example in enumerate(expected):
        for name, square in zip(example.gradients, example.squares, strict=True):
            norms[groups[name], column] += square
    weights = clipping_weights(engine.clipping, norms.sqrt(), clipping_norm)

    def errors_and_sums() -> Iterator[Tensor]:
        for name, total in sums.items():
            exact = torch.zeros_like(held(total))
            for column, example in enumerate(expected):
                weight = float(weights[groups[name], column])
                exact.add_(held(example.gradients[name]), alpha=weight)
            yield held(sharding.of_one_process(total)) - exact
            yield exact

    of = [total for total in sums.values() for _ in ("error", "sum")]
    found = _squared_norms(errors_and_sums(), of).sqrt().tolist()
    for name, error, size in zip(sums, found[::2], found[1::2], strict=True):
        # Relative to this parameter's own sum: a small one must not hide behind the others.
        if not error <= rtol * len(expected) * max(min(size, clipping_norm), 1e-2 * clipping_norm):
            raise SelfCheckError(
                f"The clipped sum of {name!r} differs from the sum of clipped one-by-one gradients "
                f"by {error:.3g} (clipping norm {clipping_norm:.3g}). Freeze this parameter, or "
                "correct the clipping rule of its layer."
            )


def _refuse_fixed_draws(
    compiled: Compiled, draws: int, engine: ClippingEngine, losses: Callable[[], Tensor]
) -> None:
    """Raise unless the graph that was run last draws as often as the model, and when it runs."""
    with engine:
        one, other = (losses().detach() for _ in range(2))
    if compiled.draws != draws or (draws and torch.equal(one, other)):
        raise SelfCheckError(
            f"A training forward draws random numbers {draws} times. Compiled, it draws them "
            f"{compiled.draws} times, or the same ones each time: compiling fixed what dropout "
            "removes. Set torch_compile=False."
        )


def _values(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return numbers for each parameter, of which a change of its values changes one, also by
    ``.data``, which leaves the version, or by another parameter in its place. (PEFT's LoRA of a
    parameter registers it again in each forward, which counts as a change of version.)"""
    sharding.reshard(model)  # a forward alone leaves whole parameters in the place of shards
    again = {
        parameter
        for module in model.modules()
        if isinstance(module, ParamWrapper)
        for parameter in module.get_base_layer().parameters()
    }
    return {
        name: (0 if p in again else p._version, *_digest(held(p.detach())))
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _digest(values: Tensor) -> tuple[int, ...]:
    """Return two numbers: bits by exclusive or, in which equal values cancel in pairs, and the bits
    of the sum; nothing for kinds of numbers that torch does not add up (8 bits, complex)."""
    if not values.numel() or values.dtype not in _ADDED:
        return ()
    total = values.sum(dtype=torch.float64).view(torch.int64)
    return int(torch.hash_tensor(values).item()), int(total.item())


class _State:
    """The buffers and parameters of a model, as they are when this is made."""

    def __init__(self, model: nn.Module):
        self._model, self._values = model, _values(model)
        self._buffers = {name: buffer.clone() for name, buffer in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_buffers(remove_duplicate=False)

    def refuse_changes(self) -> None:
        """Raise SelfCheckError where a forward has changed one, made one or removed one."""
        buffers, values = dict(self._named()), _values(self._model)
        changed = [*(buffers.keys() ^ self._buffers.keys()), *(values.keys() ^ self._values.keys())]
        kept = buffers.keys() & self._buffers.keys()
        changed += [each for each in kept if not torch.equal(buffers[each], self._buffers[each])]
        changed += [name for name, each in self._values.items() if values.get(name) != each]
        if changed:
            raise SelfCheckError(
                f"A training forward changed the buffer or parameter {changed[0]!r}: it stores "
                "something computed from the examples, which would be saved without noise, or "
                "reach others. Replace the module that owns it."
            )


def _tolerance(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> float:
    dtypes = {p.dtype for p in trainable.values()} | sharding.computing_dtypes(model)
    autocast = any(torch.is_autocast_enabled(p.device.type) for p in trainable.values())
    if autocast or dtypes & {torch.bfloat16, torch.float16}:
        return AUTOCAST_TOLERANCE
    return 1e-7 if dtypes == {torch.float64} else 1e-3


@contextmanager
def in_training(model: nn.Module, training: bool = True) -> Iterator[None]:
    """Let all modules train inside, or evaluate; outside, each is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
