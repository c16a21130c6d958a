"""``nn.Conv2d``: an affine map of the patch under the kernel.

Its weight gradient is ``sum_t g_t patch_t^T``, t over the output positions. In the patch embedding
of a vision transformer the patches do not overlap and together are no larger than the image.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient, summed
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.rules.pair import PairRule


def _keep_input(module: nn.Conv2d, input: Tensor) -> tuple[Tensor]:
    return (input,)


def _conv2d_gradients(
    module: nn.Conv2d, kept: tuple[Tensor, ...], grad: Tensor
) -> dict[str, Tensor | PerExampleGradient]:
    padding = module.padding
    assert not isinstance(padding, str)  # such a module has no rule
    x = kept[0].to(grad.dtype)
    # (b, T, in * kh * kw)
    patches = F.unfold(x, module.kernel_size, module.dilation, padding, module.stride).mT
    output_grads = grad.flatten(2).mT  # (b, T, out)
    return {
        "weight": OuterProducts(output_grads, patches),
        "bias": summed(output_grads, accumulation_dtype(grad.dtype)),
    }


conv2d = PairRule(_keep_input, _conv2d_gradients, flattens=False)


def is_plain_conv2d(module: nn.Conv2d) -> bool:
    """Return whether the rule covers this module: one group, and zeros for padding."""
    return (
        module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )
