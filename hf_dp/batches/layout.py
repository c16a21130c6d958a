"""What collated examples have in common: names, types and shapes, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_dp.batches.structure import Example, leaves
from hf_dp.errors import DataError


@dataclass
class Leaf:
    """One tensor of every example, of shape (1, ...), or a plain value, of which ``dtype`` is the
    kind; with the smallest and largest size of each dimension seen."""

    dtype: str
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()
    is_tensor: bool = True

    @property
    def varying(self) -> tuple[int, ...]:
        """The dimensions in which examples differ."""
        return tuple(
            place for place, (low, high) in enumerate(zip(self.least, self.most)) if low != high
        )


@dataclass
class Layout:
    """The leaves by dotted name.

    :meth:`add` fills it, and :meth:`check` compares sampled examples with it.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        """Whether examples differ in any size."""
        return any(leaf.varying for leaf in self.leaves.values())

    def add(self, example: Example) -> None:
        """Take an example into account.

        Raises:
            DataError: it differs from the first one in more than lengths.
        """
        found = {name: _leaf(value) for name, value in leaves(example)}
        if not self.leaves:
            self.leaves = found
            return
        self._refuse_other(found)
        for name, leaf in found.items():
            known = self.leaves[name]
            if leaf.least != known.least or leaf.most != known.most:
                known.least = tuple(map(min, known.least, leaf.least))
                known.most = tuple(map(max, known.most, leaf.most))

    def check(self, example: Example) -> None:
        """Raise DataError if names, types or numbers of dimensions differ from the others'."""
        self._refuse_other({name: _leaf(value) for name, value in leaves(example)})

    def _refuse_other(self, found: dict[str, Leaf]) -> None:
        if found.keys() != self.leaves.keys():
            missing = sorted(self.leaves.keys() - found.keys())
            extra = sorted(found.keys() - self.leaves.keys())
            differs = [f"it lacks {missing}"] * bool(missing) + [f"it adds {extra}"] * bool(extra)
            raise DataError(
                f"collated, it has other columns than the first row: {' and '.join(differs)}. Give "
                "all rows the same columns."
            )
        for name, leaf in found.items():
            known = self.leaves[name]
            if leaf.dtype != known.dtype or len(leaf.least) != len(known.least):
                raise DataError(
                    f"`{name}` is {_describe(leaf)}, and {_describe(known)} in the first row. Give "
                    "all rows the same type and number of dimensions."
                )


def _leaf(value: object) -> Leaf:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        return Leaf(str(value.dtype).removeprefix("torch."), shape, shape)
    # The values of a list may differ in kind between examples; no stock model takes it as input.
    return Leaf("a list of values" if isinstance(value, list) else repr(value), is_tensor=False)


def _describe(leaf: Leaf) -> str:
    kind = f"a {leaf.dtype} tensor with {len(leaf.least)} dimensions"
    return kind if leaf.is_tensor else leaf.dtype
