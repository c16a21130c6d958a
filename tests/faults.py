"""Faults that let a run tell more than it claims, for audits of whole runs and for single tests."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from hf_dp.batches.padding import Padding
from hf_dp.clipping import clipped_sum, norms
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.noise import SecretRandomness
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.run.ledger import RunLedger
from hf_dp.run.training_data import TrainingData

CLASSES = 2  # of the tests' task; the head alone has as many outputs
Plant = Callable[[Any], None]  # it gets something with `setattr(where, name, value)`

_noise, _draw = SecretRandomness.gaussian_like, PoissonSampler.draw
_weights, _mean = clipped_sum.clipping_weights, DpSgd.gradients
_group = ClippingEngine._group
_kept = clipped_sum.ClippedSum._kept
_append = RunLedger.append
_fill = Padding.fill


def noise_times(factor: float) -> Plant:
    return _put(SecretRandomness, "gaussian_like", lambda self, *a: factor * _noise(self, *a))


def same_noise_in_each_step(patch: Any) -> None:
    kept: dict[Any, Any] = {}

    def same(self, tensor, std):
        shape = (tuple(tensor.shape), tensor.dtype)
        return kept.setdefault(shape, _noise(self, tensor, std))

    patch.setattr(SecretRandomness, "gaussian_like", same)


def no_noise_on_every_other_tensor(patch: Any) -> None:
    calls: list[int] = []

    def some(self, tensor, std):
        calls.append(1)
        return _noise(self, tensor, std) * (len(calls) % 2)

    patch.setattr(SecretRandomness, "gaussian_like", some)


def drawn_times(count: int) -> Plant:
    def draw(self):
        return sorted({row for _ in range(count) for row in _draw(self)})

    return _put(PoissonSampler, "draw", draw)


def same_draw_in_each_step(patch: Any) -> None:
    kept: list[list[int]] = []

    def same(self):
        kept.append(kept[0] if kept else _draw(self))
        return kept[-1]

    patch.setattr(PoissonSampler, "draw", same)


def shuffled(patch: Any) -> None:
    """Each row once an epoch, as in the stock Trainer."""

    def epochs(self):
        size, order = round(self.num_examples * self.sample_rate), []
        for _ in range(self.steps):
            if len(order) < size:
                order = torch.randperm(self.num_examples).tolist()
            batch, order = order[:size], order[size:]
            yield sorted(batch)

    patch.setattr(PoissonSampler, "__iter__", epochs)


def head_unclipped(patch: Any) -> None:
    def kept(self, parameter, use, decision):
        found = _kept(self, parameter, use, decision)
        of_head = len(parameter) == CLASSES
        return clipped_sum.Weights(torch.ones_like(found.values)) if of_head else found

    patch.setattr(clipped_sum.ClippedSum, "_kept", kept)


def each_layer_clipped_to_c(patch: Any) -> None:
    """Per-layer clipping without its division by the root of the number of layers."""

    def by_layer(self):
        self.clipping = "per_layer"
        return _group(self)

    patch.setattr(ClippingEngine, "_group", by_layer)
    patch.setattr(norms, "math", mock.Mock(sqrt=lambda layers: 1.0))


def divided_by_what_was_drawn(patch: Any) -> None:
    """An example fewer makes each of the others larger."""
    drawn: list[int] = []

    def noted(self):
        batch = _draw(self)
        drawn.append(max(len(batch), 1))
        return batch

    def realized(self, clipped, release):
        scale = self.run.plan.expected_batch_size / drawn[-1]
        return {p: g * scale for p, g in _mean(self, clipped, release).items()}

    patch.setattr(PoissonSampler, "draw", noted)
    patch.setattr(DpSgd, "gradients", realized)


def half_of_the_steps_unrecorded(patch: Any) -> None:
    calls: list[int] = []

    def forgetful(self, event, purpose):
        calls.append(1)
        if len(calls) % 2:
            _append(self, event, purpose)

    patch.setattr(RunLedger, "append", forgetful)
    patch.setattr(
        "hf_dp.features.always.StopBeforeTarget.on_step_end", lambda *args, **kwargs: None
    )


def collate_together(patch):
    """The user's collator gets all rows of a draw and pads them itself, as in the stock Trainer."""

    class Together:
        def __init__(self, examples, draws):
            self.examples, self.draws = examples, draws

        def __len__(self):
            return len(self.draws)

        def __iter__(self):
            for indices in self.draws:
                with self.examples.randomness.streams():
                    self.examples.randomness.reseed()
                    rows = [self.examples.dataset[index] for index in indices]
                    yield [dict(self.examples.collator(rows))] if rows else []

    def loader(self, sampler, one_shape, watched=None):
        return Together(self.examples, sampler if watched is None else watched(sampler))

    patch.setattr(TrainingData, "loader", loader)


def _put(where: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(where, name, value)


FAULTS: dict[str, Plant] = {
    "none": lambda patch: None,
    "no noise": noise_times(0.0),
    "a tenth of the noise": noise_times(0.1),
    "half the noise": noise_times(0.5),
    "no noise on every other tensor": no_noise_on_every_other_tensor,
    "the same noise in each step": same_noise_in_each_step,
    "uniform noise": _put(SecretRandomness, "gaussian_like", lambda self, tensor, std: (torch.rand_like(tensor) - 0.5) * std * 12**0.5),
    "all rows in each step": _put(PoissonSampler, "draw", lambda self: list(range(self.num_examples))),
    "rows drawn four times as often": drawn_times(4),
    "rows drawn twice as often": drawn_times(2),
    "the same draw in each step": same_draw_in_each_step,
    "shuffled epochs": shuffled,
    "half of the steps unrecorded": half_of_the_steps_unrecorded,
    "gradients are not clipped": _put(clipped_sum, "clipping_weights", lambda *a: torch.ones_like(_weights(*a))),
    "clipped to twice C": _put(clipped_sum, "clipping_weights", lambda kind, norms, c, *more: _weights(kind, norms, 2 * c, *more)),
    "the head is not clipped": head_unclipped,
    "each layer is clipped to C": each_layer_clipped_to_c,
    "divided by what was drawn": divided_by_what_was_drawn,
    "collated together": collate_together,
    "padding attended to": _put(Padding, "fill", lambda self, name, leaf: 1 if "mask" in name else _fill(self, name, leaf)),
}  # fmt: skip


def no_self_check(patch: Any) -> None:
    for check in ("self_check", "refuse_notice_of_length", "refuse_state_of_length"):
        patch.setattr(f"hf_dp.run.engine_check.{check}", lambda *args, **kwargs: None)


class _Patch(contextlib.ExitStack):
    def setattr(self, where: Any, name: Any, value: Any = None) -> None:
        if isinstance(where, str):
            self.enter_context(mock.patch(where, name))
        else:
            self.enter_context(mock.patch.object(where, name, value))


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault; without the check of the first batch, which would see some."""
    with _Patch() as patch:
        no_self_check(patch)
        FAULTS[name](patch)
        yield
