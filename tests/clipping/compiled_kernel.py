"""The kernel compiled for GPUs that are not here, and what the compiler made of it."""

from __future__ import annotations

import re

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_dp.clipping.tensor_core_kernel import _product

PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
MULTIPLES_OF_16 = ("one_z", "one_g", "other_z", "other_g", "terms", "height", "width")


def main() -> None:
    names = _product.arg_names
    for capability, instruction in PRODUCTS.items():
        for along, across in (("i", "k"), ("k", "i")):
            one, other = f"one_{along}", f"other_{along.replace('i', 'j')}"
            known = {"ADD": True, "SIDE": 128, "TERMS": 64, one: 1, other: 1}
            types = dict.fromkeys(names, "i32") | dict.fromkeys(known, "constexpr")
            types |= {"one": "*bf16", "other": "*bf16", "weights": "*fp32", "out": "*fp32"}
            even = [*MULTIPLES_OF_16, f"one_{across}", f"other_{across.replace('i', 'j')}"]
            even += ["one", "other", "weights", "out"]
            made = compile(
                ASTSource(
                    fn=_product,
                    signature=types,
                    constexprs=known,
                    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
                ),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": 8, "num_stages": 3},
            )
            assert instruction in made.asm["ptx"], capability
            assert "cp.async.cg" in made.asm["ptx"], "loads do not run ahead of products"
            assert made.metadata.shared <= 99 * 1024, "more than the smallest of these GPUs has"
            # A product begins at zeros, and what it gives is multiplied before it is added.
            begins = re.findall(r"tt\.dot [^,]*, [^,]*, (%\w+)", made.asm["ttir"])
            assert begins
            for product in begins:
                assert re.search(rf"{product} = arith\.constant dense<0\.0", made.asm["ttir"])


main()
