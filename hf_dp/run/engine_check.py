"""The self-check of a run, on synthetic examples: its engine against one-by-one gradients, and the
loss that trains against the model's own.

Evaluation reports the model's own loss, which a forward may weight, smooth or add to. Synthetic
examples alone must have the same under both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp import losses
from hf_dp.batches.loader import Read
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Batch, Example, Layout, numbers
from hf_dp.clipping import self_check
from hf_dp.clipping.compiled import Compiled
from hf_dp.clipping.draws import no_dropout
from hf_dp.clipping.self_check import (
    AUTOCAST_TOLERANCE,
    in_training,
    refuse_notice_of_length,
    refuse_state_of_length,
)
from hf_dp.clipping.sharding import is_sharded, reshard
from hf_dp.errors import UnsupportedLossError
from hf_dp.noise import untouched_generators
from hf_dp.run.options import Run
from hf_dp.run.precision import computes_in_full, in_full_precision
from hf_dp.run.training_data import padded_together

logger = logging.get_logger(__name__)

# In 16 bits classifiers' own losses are computed from rounded logits, ours are not.
_ROUNDED, _FULL = 2e-2, 1e-4
_MOST_CLASSES = 8


class EngineCheck:
    """Compares what the engine of a run computes with single examples.

    Attributes:
        has_own_examples: whether these are the user's own.
        alone: whether the last check ran as if no example had a neighbor.
        made_up: its examples as one batch.
        compiled: runs forwards of the run's known shapes; None: they run as they are.
    """

    def __init__(self, run: Run, synthetic: Callable[[], list[Example]] | None):
        self.run, self._synthetic = run, synthetic
        self.has_own_examples = synthetic is not None
        self.alone, self.made_up = False, None
        self.compiled: Compiled | None = None

    def check(self) -> None:
        """Raise SelfCheckError when the engine disagrees. In 16 bits the tolerance is wide, so
        where the model can compute in float32, it is compared in float32 first."""
        run = self.run
        with run.randomness.streams(), run.forward_context():
            padded, alone = self.batches()
            self.made_up, self.alone = padded, not self._have_neighbors
            logger.info("Clipping strategy: %s.", run.strategy())
            data = run.training_data()
            longest = self._on_main_of_shards(lambda: data.longest_beside(alone[0], run.model))
            precision = run.precision()
            if precision.is_rounded:
                with in_full_precision(run.model), untouched_generators():
                    if computes_in_full(run.model, lambda: run.loss_of(run.model, padded)):
                        self._compare(padded, alone, None)
            # accelerate's autocast is inside the model's forward, where self_check does not see it
            self._compare(padded, alone, AUTOCAST_TOLERANCE if precision.is_rounded else None)
            self._check_length(run.placed(longest), min(alone, key=numbers))
            self.compiled = self._compiled(alone) if run.options.torch_compile else None

    @property
    def _have_neighbors(self) -> bool:
        return self.run.options.batches.physical_batch_size > 1

    def _compiled(self, alone: list[Example]) -> Compiled:
        """Compile forward and backward for each shape of the run's batches, and compare them."""
        run, options = self.run, self.run.options
        logger.info("Compiling forward and backward, which may take minutes.")
        compiled = Compiled(options.torch_compile_backend or "inductor", options.torch_compile_mode)
        data = run.training_data()
        batches = data.batches()
        for filler in data.fillers:
            of_shape = replace(batches, fillers=[filler])
            fitting = [each for each in alone if of_shape.filler(each)] or [run.placed(filler)]
            examples = [fitting[place % len(fitting)] for place in range(batches.size)]
            padded = of_shape.padded([Read(of_shape.shaped(example)) for example in examples])
            self_check(
                run.model,
                run.loss_of,
                run.placed(padded),
                examples,
                clipping=run.plan.clipping,
                strategy=run.strategy(),
                rtol=AUTOCAST_TOLERANCE if run.precision().is_rounded else None,
                have_neighbors=False,
                compiled=compiled,
            )
        compiled.seal()
        return compiled

    def _compare(self, padded: Batch, alone: list[Example], rtol: float | None) -> None:
        run = self.run
        self_check(
            run.model,
            run.loss_of,
            padded,
            alone,
            clipping=run.plan.clipping,
            strategy=run.strategy(),
            rtol=rtol,
            have_neighbors=self._have_neighbors,
        )
        if not run.has_own_loss:
            refuse_another_loss(run.model, run.own_losses, alone[0], rounded=rtol is not None)

    def _check_length(self, longest: Example, short: Example) -> None:
        run = self.run
        if numbers(longest) <= numbers(short):
            return
        with untouched_generators():  # what is drawn later must not depend on the options
            refuse_state_of_length(run.model, run.loss_of, longest)
            # In 16 bits only examples of one shape are neighbors.
            padded = run.training_data().looked_over.layout.varies and not run.precision().is_short
            if padded and self._have_neighbors:
                beside, _ = padded_together([short, longest], run.padding())
                refuse_notice_of_length(run.model, run.loss_of, short, beside)

    def batches(self) -> tuple[Batch, list[Example]]:
        """Return the synthetic examples on the model's device: one padded batch, and one by one."""
        run = self.run
        data = run.training_data()  # which all processes look over together
        make = self._synthetic or (lambda: data.synthetic_examples(run.model))
        examples = self._on_main_of_shards(make)
        layout = data.looked_over.layout if self.has_own_examples else None
        by_themselves = self._have_neighbors and run.precision().is_short
        padded, alone = padded_together(examples, run.padding(), layout, by_themselves)
        return run.placed(padded), [run.placed(example) for example in alone]

    def own_examples(self) -> list[Example]:
        """Return the user's synthetic examples, each a batch of one; none if they are not given."""
        return self._synthetic() if self._synthetic and self.has_own_examples else []

    def _on_main_of_shards(self, make: Callable[[], Example]) -> Example:
        """Make the same in all processes of a sharded model, which check them together."""
        return self.run.processes.on_main(make) if is_sharded(self.run.model) else make()


# -- the loss that trains, and the model's own --


def refuse_another_loss(
    model: nn.Module,
    per_example_loss: Callable[[nn.Module, Batch], Tensor],
    example: Example,
    *,
    rounded: bool,
) -> None:
    """Raise UnsupportedLossError where a synthetic example, with other labels, has another loss by
    the model's own rule; warn of a model that has none."""
    if not _takes_labels(model):
        return _say_none(model)
    short = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    tolerance = _ROUNDED if rounded or short else _FULL
    with in_training(model), no_dropout(), torch.no_grad(), _same_config(model):
        labeled = list(_labeled(model, example))
        ours = [float(per_example_loss(model, dict(each))[0]) for each in labeled]
        for each, loss in zip(labeled, ours, strict=True):
            own = _own(model, each)
            if own is None:
                return _say_none(model)
            if not _close(own, loss, tolerance):
                raise _other(model, f"with {_said(model, each)}", own, loss)
        if losses.means_over_rows(model) and len(labeled) > 1:
            # Weights of classes cancel in a mean over one row.
            together = Padding().together(labeled, Layout())  # all of one shape
            own, mean = _own(model, together), sum(ours) / len(ours)
            same = own is not None and any(_close(own, x, tolerance) for x in (mean, sum(ours)))
            if own is not None and not same:
                said = ", ".join(_said(model, each) for each in labeled)
                raise _other(model, f"repeated with {said}", own, mean)
    reshard(model)


def _takes_labels(model: nn.Module) -> bool:
    takes = inspect.signature(type(losses.base_model(model)).forward).parameters
    return set(losses.targets_of(model)) <= takes.keys() or any(
        each.kind is each.VAR_KEYWORD for each in takes.values()
    )


def _say_none(model: nn.Module) -> None:
    logger.warning(
        "%s computes no loss of its own from labels, so the loss that trains was not compared "
        "with it, and evaluate() reports no loss.",
        type(losses.base_model(model)).__name__,
    )


def _labeled(model: nn.Module, example: Example) -> Iterator[Example]:
    """Yield the example with labels as training and evaluation read them, one after the other."""
    if losses.targets_of(model) != ("labels",):
        yield dict(example)
        return
    read = {**example, "labels": losses.labels_read(model, example["labels"])}
    for labels in _labels(model, read):
        yield {**read, "labels": labels}


def _said(model: nn.Module, example: Example) -> str:
    values = (f"{name} {example[name].tolist()}" for name in losses.targets_of(model))
    return f"the {' and '.join(values)}"


def _labels(model: nn.Module, example: Example) -> Iterator[Tensor]:
    """Yield each class; or the example's labels and others: a distribution, none in some places."""
    labels = losses.counted_labels(model, example)
    classes = getattr(losses.base_model(model).config, "num_labels", 1)
    if losses.task_of(model) == losses.CHOICE:
        classes = example["input_ids"].shape[1]
    if labels.dim() == 1 and not labels.is_floating_point() and classes > 1:
        for each in range(min(classes, _MOST_CLASSES)):
            yield torch.full_like(labels, each)
        return
    yield labels
    if labels.is_floating_point() and labels.dim() == 2 and labels.shape[1] > 1:
        yield torch.rand_like(labels).softmax(1)
    elif labels.dim() == 2 and not labels.is_floating_point():
        places = torch.arange(labels.shape[1], device=labels.device)
        if losses.task_of(model) == "token_classification":
            labels = (places % min(classes, _MOST_CLASSES)).expand_as(labels)
        # Every third of those that count, so that one counts still: the mean over none is NaN.
        nth = (labels != losses.IGNORED_LABEL).cumsum(1)
        yield labels.masked_fill(nth % 3 == 0, losses.IGNORED_LABEL)


def _own(model: nn.Module, example: Example) -> float | None:
    try:
        with losses.each_row_read_as_alone(model):  # as in evaluate()
            output = model(**losses.with_position_ids(model, dict(example)))
    except Exception as problem:
        raise UnsupportedLossError(
            f"{type(losses.base_model(model)).__name__}'s own loss fails on a synthetic example "
            f"with {_said(model, example)} ({type(problem).__name__}: {problem}), so "
            "evaluate() would fail, too. Give labels that the model takes, or override "
            "DPTrainer.compute_per_example_loss(self, model, inputs) to train a loss of your own."
        ) from problem
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _close(own: float, ours: float, tolerance: float) -> bool:
    return abs(own - ours) <= tolerance * max(abs(own), abs(ours), 1e-2)


def _other(model: nn.Module, which: str, own: float, ours: float) -> UnsupportedLossError:
    name = type(losses.base_model(model)).__name__
    return UnsupportedLossError(
        f"A synthetic example {which} has the loss {own:.6g} by {name} itself, which evaluate() "
        f"reports, and {ours:.6g} by the rule of hf_dp, which would train: the forward, its "
        "loss_function or a setting such as an auxiliary loss has another rule. To train the "
        "former, override DPTrainer.compute_per_example_loss(self, model, inputs) to return it, "
        "shape (b,), each from its example alone; to train the latter, remove the other rule from "
        "the model."
    )


@contextmanager
def _same_config(model: nn.Module) -> Iterator[None]:
    """Put back what a forward writes into a configuration, such as a problem_type."""
    configs = {id(found): found for m in model.modules() if (found := getattr(m, "config", None))}
    before = {key: dict(vars(each)) for key, each in configs.items() if hasattr(each, "__dict__")}
    try:
        yield
    finally:
        for key, values in before.items():
            vars(configs[key]).clear()
            vars(configs[key]).update(values)
