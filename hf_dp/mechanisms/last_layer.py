"""The layer above DP-FP's noise, and the vectors that enter it (Du and Mi 2021, equations 8, 9).

A vector is computed from its own example alone, and nothing else of the example is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_dp.batches.loader import Drawn
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.self_check import in_training
from hf_dp.errors import DataError, SelfCheckError, UnsupportedArgumentError, UnsupportedModelError
from hf_dp.losses import base_model, classification_loss, problem_type, task_of
from hf_dp.plans.dp_fp import ForwardPlan
from hf_dp.run.precision import in_full_precision
from hf_dp.run.private_run import PrivateRun

_ONE_VECTOR = ("sequence_classification", "image_classification")
_CHUNK = 1024  # rows fetched at a time; among them, examples of similar length go together
# How far padding and neighbors may move a vector, relative to its norm (float32 rounds to 1e-6).
_TOLERANCE = 1e-5
_OR_DP_SGD = "or use privacy_mode='dp_sgd'."


class LastLayer:
    """The layer above the noise, with the loss of the vectors that enter it; refuses models whose
    vectors could hold other examples, on synthetic ones."""

    def __init__(self, run: PrivateRun, plan: ForwardPlan):
        self.run, self.plan, self.model = run, plan, run.model
        self.name, self.layer = last_layer(run)
        self.parameters = [p for p in self.layer.parameters() if p.requires_grad]
        self._blocks = plan.num_classes if plan.labels_in_vector else None
        self._check_layer()
        self._width = 0
        self._width = self._check_vectors()

    def _check_layer(self) -> None:
        own = set(self.layer.parameters())
        if not own or own & set(self.below()):
            raise UnsupportedModelError(
                f"The last layer {self.name!r} has no parameters of its own. Use a model whose "
                f"last layer shares none with the layers below the noise, {_OR_DP_SGD}"
            )
        if self._blocks is not None and type(self.layer) is not nn.Linear:
            raise UnsupportedModelError(
                f"labels_in_vector needs a linear last layer, and {self.name!r} is a "
                f"{type(self.layer).__name__}. Remove it, {_OR_DP_SGD}"
            )
        kind = problem_type(base_model(self.model), torch.zeros(1, dtype=torch.long))
        if self.plan.labels_in_vector and kind != "single_label_classification":
            raise UnsupportedArgumentError(
                "`labels_in_vector` protects one class per example, and this model's task is "
                f"{kind}. Remove it, {_OR_DP_SGD}"
            )
        if not self.parameters:
            raise UnsupportedModelError(
                f"The last layer {self.name!r} is frozen, so nothing would be learned from the "
                "released vectors. Unfreeze it."
            )

    def _check_vectors(self) -> int:
        """Check that a vector depends on its own example alone; return its width."""
        dtypes = {p.dtype for p in self.model.parameters()}
        low = sorted(str(each).removeprefix("torch.") for each in dtypes if each.itemsize < 4)
        if low:
            raise UnsupportedModelError(
                f"The model's weights are {', '.join(low)}, in which other examples of a batch "
                "change an example's rounding by more than the noise covers. Load the model in "
                "float32 (bf16=True in the arguments is for gradients)."
            )
        padded, alone = self.run.engine_check.batches()
        together, _ = self.vectors_of([padded])
        apart, _ = self.vectors_of(list(alone))
        backwards, _ = self.vectors_of([{name: value.flip(0) for name, value in padded.items()}])
        scale = apart.norm(dim=1).max().clamp_min(torch.finfo(torch.float32).tiny)
        for other in (together, backwards.flip(0)):
            same = other.shape == apart.shape
            if not same or not bool((other - apart).norm(dim=1).max() <= _TOLERANCE * scale):
                raise SelfCheckError(
                    "The representation of a synthetic example changes when other examples are in "
                    "its batch, which its noise does not cover. Check the attention mask and how "
                    f"the model pools, {_OR_DP_SGD}"
                )
        return apart.shape[1]

    def below(self) -> list[nn.Parameter]:
        """Return the parameters of all modules below the noise; one that is tied to the layer is
        among them."""
        inside = set(self.layer.modules())
        outside = [module for module in self.model.modules() if module not in inside]
        return [p for module in outside for p in module.parameters(recurse=False)]

    def clipped(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return what noise is added to: clipped vectors, (b, d), or with the label inside, (b, K
        d)."""
        rows = clip_vectors(rows, self.plan.vector_clipping_norm)
        if self._blocks is None:
            return rows
        check_classes(labels, self._blocks)
        return into_blocks(rows, labels, self._blocks)

    def gradients(self, released: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum of the losses of released vectors, (), and by parameter its gradient / the
        expected batch size. ``labels`` do not count where the vectors hold them."""
        released = released.to(next(self.layer.parameters()).dtype)
        with self.run.randomness.streams():
            if self._blocks is None:
                model = base_model(self.model)
                losses = classification_loss(model, self.layer(released), labels)
            else:
                losses = block_loss(self.layer, released)
            mean = losses.sum() / self.run.plan.expected_batch_size
            found = torch.autograd.grad(mean, self.parameters, allow_unused=True)
        return losses.detach().sum(), list(found)

    def vectors_of(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what enters the layer, (n, d) in float32 or better, without dropout, and labels
        (n, ...).

        Raises: SelfCheckError when the forward pass changed a buffer or parameter, which could then
            hold an example and would be saved.
        """
        vectors, labels = [], []
        entered: list[Tensor] = []

        def note(module: nn.Module, inputs: tuple[object, ...]) -> None:
            entered.append(one_vector_per_example(inputs, module))

        with (
            self.layer.register_forward_pre_hook(note),
            torch.no_grad(),
            in_full_precision(self.run.model),
            self.run.randomness.streams(),
            _nothing_kept(self.model),
            in_training(self.model, False),
        ):
            for batch in batches:
                entered.clear()
                # Only the forward pass is wanted, so labels of any kind are replaced by zeros.
                self.run.losses({**batch, "labels": torch.zeros_like(batch["labels"])})
                if len(entered) != 1 or len(entered[0]) != len(batch["labels"]):
                    raise SelfCheckError(
                        "Expected the model to call its last layer once per batch, with one "
                        f"representation per example; it made {len(entered)} call(s), or gave "
                        f"another number of representations. Use a model that does, {_OR_DP_SGD}"
                    )
                vectors.append(entered[0].to(accumulation_dtype(entered[0].dtype)))
                labels.append(batch["labels"].to(entered[0].device))
        if not vectors:
            device = self.run.device
            none = torch.zeros(0, dtype=torch.long, device=device)
            return torch.zeros(0, self._width, device=device), none
        return torch.cat(vectors), torch.cat(labels)

    def all_vectors(self) -> tuple[Tensor, Tensor]:
        """Return :meth:`vectors_of` for all training examples, in their order."""
        data, quiet = self.run.training_data(), self.run.options.batches.quiet
        cut, count = data.batches(), len(data.examples)
        whole: list[Tensor] = []  # vectors and labels
        for first in tqdm(
            range(0, count, _CHUNK), desc="Representations", unit_scale=_CHUNK, disable=quiet
        ):
            examples = data.examples.__getitems__(range(first, min(first + _CHUNK, count)))
            drawn = [Drawn(example, place) for place, example in enumerate(examples)]
            groups = cut.cut(examples, range(len(examples)))
            places = torch.tensor([first + i for group in groups for i in group])
            found = self.vectors_of(cut(drawn))
            whole = whole or [each.new_empty(count, *each.shape[1:]) for each in found]
            for all_of_them, part in zip(whole, found, strict=True):
                all_of_them[places.to(part.device)] = part
        vectors, labels = whole
        return vectors, labels


def last_layer(run: PrivateRun) -> tuple[str, nn.Module]:
    """Return name and module of the layer whose input is the representation."""
    padded, _ = run.engine_check.batches()
    return find_last_layer(run.model, padded, run.options.representation_module)


@torch.no_grad()
def find_last_layer(
    model: nn.Module, batch: Mapping[str, Tensor], name: str | None = None
) -> tuple[str, nn.Module]:
    """Find the layer from the representation to the logits; return its name and module.

    Without a ``name`` it is the linear layer that gives the logits, by one forward of synthetic
    examples: the ``classifier`` of BERT, DistilBERT, ALBERT, DeBERTa, ModernBERT and ViT, the
    ``out_proj`` in the heads of RoBERTa and ELECTRA.

    Raises: UnsupportedModelError for a task without a single representation, or when there is no
        such layer; the message lists layers that could be named.
    """
    if task_of(model) not in _ONE_VECTOR:
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} predicts for each token (or generates text), so "
            "no single representation of an example can be noised. Use privacy_mode='dp_sgd'."
        )
    modules = dict(model.named_modules())
    calls: dict[str, list[tuple[object, object]]] = {}  # what enters, and what comes out

    def note(known: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        calls.setdefault(known, []).append((inputs[0] if inputs else None, output))

    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with ExitStack() as hooks, in_training(model, False):
        for known, module in modules.items():
            if isinstance(module, nn.Linear) or known == name:
                hooks.enter_context(module.register_forward_hook(partial(note, known)))
        logits = model(**inputs).logits
    rows = len(next(iter(inputs.values())))
    could = [
        known
        for known, pairs in calls.items()
        if all(isinstance(h, Tensor) and h.dim() == 2 and len(h) == rows for h, _ in pairs)
    ]

    def gives_the_logits(known: str) -> bool:
        output = calls[known][0][1]
        once = len(calls[known]) == 1
        return once and isinstance(output, Tensor) and torch.equal(output, logits)

    found = [known for known in could if name in (None, known) and gives_the_logits(known)]
    if len(found) == 1:
        return found[0], modules[found[0]]
    wanted = "" if name is None else f"`representation_module`={name!r} to be "
    raise UnsupportedModelError(
        f"Expected {wanted}the last layer of {type(base_model(model)).__name__}: a layer that is "
        "used once, takes one vector per example and gives the logits. Layers that take one vector "
        f"per example: {could or 'none'}. Name the layer that gives the logits with "
        f"`representation_module`, {_OR_DP_SGD}"
    )


def one_vector_per_example(inputs: tuple[object, ...], layer: nn.Module) -> Tensor:
    """Return the layer's input, (b, d). Raises: UnsupportedModelError for another shape."""
    rows = inputs[0] if inputs else None
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise UnsupportedModelError(
            f"Expected {type(layer).__name__} to take one vector per example, of shape (batch, "
            f"features), got {shape}. Name another layer with `representation_module`."
        )
    return rows


def clip_vectors(rows: Tensor, clipping_norm: float) -> Tensor:
    """Return ``h min(1, C / |h|_2)`` for each vector h in (b, d) (Du and Mi 2021, equation 8),
    differentiably. A vector that is not finite becomes 0.
    """
    finite = torch.isfinite(rows.detach()).all(1, keepdim=True)
    rows = torch.where(finite, rows, torch.zeros_like(rows))
    # float64: squares of float32 values neither overflow nor vanish, and rounding stays far below
    # the plan's margin.
    norms = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    weights = (clipping_norm / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1)
    return (rows.double() * weights).to(rows.dtype)


@contextmanager
def noising(
    layer: nn.Module, clipping_norm: float, noise: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Clip and noise each vector that enters ``layer``, (b, d), inside, for forward and backward of
    one batch. Outside, and therefore in evaluation, the layer gets what the model computes.

    Gradient checkpointing may run the layer again in the backward pass. The layer then gets the
    very values that were released: fresh noise would be a second release, and the gradient would
    belong to no forward pass.
    """
    with layer.register_forward_pre_hook(partial(_enter, clipping_norm, noise, [])):
        yield


def _enter(
    clipping_norm: float,
    noise: Callable[[Tensor], Tensor],
    released: list[tuple[Tensor, Tensor]],
    module: nn.Module,
    inputs: tuple[object, ...],
) -> tuple[object, ...]:
    rows = one_vector_per_example(inputs, module)
    clipped = clip_vectors(rows.to(accumulation_dtype(rows.dtype)), clipping_norm)
    if not released:
        noised = noise(clipped)
        released.append((rows.detach(), noised.detach()))
    else:
        before, values = released[0]
        if before.shape != rows.shape or not torch.allclose(
            before, rows.detach(), rtol=1e-3, atol=1e-5
        ):
            raise UnsupportedModelError(
                f"The last layer ({type(module).__name__}) was given two different "
                "representations of one batch. Use a model that uses it once per forward pass, "
                f"{_OR_DP_SGD}"
            )
        noised = clipped + (values - clipped).detach()
    return (noised.to(rows.dtype), *inputs[1:])


def into_blocks(rows: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Put each vector into the block of its label, with zeros elsewhere: (b, K d), of the same
    norm."""
    blocks = rows.new_zeros(len(rows), num_classes, rows.shape[1])
    blocks[torch.arange(len(rows), device=rows.device), labels] = rows
    return blocks.flatten(1)


def block_loss(layer: nn.Module, vectors: Tensor) -> Tensor:
    """Compute the cross-entropy of a linear layer, (b,), from vectors whose blocks hide the label.

    The labels themselves are not needed. Let v hold h in the block of its class y, and noise
    everywhere. Then ``u = sum over blocks of v`` is h with noise, and the loss is
    ``logsumexp(W u + b) - sum_k <w_k, v_k>``. The second term has the mean <w_y, h>, so it takes
    the place of the label's logit. It is linear in v, so the label part of the gradient is
    unbiased. The gradient of a bias would need the label as well, so the bias stays as it is.
    """
    assert isinstance(layer, nn.Linear)
    blocks = vectors.view(len(vectors), layer.out_features, layer.in_features)
    bias = None if layer.bias is None else layer.bias.detach()
    logits = nn.functional.linear(blocks.sum(1), layer.weight, bias)
    return torch.logsumexp(logits, 1) - (blocks * layer.weight).sum((1, 2))


def check_classes(labels: Tensor, num_classes: int) -> None:
    """Raise DataError unless all labels are classes 0..K-1. (To treat others apart would reveal
    that there are some.)"""
    whole = not labels.is_floating_point() and labels.dim() == 1
    if not whole or bool(((labels < 0) | (labels >= num_classes)).any()):
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
