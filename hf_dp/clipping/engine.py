"""The clipping engine: sums of clipped per-example gradients from an ordinary forward.

Autograd itself computes no weight gradient. Inside the ``with``, each module that owns trainable
parameters has a forward that lets its rule see, in backward, what its parameters met.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from hf_dp import _validate
from hf_dp.clipping import sharding
from hf_dp.clipping.clipped_sum import ClippedSum, LargeUnit, Watch, book_keeping, two_pass
from hf_dp.clipping.compiled import Compiled, not_compiled
from hf_dp.clipping.coupling import Buffers, batch_check, refuse_coupling
from hf_dp.clipping.fallback import Method, fallback_forward, find_shared_method, own_parameters
from hf_dp.clipping.forms import RunningSums
from hf_dp.clipping.rounding import SMALLEST_CLIPPING_NORM, zero_sum
from hf_dp.clipping.rules import find_rule
from hf_dp.clipping.scales import Scale
from hf_dp.clipping.tape import Tape
from hf_dp.errors import UnaccountedGradientError, UnsupportedLossError, UnsupportedModelError
from hf_dp.plans.dp_sgd import CLIPPINGS, MEMORY_RATIO, STRATEGIES, check_memory_ratio
from hf_dp.plans.rounding import SMALL_GROUP, regrouping_share, slack_cap

# Models that take several choices for each example.
_FOLDING = frozenset(modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values())


class ClippingEngine:
    """A context manager inside which the unmodified model runs and losses are back-propagated.

    Args:
        model: its trainable parameters (``requires_grad``) are clipped; frozen modules are left
            alone.
        clipping_norm: C, the largest L2 norm of one example's contribution to a sum.
        clipping: ``"flat"``, one norm over all parameters; ``"automatic"`` (AUTO-S);
            ``"per_layer"``, one norm C / sqrt(K) for each of the K modules that own trainable
            parameters. See :mod:`hf_dp.clipping.norms`.
        strategy: how to compute the same sums. ``"book_keeping"``: one backward pass, everything it
            captures held until its end. ``"two_pass"``: two passes over one graph, each gradient
            held only while it is needed; for gradient checkpointing and models that fill the
            memory. ``"per_example"``: explicit per-example gradients, without rules.
        memory_ratio: how much memory ``"book_keeping"`` may take for speed, at least 1: an estimate
            of its peak relative to training without clipping. See :mod:`hf_dp.clipping.forms`.

    Raises:
        UnsupportedModelError: the model couples examples, or nothing in it is trainable, or (in
            backward) an input cannot be split by example.
        UnaccountedGradientError: a gradient reached a parameter by a path around the engine.

    The model may be sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``). Then all processes
    must call :meth:`backward` equally often, one that has no examples left with synthetic ones and
    ``counted=False``, and all must call :meth:`collect`.

    The sums' sensitivity to one example is C if losses are per-example, which
    :func:`hf_dp.clipping.self_check` tests; call it once for a new model. Norms and the products of
    a physical batch are float32, or float64 for a float64 model; sums over batches are float64.

    Attributes:
        regrouped: how many other examples one example more or less can move to other physical
            batches, whose rounding then changes (:func:`hf_dp.plans.rounding.slack_cap`). Set it
            in a loop of your own with larger batches.
        compiled: runs the model's forward, and its backward, compiled; None: as they are.
    """

    regrouped = SMALL_GROUP
    compiled: Compiled | None = None
    _gauge = 1.0
    _watch: Watch | None = None
    clippings: ClassVar[tuple[str, ...]] = CLIPPINGS  # those that a subclass can do

    def __init__(
        self,
        model: nn.Module,
        clipping_norm: float,
        clipping: str = "flat",
        strategy: str = "book_keeping",
        memory_ratio: float = MEMORY_RATIO,
    ):
        self.model = model
        self.clipping_norm = _validate.positive("clipping_norm", clipping_norm)
        if self.clipping_norm < SMALLEST_CLIPPING_NORM:
            raise _validate.invalid(
                "clipping_norm",
                clipping_norm,
                f"to be at least {SMALLEST_CLIPPING_NORM}",
                "The squares of gradients this small are 0 in float32. Scale the loss up.",
            )
        self.clipping = _validate.one_of("clipping", clipping, self.clippings)
        self.strategy = _validate.one_of("strategy", strategy, STRATEGIES)
        self.memory_ratio = check_memory_ratio("memory_ratio", memory_ratio)
        self._tape = Tape()
        self._restore: list[Callable[[], None]] = []
        self._everything: dict[str, nn.Parameter] = {}
        self._parameters: dict[str, nn.Parameter] = {}  # those that train
        self._groups: dict[nn.Parameter, int] = {}
        self._sums = RunningSums()
        self._model_bytes = 0  # of weights and gradients
        self._sharded = self._folds = False
        self._buffers = Buffers()
        self._shards = sharding.ShardedSums(())
        self._spoiled = False
        self._large: LargeUnit | None = None

    def __enter__(self) -> Self:
        modules = dict(self.model.named_modules())
        kinds = {cls.__name__ for each in modules.values() for cls in type(each).__mro__}
        self._folds = not _FOLDING.isdisjoint(kinds)
        forwards = (module.__dict__.get("forward") for module in modules.values())
        if self._restore or any(
            isinstance(getattr(each, "__func__", None), _CapturingForward) for each in forwards
        ):
            raise UnaccountedGradientError(
                "This model is already inside a ClippingEngine; leave that one first."
            )
        self._sharded = sharding.is_sharded(self.model)
        if self._sharded:
            self._refuse_whole_parameters()
            sharding.prepare_shards(self.model)
        refuse_coupling(self.model)
        self._everything = dict(self.model.named_parameters())
        self._parameters = {name: p for name, p in self._everything.items() if p.requires_grad}
        if not self._parameters:
            raise UnsupportedModelError(
                "The model has no trainable parameter. Set requires_grad_(True) on what to train."
            )
        everything, trained = self._everything.values(), self._parameters.values()
        self._model_bytes = sum(
            sharding.held(p).nbytes for each in (everything, trained) for p in each
        )
        self._sums, self._spoiled, self._large = RunningSums(), False, None
        self._shards = sharding.ShardedSums(self._parameters.values())
        self._tape = Tape({module: name for name, module in modules.items()}, self._sharded)
        self._groups = self._group()
        try:
            handle = self.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
            self._restore.append(handle.remove)
            self._buffers = Buffers.of(self.model)
            for module in modules.values():
                if (check := batch_check(module)) is not None:
                    hook = module.register_forward_pre_hook(check, with_kwargs=True)
                    self._restore.append(hook.remove)
                own = own_parameters(module)
                if own and not isinstance(module, (nn.ParameterDict, nn.ParameterList)):
                    self._install(module, own)
                if (method := find_shared_method(module)) is not None:
                    self._refuse_uncompiled(module)
                    self._tape.know(module, method.parameters)
                    if self._sharded:
                        described = self._tape.describe(module)
                        sharding.refuse_shards_within(
                            module, described, method.parameters, only_own=True
                        )
                    shared = tuple(method.parameters)
                    run = partial(fallback_forward, self._tape, method.call, shared)
                    self._replace(module, method.name, run)
            if self.compiled is not None:
                self._compile(self.compiled)
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _compile(self, compiled: Compiled) -> None:
        """Let the model's forward run compiled, or raise for what cannot be."""
        checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        if self.strategy != "book_keeping" or checkpoints:
            what = f"a model with gradient checkpointing, or clipping_strategy={self.strategy!r}"
            raise not_compiled(what, "a graph returns all that is kept at once")
        if self._sharded:
            raise not_compiled("a sharded model", "a parameter is whole only while its module runs")
        own = _original(self.model.__dict__.get("forward"))
        self._replace(self.model, "forward", partial(compiled.forward, self._tape, own))

    def _begin(self) -> None:
        """Prepare what a subclass needs, or raise for a model that it cannot serve."""

    def __exit__(self, *exception: object) -> None:
        try:
            if self._tape.began:
                self._buffers.restore()
        finally:
            while self._restore:
                self._restore.pop()()
        if self._sharded and any(exception) and self._tape.examples is not None:
            sharding.reset_shards(self.model)  # a forward began that may not have ended
        elif self._sharded:
            sharding.reshard(self.model)
        self._tape, self._gauge, self._watch = Tape(), 1.0, None

    def measure(
        self,
        gauge: float = 1.0,
        watch: Watch | None = None,
        scales: Mapping[str, Scale] | None = None,
    ) -> None:
        """Measure gradients by public numbers until the ``with`` ends: what is clipped to C and
        added is ``s * g / r``, so C remains what one example adds at most.

        Args:
            gauge: r > 0.
            watch: sees the norms of ``s * g``, as weights are computed from them, (K, units), and
                which units are used. Not private.
            scales: s of trainable parameters, by name; 1 for the others.

        Raises: InvalidArgumentError for these, and where r C is less than float32 can tell from 0.
        """
        if self.clipping_norm * _validate.positive("gauge", gauge) < SMALLEST_CLIPPING_NORM:
            least = SMALLEST_CLIPPING_NORM / self.clipping_norm
            raise _validate.invalid("gauge", gauge, f"to be at least {least:.3g}", "Raise it.")
        if scales and self._sharded:
            raise UnsupportedModelError(
                "Scales of a sharded parameter are not implemented. Train with DDP, or without."
            )
        fitted = {}
        for name, scale in (scales or {}).items():
            if name not in self._parameters:
                raise _validate.invalid("scales", name, "to name a trainable parameter")
            parameter = self._parameters[name]
            fitted[parameter] = scale.fitted(name, parameter)
        self._gauge, self._watch, self._tape.scales = gauge, watch, fitted

    @property
    def groups(self) -> dict[str, int]:
        """The group of each parameter, numbered from 0, inside the ``with``."""
        return {name: self._groups[parameter] for name, parameter in self._parameters.items()}

    def backward(
        self,
        losses: Tensor,
        counted: bool | Tensor = True,
        *,
        rows_per_unit: int = 1,
        unit_continues: bool = False,
    ) -> Tensor:
        """Back-propagate per-example losses and add the clipped gradients to the running sums.

        What is clipped is a *unit*: one example, or all rows of one user. A unit's gradient is that
        of the sum of its losses, and has a norm of at most C in the sums, however many rows it has.

        Args:
            losses: (b,), each a function of its own example only, unscaled. b = 0 is allowed unless
                the model is sharded, and adds nothing. For the mean over the rows of a unit, divide
                each loss by their number.
            counted: which units count, (b / k,), or whether all do. The others add exactly nothing
                to sums and counts, whatever their gradients are: synthetic ones in place of rows
                that cannot be trained on; or all, with which a process that has no others takes
                part in what the processes do together.
            rows_per_unit: k >= 1; the examples 0 to k - 1 are one unit, the next k another, and so
                on. k divides b.
            unit_continues: the b examples are of one unit (k = b), and more of its examples follow
                in the next call. The unit is clipped at the end of its last call.

        Returns:
            the units' gradient norms before clipping, (b / k,), detached; ``inf`` for a unit whose
            norm is not finite, which is removed from the sums. Of examples that do not count, and
            of a unit that continues, there are none, (0,).

        Raises: UnsupportedLossError, UnaccountedGradientError, UnsupportedModelError;
            InvalidArgumentError for rows that do not form whole units.
        """
        self._check_losses(losses)
        self._check_units(len(losses), rows_per_unit, unit_continues)
        if isinstance(counted, Tensor) and counted.shape != (len(losses) // rows_per_unit,):
            shape, expected = tuple(counted.shape), "to say for each unit whether it counts"
            raise _validate.invalid("counted", shape, expected, "Give it one truth value per unit.")
        if self._sharded and len(losses) == 0:
            raise UnsupportedLossError(
                "engine.backward() got no losses, but this model is sharded and the other "
                "processes wait for this one. Pass losses of synthetic examples with counted=False."
            )
        if not self._sharded and counted is False:  # nothing here waits for this process
            self._forget_forward()
            return losses.detach()[:0]
        if len(losses) == 0:
            return losses.detach()
        self._refuse_stray_gradients(
            "was set before engine.backward()",
            "Call optimizer.zero_grad() after each step.",
            drop=False,
        )
        clipped = self._clipped_sum(counted, rows_per_unit)
        try:
            # Products are float32 or better even if this call runs under autocast.
            with torch.autocast(losses.device.type, enabled=False):
                if unit_continues or self._large is not None:
                    self._large = self._large or LargeUnit()
                    clipped.backward(losses, self._large.add)
                    if unit_continues:
                        return losses.detach()[:0]
                    clipped.given, self._large = self._large.uses(), None
                norms = self._take(clipped, losses)
        except BaseException:
            self._spoiled = self._spoiled or clipped.adding or self._large is not None
            raise
        finally:
            self._forget_forward()
        norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        if isinstance(counted, Tensor):
            return norms[counted]
        return norms if counted else norms[:0]

    def _forget_forward(self) -> None:
        self._tape.forget_forward()
        self._buffers.restore()

    def _clipped_sum(self, counted: bool | Tensor, rows_per_unit: int) -> ClippedSum:
        """Return what one physical batch adds to the running sums."""
        return ClippedSum(
            self._tape,
            self._groups,
            self.clipping,
            self.clipping_norm * regrouping_share(self.regrouped),
            self._sums,
            check=partial(
                self._refuse_stray_gradients,
                "was written by autograd itself, bypassing clipping: the parameter is used outside "
                "the forward of the module that owns it",
                "Freeze it (requires_grad_(False)).",
            ),
            counted=counted,
            shards=self._shards,
            memory_ratio=self.memory_ratio,
            model_bytes=self._model_bytes,
            rows_per_unit=rows_per_unit,
            slack_cap=slack_cap(self.regrouped),
            gauge=self._gauge,
            watch=self._watch,
        )

    def _check_losses(self, losses: Tensor) -> None:
        if not self._restore:
            raise UnaccountedGradientError("engine.backward() works only inside `with engine:`.")
        if losses.dim() != 1 or not losses.is_floating_point():
            raise UnsupportedLossError(
                f"Expected per-example losses of shape (b,), got shape {tuple(losses.shape)}, "
                f"{losses.dtype}. Use reduction='none' and average each example over its own "
                "positions."
            )
        if len(losses) and self.compiled is not None and not self._tape.compiled_forwards:
            what = "a loss that does not call the model's forward"
            raise not_compiled(what, "nothing else is compiled")
        rows, each = self._tape.examples, self._tape.folded
        if len(losses) and rows is not None and len(losses) * each != rows:
            raise UnsupportedLossError(
                f"Expected one loss for each of the {rows // each} examples of the forward, got "
                f"{len(losses)}."
            )

    def _check_units(self, examples: int, rows: int, continues: bool) -> None:
        _validate.integer("rows_per_unit", rows, 1)
        in_parts = continues or self._large is not None
        if examples != rows if in_parts else examples % rows:
            raise _validate.invalid(
                "rows_per_unit",
                rows,
                f"to be the number of examples, {examples}, of a unit in several parts"
                if in_parts
                else f"to divide the {examples} examples into whole units",
                "A unit that is clipped in parts would move the sum by more than clipping_norm.",
            )
        if continues and self._sharded:
            raise UnsupportedModelError(
                "A unit has more rows than a physical batch, and this model is sharded: the other "
                "processes would wait for this one. Raise per_device_train_batch_size (and "
                "max_tokens_per_physical_batch), or lower max_rows_per_unit."
            )

    def _refuse_open_unit(self) -> None:
        """Raise if the rows of a unit were begun and not ended: it was not clipped."""
        if self._large is not None:
            raise UnaccountedGradientError(
                "The last engine.backward() had unit_continues=True, and the unit's other rows did "
                "not follow, so it is not in the sums. Pass its last rows with "
                "unit_continues=False."
            )

    def _take(self, clipped: ClippedSum, losses: Tensor) -> Tensor:
        """Process one physical batch; a subclass may compute something other than clipped sums."""
        # ``per_example`` is book-keeping of explicit gradients: no module has a rule.
        in_two = self.strategy == "two_pass" and clipped.given is None
        return (two_pass if in_two else book_keeping)(clipped, losses)

    def collect(self) -> dict[str, Tensor]:
        """Return the clipped sums since the last call, in float64, and reset them.

        They are keyed as in ``model.named_parameters()``, with zeros for unused parameters. The sum
        of a sharded parameter is a DTensor placed as the parameter is, and is that of the examples
        of all processes; the sum of any other parameter is that of this process's examples.
        """
        self._refuse_open_unit()
        if self._spoiled:
            raise UnaccountedGradientError(
                "engine.backward() failed while it added to the sums, so they hold only parts of "
                "some gradients. Leave the engine and start this logical batch again."
            )
        with torch.no_grad():
            sums, self._sums = self._sums, RunningSums()
            sums |= self._shards.collect(sums)
        return {
            name: sums[p] if p in sums else zero_sum(p.shape, p.device)
            for name, p in self._parameters.items()
        }

    # -- capturing forwards ---

    def _group(self) -> dict[nn.Parameter, int]:
        """Return each parameter's group; a tied parameter belongs to that of its first owner."""
        if self.clipping != "per_layer":
            return dict.fromkeys(self._parameters.values(), 0)
        groups: dict[nn.Parameter, int] = {}
        for module in self.model.modules():
            new = [p for p in own_parameters(module).values() if p not in groups]
            groups |= dict.fromkeys(new, len(set(groups.values())))
        return groups

    def _refuse_whole_parameters(self) -> None:
        """Raise for a subclass that sums something else: it needs each parameter whole."""
        if type(self)._take is not ClippingEngine._take:
            raise UnsupportedModelError(
                f"{type(self).__name__} needs each parameter whole in every process, but "
                "fully_shard spread this model's over processes. Use DP-SGD or LoRA with FSDP2, or "
                "run this method on one process or with data parallelism (DDP)."
            )

    def _install(self, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """Give one module a capturing forward, as an instance attribute."""
        self._tape.know(module, own)
        previous = module.__dict__.get("forward")
        rule = None if self.strategy == "per_example" else find_rule(module)
        if rule is None:
            self._refuse_uncompiled(module)
            if self._sharded:
                sharding.refuse_shards_within(module, self._tape.describe(module), own)
            run = partial(fallback_forward, self._tape, _original(previous), ())
        else:
            run = partial(rule, self._tape)
        self._replace(module, "forward", _CapturingForward(self._tape, run, previous))

    def _refuse_uncompiled(self, module: nn.Module) -> None:
        if self.compiled is not None:
            what = f"{self._tape.describe(module)}, which has no clipping rule"
            raise not_compiled(what, "it runs again for each example", "freeze its parameters")

    def _replace(self, module: nn.Module, name: str, function: Callable[..., object]) -> None:
        """Set an instance method; what the instance had before comes back at the end."""
        before = {name: module.__dict__[name]} if name in module.__dict__ else {}
        object.__setattr__(module, name, types.MethodType(function, module))

        def restore() -> None:
            module.__dict__.pop(name, None)
            module.__dict__.update(before)

        self._restore.append(restore)

    def _note_inputs(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self._tape.began:  # a second forward, which must not see what the first one left
            self._buffers.restore(graph=True)
        else:  # what the caller changed since is the caller's
            self._buffers.keep(self.model)
        for features in args:  # as sentence-transformers has them
            kwargs = {**kwargs, **features} if isinstance(features, Mapping) else kwargs
        self._tape.note_positions((*args, *kwargs.values()))
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "pixel_values")]
        for value in (*named, *args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() > 0:
                # These models fold (b, k, ...) into (b * k, ...), and know no examples any more.
                self._tape.folded = value.shape[1] if self._folds and value.dim() > 2 else 1
                self._tape.examples = value.shape[0] * self._tape.folded
                return

    def _refuse_stray_gradients(self, what: str, remedy: str, drop: bool = True) -> None:
        """Raise if a trainable parameter has a ``.grad``; no optimizer shall find it (drop)."""
        stray = [
            name for name, p in self._everything.items() if p.requires_grad and p.grad is not None
        ]
        for name in stray if drop else ():
            self._everything[name].grad = None
        if stray:
            count = f"{len(stray)} parameter{'s' * (len(stray) > 1)} affected"
            raise UnaccountedGradientError(f"`.grad` of {stray[0]!r} ({count}) {what}. {remedy}")


class _CapturingForward:
    """The forward of a module inside the engine; a deep copy of the module uses its own weights."""

    def __init__(self, tape: Tape, run: Method, previous: Method | None):
        self.tape, self.run, self.previous = tape, run, previous

    def __call__(self, module: nn.Module, *args: object, **kwargs: object) -> object:
        if self.tape.bypassed:
            return _original(self.previous)(module, *args, **kwargs)
        self.tape.note_positions((*args, *kwargs.values()))
        return self.run(module, *args, **kwargs)


def _original(previous: Method | None) -> Method:
    """Return the instance's own forward, or its class's, as a function of the module."""
    if previous is not None:
        return lambda module, *args, **kwargs: previous(*args, **kwargs)
    return lambda module, *args, **kwargs: type(module).forward(module, *args, **kwargs)
