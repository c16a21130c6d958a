"""The representations of private examples.

Each is computed from its own example alone, and nothing else of the example is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_dp.batches.loader import Drawn
from hf_dp.clipping.rounding import full_precision
from hf_dp.errors import DataError, SelfCheckError, UnsupportedModelError
from hf_dp.mechanisms.dp_fp.representation import one_vector_per_example
from hf_dp.run.private_run import PrivateRun

_CHUNK = 1024  # rows fetched at a time; among them, examples of similar length go together
# How far padding and neighbors may move a vector, relative to its norm (float32 rounds to 1e-6).
_TOLERANCE = 1e-5


def check_representations(run: PrivateRun, layer: nn.Module) -> int:
    """Check that a vector depends on its own example alone; return its width.

    The check runs on synthetic examples, in evaluation mode. If a neighbor could move a vector, it
    would enter what is noised for one example alone. The check also fails if the forward pass
    changes the model.

    Raises:
        SelfCheckError: the check failed.
        UnsupportedModelError: weights have 16 bits, whose rounding moves vectors by more than the
            margin.
    """
    low = sorted(
        {
            str(p.dtype).removeprefix("torch.")
            for p in run.model.parameters()
            if p.dtype.itemsize < 4
        }
    )
    if low:
        raise UnsupportedModelError(
            f"The model's weights are {', '.join(low)}. An example's vector would be rounded "
            "differently beside other examples, by more than the noise is scaled to. Load the "
            "model in float32 (bf16=True in the arguments is for gradients)."
        )
    padded, alone = run.check_batches()
    together, _ = vectors_of(run, layer, [padded])
    apart, _ = vectors_of(run, layer, list(alone))
    backwards, _ = vectors_of(run, layer, [{name: value.flip(0) for name, value in padded.items()}])
    scale = apart.norm(dim=1).max().clamp_min(torch.finfo(torch.float32).tiny)
    for other in (together, backwards.flip(0)):
        if other.shape != apart.shape or not bool(
            (other - apart).norm(dim=1).max() <= _TOLERANCE * scale
        ):
            raise SelfCheckError(
                "On synthetic examples, the representation of an example changes when other "
                "examples stand beside it. Noise for one example would not cover what it does to "
                "its neighbors' vectors. Check the attention mask and how the model pools, or use "
                "privacy_mode='dp_sgd'."
            )
    return apart.shape[1]


def vectors_of(
    run: PrivateRun, layer: nn.Module, batches: Sequence[Any], width: int = 0
) -> tuple[Tensor, Tensor]:
    """Return what enters ``layer``, (n, d) in float32 or better, and labels (n, ...).

    Both are in the order of the batches. Dropout is off.

    Raises: SelfCheckError when the forward pass changed a buffer or parameter, which could then
        hold an example and would be saved.
    """
    vectors, labels = [], []
    entered: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        entered.append(one_vector_per_example(inputs, module))

    model = run.model
    handle = layer.register_forward_pre_hook(note)
    training = model.training
    try:
        with torch.no_grad(), full_precision(), run.randomness.streams(), _nothing_kept(model):
            model.eval()
            for batch in batches:
                entered.clear()
                # Only the forward pass is wanted, so labels of any kind are replaced by zeros.
                run.losses({**batch, "labels": torch.zeros_like(batch["labels"])})
                if len(entered) != 1 or len(entered[0]) != len(batch["labels"]):
                    raise SelfCheckError(
                        "Expected the model to call its last layer once per batch, with one "
                        f"representation per example; it made {len(entered)} call(s), or gave "
                        "another number of representations. Use a model that does, or "
                        "privacy_mode='dp_sgd'."
                    )
                (seen,) = entered
                vectors.append(seen if seen.dtype == torch.float64 else seen.float())
                labels.append(batch["labels"].to(seen.device))
    finally:
        handle.remove()
        model.train(training)
    if not vectors:
        device = run.device
        none = torch.zeros(0, dtype=torch.long, device=device)
        return torch.zeros(0, width, device=device), none
    return torch.cat(vectors), torch.cat(labels)


def all_vectors(run: PrivateRun, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return :func:`vectors_of` for all training examples, in their order.

    Raises: DataError when the data are not those that were planned for.
    """
    data = run.training_data()
    cut = data.batches()
    count = len(data.examples)
    vectors, labels = None, None
    quiet = run.options.batches.quiet
    for first in tqdm(
        range(0, count, _CHUNK), desc="Representations", unit_scale=_CHUNK, disable=quiet
    ):
        examples = data.examples.__getitems__(range(first, min(first + _CHUNK, count)))
        drawn = [Drawn(example, place) for place, example in enumerate(examples)]
        groups = cut.cut(examples, range(len(examples)))
        found, said = vectors_of(run, layer, cut(drawn))
        if vectors is None or labels is None:
            vectors = found.new_empty(count, found.shape[1])
            labels = said.new_empty(count, *said.shape[1:])
        places = torch.tensor([first + i for group in groups for i in group], device=found.device)
        vectors[places], labels[places] = found, said
    assert vectors is not None and labels is not None  # a training set has two rows at least
    return vectors, labels


def check_classes(labels: Tensor, num_classes: int) -> None:
    """Raise DataError unless all labels are classes 0..K-1.

    A special treatment of other labels would reveal that there are some.
    """
    whole = not labels.is_floating_point() and labels.dim() == 1
    if not whole or (labels.numel() and bool(((labels < 0) | (labels >= num_classes)).any())):
        raise DataError(
            f"Expected protected labels to be whole numbers from 0 to {num_classes - 1}, one for "
            "each example; some are not. Remove rows without a class, or correct "
            "config.num_labels."
        )


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    before = _versions(model)
    # Values as well as versions: a write to `.data` does not change the version.
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    after = _versions(model)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    changed |= {
        name
        for name, buffer in model.named_buffers()
        if name in values and not torch.equal(buffer.nan_to_num(), values[name].nan_to_num())
    }
    if changed:
        raise SelfCheckError(
            f"The model's forward pass changed {sorted(changed)}: values computed from private "
            "rows would be saved with the model, without noise. Freeze or remove these statistics."
        )


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}
