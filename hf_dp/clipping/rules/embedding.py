"""``nn.Embedding`` and its subclasses.

The gradient of row k of the weight is the sum of output gradients at the positions that looked k
up. A subclass (Gemma's and BART's scaled embeddings, the shifted positions of OPT and BART) runs
its own forward; only its call of ``torch.nn.functional.embedding`` on its weight is captured, so
autograd differentiates what it does before and after. If a subclass uses its weight in any other
way, autograd writes a gradient for it, which the engine refuses.

``padding_idx`` gets no gradient, as in autograd. Indices shared by all examples, of shape (1, ...),
are expanded to the batch: their output gradient would arrive summed over examples, and no
per-example gradient could be recovered from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_dp.clipping.gradients import Lookups, PerExampleGradient
from hf_dp.clipping.rules.rule import Rule, Use
from hf_dp.clipping.tape import Tape
from hf_dp.errors import UnsupportedModelError


def _run(use: Use, input: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    # The engine refused ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` when it was entered.
    examples = use.tape.examples
    if examples is not None and examples > 1 and input.dim() >= 2 and input.shape[0] == 1:
        input = input.expand(examples, *input.shape[1:])
    return F.embedding(input, use.module.weight, use.module.padding_idx), (input,)


def _gradients(use: Use, kept: tuple[Tensor], grad: Tensor) -> dict[str, PerExampleGradient]:
    tokens = kept[0].reshape(len(kept[0]), -1)
    grad = grad.reshape(*tokens.shape, -1)
    padding = use.module.padding_idx
    if padding is not None:
        grad = grad.masked_fill((tokens == padding)[..., None], 0)
    return {"weight": Lookups(tokens, grad)}


embedding = Rule(_run, _gradients, flattens=False)


def embedding_subclass(tape: Tape, module: nn.Embedding, *args: Any, **kwargs: Any) -> Any:
    """Run the subclass's own forward and capture its lookups."""
    with _CapturedLookups(tape, module):
        return type(module).forward(module, *args, **kwargs)


class _CapturedLookups(TorchFunctionMode):
    def __init__(self, tape: Tape, module: nn.Embedding):
        super().__init__()
        self.tape, self.module = tape, module

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and len(args) > 1 and args[1] is self.module.weight:
            self._refuse_other_options(*args, **kwargs)
            return embedding(self.tape, self.module, args[0])
        return func(*args, **kwargs)

    def _refuse_other_options(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        """Raise for options other than the module's own, which are those that are captured."""
        if (
            padding_idx != self.module.padding_idx
            or max_norm is not None
            or scale_grad_by_freq
            or sparse
        ):
            raise UnsupportedModelError(
                f"{self.tape.describe(self.module)} calls F.embedding with "
                f"padding_idx={padding_idx}, max_norm={max_norm}, "
                f"scale_grad_by_freq={scale_grad_by_freq}, sparse={sparse}. Expected its own "
                f"padding_idx={self.module.padding_idx} and no other option. Change the call, or "
                "freeze the module (requires_grad_(False))."
            )
