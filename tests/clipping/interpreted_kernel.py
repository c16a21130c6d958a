"""The kernel in Triton's interpreter, against float64. Run with TRITON_INTERPRET=1.

The interpreter multiplies the bits of bfloat16 numbers as integers, so they come as float32 here.
"""

from __future__ import annotations

import torch

from hf_dp.clipping.tensor_core_kernel import launch

SHAPES = [(1, 3, 5, 7, 9), (2, 1, 200, 70, 65), (1, 4, 64, 130, 3), (3, 2, 129, 16, 16)]


def main() -> None:
    torch.manual_seed(0)
    for z, groups, terms, height, width in SHAPES:
        for add in (False, True):
            for turned in (False, True):
                one = torch.randn(z, groups, terms, height).bfloat16().float()
                other = torch.randn(z, groups, width, terms).bfloat16().float().mT
                if turned:
                    one = one.mT.contiguous().mT
                weights, out = torch.rand(z, groups), torch.randn(z, height, width)
                exact = torch.einsum(
                    "zg,zgki,zgkj->zij", weights.double(), one.double(), other.double()
                )
                exact += out * add
                launch(one, other, weights, out, add=add, terms=64)
                torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


main()
