"""Compare the loss that trains with the model's own, before the first draw.

Evaluation reports the model's own loss, which a forward may weight, smooth or add to. Made-up
examples alone must have the same under both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp.batches.structure import Batch, Example, combined
from hf_dp.clipping.dropout import no_dropout
from hf_dp.clipping.self_check import in_training
from hf_dp.clipping.sharding import reshard
from hf_dp.errors import UnsupportedLossError
from hf_dp.losses import (
    IGNORED_LABEL,
    base_model,
    counted_labels,
    labels_read,
    means_over_rows,
    targets_of,
    task_of,
    with_position_ids,
)

logger = logging.get_logger(__name__)

# In 16 bits classifiers' own losses are computed from rounded logits, ours are not.
_ROUNDED, _FULL = 2e-2, 1e-4
_MOST_CLASSES = 8


def refuse_another_loss(
    model: nn.Module,
    per_example_loss: Callable[[nn.Module, Batch], Tensor],
    example: Example,
    *,
    rounded: bool,
) -> None:
    """Raise UnsupportedLossError where a made-up example has another loss by the model's own rule;
    warn of a model that has none.

    Args:
        example: a batch of one in the format of the training set. Its labels are replaced.
        rounded: whether the forward computes in less than float32, even if no weight says so.
    """
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
        if means_over_rows(model) and len(labeled) > 1:
            # Weights of classes cancel in a mean over one row.
            own, mean = _own(model, _together(labeled)), sum(ours) / len(ours)
            same = own is not None and any(_close(own, x, tolerance) for x in (mean, sum(ours)))
            if own is not None and not same:
                said = ", ".join(_said(model, each) for each in labeled)
                raise _other(model, f"repeated with {said}", own, mean)
    reshard(model)


def _takes_labels(model: nn.Module) -> bool:
    takes = inspect.signature(type(base_model(model)).forward).parameters
    return set(targets_of(model)) <= takes.keys() or any(
        each.kind is each.VAR_KEYWORD for each in takes.values()
    )


def _say_none(model: nn.Module) -> None:
    logger.warning(
        "%s computes no loss of its own from labels, so what trains was not compared with it, and "
        "evaluate() reports no loss.",
        type(base_model(model)).__name__,
    )


def _labeled(model: nn.Module, example: Example) -> Iterator[Example]:
    """Yield the example with labels as training and evaluation read them, one after the other."""
    if targets_of(model) != ("labels",):
        yield dict(example)
        return
    read = {**example, "labels": labels_read(model, example["labels"])}
    for labels in _labels(model, read):
        yield {**read, "labels": labels}


def _said(model: nn.Module, example: Example) -> str:
    values = (f"{name} {example[name].tolist()}" for name in targets_of(model))
    return f"the {' and '.join(values)}"


def _labels(model: nn.Module, example: Example) -> Iterator[Tensor]:
    """Yield each class; or the example's labels and others: a distribution, none in some places."""
    labels = counted_labels(model, example)
    classes = getattr(base_model(model).config, "num_labels", 1)
    if labels.dim() == 1 and not labels.is_floating_point() and classes > 1:
        for each in range(min(classes, _MOST_CLASSES)):
            yield torch.full_like(labels, each)
        return
    yield labels
    if labels.is_floating_point() and labels.dim() == 2 and labels.shape[1] > 1:
        yield torch.rand_like(labels).softmax(1)
    elif labels.dim() == 2 and not labels.is_floating_point():
        places = torch.arange(labels.shape[1], device=labels.device)
        if task_of(model) == "token_classification":
            labels = (places % min(classes, _MOST_CLASSES)).expand_as(labels)
        # Every third of those that count, so that one counts still: the mean over none is NaN.
        nth = (labels != IGNORED_LABEL).cumsum(1)
        yield labels.masked_fill(nth % 3 == 0, IGNORED_LABEL)


def _own(model: nn.Module, example: Example) -> float | None:
    try:
        output = model(**with_position_ids(model, dict(example)))
    except Exception as problem:
        raise UnsupportedLossError(
            f"{type(base_model(model)).__name__}'s own loss fails on a made-up example with "
            f"{_said(model, example)} ({type(problem).__name__}: {problem}), so "
            "evaluate() would fail, too. Give labels that the model takes, or override "
            "DPTrainer.compute_per_example_loss(self, model, inputs) to train a loss of your own."
        ) from problem
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _together(labeled: list[Example]) -> Batch:
    def joined(name: str, values: list[Example]) -> object:
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        flat = isinstance(values[0], list)
        return [item for each in values for item in each] if flat else values[0]

    return combined(labeled, joined)


def _close(own: float, ours: float, tolerance: float) -> bool:
    return abs(own - ours) <= tolerance * max(abs(own), abs(ours), 1e-2)


def _other(model: nn.Module, which: str, own: float, ours: float) -> UnsupportedLossError:
    return UnsupportedLossError(
        f"A made-up example {which} has the loss {own:.6g} by {type(base_model(model)).__name__} "
        f"itself, which evaluate() reports, and {ours:.6g} by the rule of hf_dp, which would "
        "train: the forward, its loss_function or a setting such as an auxiliary loss has another "
        "rule. To train the former, override DPTrainer.compute_per_example_loss(self, model, "
        "inputs) to return it, shape (b,), each from its example alone; to train the latter, take "
        "the other rule off the model."
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
