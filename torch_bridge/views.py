"""Arrays that are not there yet: shape, dtype, and `read(index, out)`, which fills `out` with a box of them.

View          the protocol; Views are a tuple of them
ArrayView     a numpy array as a view
read_all      a view as an array
whole, box_shape, slices, boxes    indexes: a tuple of (start, stop), one a dim, never empty
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Range = tuple[int, int]
Index = tuple[Range, ...]
Shape = tuple[int, ...]


class View(Protocol):
    """An array that can be read box by box."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out`, of the box's shape and this dtype, contiguous or not."""
        ...


Views = tuple[View, ...]


def whole(shape: Sequence[int]) -> Index:
    """The index of everything."""
    return tuple((0, size) for size in shape)


def box_shape(index: Index) -> Shape:
    return tuple(stop - start for start, stop in index)


def slices(index: Index) -> tuple[slice, ...]:
    """An index as numpy takes it."""
    return tuple(slice(start, stop) for start, stop in index)


def read_all(view: View) -> np.ndarray:
    """A view as an array."""
    out = np.empty(view.shape, view.dtype)
    if out.size:
        view.read(whole(view.shape), out)
    return out


@dataclass(frozen=True, eq=False)
class ArrayView:
    """A numpy array as a view."""

    array: np.ndarray

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        out[...] = self.array[slices(index)]


def boxes(start: int, stop: int, sizes: Shape) -> Iterator[Index]:
    """The run [start, stop) of flattened dims `sizes` as boxes, in order."""
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(sizes[1:])
    while start < stop:
        outer, offset = divmod(start, inner)
        if offset == 0 and stop - start >= inner:
            last = stop // inner
            yield ((outer, last), *whole(sizes[1:]))
            start = last * inner
        else:
            end = min(stop, (outer + 1) * inner)
            for box in boxes(offset, end - outer * inner, sizes[1:]):
                yield ((outer, outer + 1), *box)
            start = end
